"""OpenVINO GenAI. The argument is `alone` or `speculative`: a pipeline has its draft from the start.

Settings: {} for the target alone, {"num_assistant_tokens": K} or {"assistant_confidence_threshold": t}.

Arithmetic and cache are this engine's defaults: bfloat16 where the processor has it, and 8 bits. What was read for one request
is not kept for the next one, as in the other engines; and in this version sampling with a draft fails where it is kept.
"""

import sys
from typing import Any

from peers.protocol import Answer, Load, Request, serve


class OpenVINO:
    """One pipeline; token ids in and out."""

    def __init__(self, kind: str):
        self.is_speculative = kind == "speculative"
        self.pipeline: Any = None

    def load(self, load: Load) -> dict[str, str]:
        import openvino  # pyright: ignore[reportMissingImports]
        import openvino_genai as genai  # pyright: ignore[reportMissingImports]

        self.loaded, self.pipeline = load, None
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": load.threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
        more: dict[str, Any] = {"ATTENTION_BACKEND": "SDPA"}  # the faster one for the target alone; a draft needs the other
        if self.is_speculative:
            scheduler = genai.SchedulerConfig()
            scheduler.enable_prefix_caching = False
            draft = genai.draft_model(f"{load.folder}/draft-ov-{load.dtype}", "CPU", **options)
            more = {"scheduler_config": scheduler, "draft_model": draft}
        self.pipeline = genai.LLMPipeline(f"{load.folder}/target-ov-{load.dtype}", "CPU", **options, **more)
        return {"openvino": openvino.__version__.split("-")[0], "openvino-genai": genai.__version__.split("-")[0]}

    def pids(self) -> list[int]:
        return []

    def run(self, request: Request) -> Answer:
        import numpy as np
        import openvino  # pyright: ignore[reportMissingImports]
        import openvino_genai as genai  # pyright: ignore[reportMissingImports]

        config = genai.GenerationConfig(max_new_tokens=request.max_tokens, ignore_eos=True, **request.options)
        if request.temperature > 0:
            config.do_sample, config.temperature, config.rng_seed = True, request.temperature, request.seed
            config.top_p = request.top_p
        config.stop_token_ids = set(request.ends)
        ids = np.array([request.prompt], dtype=np.int64)
        inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        try:
            found = self.pipeline.generate(inputs, config)
        except RuntimeError:
            self.load(self.loaded)  # after a failure a pipeline goes on without its draft
            raise
        tokens = [int(t) for t in found.tokens[0]]
        steps = len(found.perf_metrics.raw_metrics.m_batch_sizes)
        drafted = found.extended_perf_metrics.get_num_draft_tokens() if self.is_speculative else 0
        return Answer(tokens=tokens, steps=steps, drafted=drafted, accepted=len(tokens) - steps)


if __name__ == "__main__":
    serve(OpenVINO(sys.argv[1]))
