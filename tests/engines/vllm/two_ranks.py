"""A program: greedy answers of an engine on two tensor-parallel ranks, to the first prompt and then to all of them together.
Prints tokens of the latter and lengths of rounds, as JSON.

    python two_ranks.py DRAFT PROMPTS.json

The head lies beside the draft, and nothing but that is said to the plugin: the policy is the cost rule, on costs that the
first rank measures while it serves.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}


def main(draft: str, prompts: Path) -> None:
    from vllm import LLM, SamplingParams

    from specdecpp.loading.pair import REFERENCE

    llm = LLM(
        model=str(REFERENCE / "target"),
        dtype="float32",
        max_model_len=256,
        enforce_eager=True,
        tensor_parallel_size=2,
        async_scheduling=False,
        per_request_spec_decode_metrics="detailed",
        speculative_config={
            "method": "draft_model",
            "model": draft,
            "num_speculative_tokens": 8,
            "draft_tensor_parallel_size": 2,
        },
        additional_config={"specdecpp": {}},
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    texts = json.loads(prompts.read_text())
    alone, together = ([o.outputs[0] for o in llm.generate(some, sampling, use_tqdm=False)] for some in (texts[:1], texts))
    found = {
        "tokens": [list(o.token_ids) for o in together],
        "drafted": [o.spec_decode_metrics.per_step_drafted for o in (*alone, *together)],
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
