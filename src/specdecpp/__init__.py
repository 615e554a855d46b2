"""specdecpp: adaptive speculative decoding that keeps the target model's exact distribution.

Public names are loaded on first use, so `import specdecpp` costs nothing and does not import torch.

    import specdecpp as sd
    decoder = sd.Decoder(sd.load_pair())
    print(decoder.generate("Why is the sky blue?", max_tokens=64, seed=0).text)
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.3.0"

if TYPE_CHECKING:
    from specdecpp.decoder import Decoder, Output
    from specdecpp.errors import BackendError, DataError, HeadError, PairError, PromptError, SpecdecError, UnsoundError
    from specdecpp.head import AcceptanceHead
    from specdecpp.integrations.transformers import custom_generate
    from specdecpp.loading.pair import Pair, load_pair
    from specdecpp.policies import CostAware, CumulativeConfidence, Fixed, NoDraft, Policy, SpecDecPP
    from specdecpp.sampling import Sampling

_HOMES = {
    "specdecpp.decoder": ("Decoder", "Output"),
    "specdecpp.errors": ("BackendError", "DataError", "HeadError", "PairError", "PromptError", "SpecdecError", "UnsoundError"),
    "specdecpp.head": ("AcceptanceHead",),
    "specdecpp.integrations.transformers": ("custom_generate",),
    "specdecpp.loading.pair": ("Pair", "load_pair"),
    "specdecpp.policies": ("CostAware", "CumulativeConfidence", "Fixed", "NoDraft", "Policy", "SpecDecPP"),
    "specdecpp.sampling": ("Sampling",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022 (grouped by the order of use)
    "load_pair",
    "Pair",
    "Decoder",
    "Output",
    "Sampling",
    "Policy",
    "Fixed",
    "NoDraft",
    "CumulativeConfidence",
    "SpecDecPP",
    "CostAware",
    "AcceptanceHead",
    "custom_generate",
    "SpecdecError",
    "PairError",
    "BackendError",
    "HeadError",
    "PromptError",
    "DataError",
    "UnsoundError",
]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'specdecpp' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
