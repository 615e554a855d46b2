"""Imported by a process before it forks: what each fork would import anew, for three seconds of some five."""

import pandas  # noqa: F401
import sympy  # noqa: F401
import torch._dynamo
import torch.distributed.tensor  # noqa: F401
import transformers.models.llama.modeling_llama
import transformers.quantizers.auto  # noqa: F401
