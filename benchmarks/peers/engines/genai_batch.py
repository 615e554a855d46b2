"""OpenVINO GenAI's continuous batching: the target alone. Settings: {}.

Arithmetic, cache and weights as in `genai`; what was read for one request is not kept for the next one.
"""

from collections.abc import Sequence
from typing import Any

from peers.protocol import Answer, Load, Request, serve

CACHE_GB = 1


class Batching:
    """A pipeline for each number of requests at once."""

    def load(self, load: Load) -> dict[str, str]:
        import openvino_genai as genai  # pyright: ignore[reportMissingImports]

        self.loaded, self.at_once, self.pipeline = load, 0, None
        return {"openvino-genai": genai.__version__.split("-")[0]}

    def pids(self) -> list[int]:
        return []

    def run(self, request: Request) -> Answer:
        self.ready(1)
        return Answer(tokens=[0] * self.run_all([request])[0], steps=request.max_tokens)

    def ready(self, at_once: int) -> None:
        if at_once == self.at_once:
            return
        import openvino_genai as genai  # pyright: ignore[reportMissingImports]

        load, scheduler = self.loaded, genai.SchedulerConfig()
        scheduler.enable_prefix_caching, scheduler.max_num_seqs, scheduler.cache_size = False, at_once, CACHE_GB
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": load.threads, "NUM_STREAMS": 1}
        self.pipeline = None
        self.pipeline = genai.ContinuousBatchingPipeline(f"{load.folder}/target-ov-{load.dtype}", scheduler, "CPU", options)
        self.at_once = at_once

    def run_all(self, requests: Sequence[Request]) -> list[int]:
        import numpy as np
        import openvino  # pyright: ignore[reportMissingImports]
        import openvino_genai as genai  # pyright: ignore[reportMissingImports]

        configs = [genai.GenerationConfig(max_new_tokens=r.max_tokens, ignore_eos=r.ignore_eos) for r in requests]
        for config, request in zip(configs, requests, strict=True):
            if request.temperature > 0:
                config.do_sample, config.temperature, config.rng_seed = True, request.temperature, request.seed
        ids = [openvino.Tensor(np.array([request.prompt], dtype=np.int64)) for request in requests]
        pipeline: Any = self.pipeline
        return [len(found.m_generation_ids[0]) for found in pipeline.generate(ids, configs)]


if __name__ == "__main__":
    serve(Batching())
