"""vLLM's scheduler with our lengths: `Lengths` stands in the place of its table by batch size, and observes every output. They
are logged once a minute; what was accepted is in vLLM's own metrics, by request too."""

from time import perf_counter
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # pyright: ignore[reportMissingImports]
from vllm.v1.core.sched.scheduler import Scheduler  # pyright: ignore[reportMissingImports]

from specdecpp.integrations.vllm.configuring import logger
from specdecpp.integrations.vllm.lengths import Lengths

REPORT_S = 60


class _Adaptive:
    dynamic_sd_lookup: Any
    vllm_config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        trims = self.vllm_config.speculative_config.enable_adaptive_verification
        self.lengths = Lengths(sorted(set(self.dynamic_sd_lookup[1:])), trims=trims)
        self.dynamic_sd_lookup = self.lengths
        self._reported = perf_counter()

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        now = perf_counter()
        slots = scheduler_output.scheduled_spec_decode_tokens
        num_scheduled = scheduler_output.num_scheduled_tokens
        steps, widths = [], set()
        for i, request in enumerate(model_runner_output.req_ids):
            num_slots, sampled = len(slots.get(request, ())), model_runner_output.sampled_token_ids
            widths.add(num_slots if num_scheduled[request] == 1 + num_slots else None)
            if num_slots and sampled and len(sampled[i]):
                steps.append((num_slots, len(sampled[i]) - 1))
        found = super().update_from_output(scheduler_output, model_runner_output)  # pyright: ignore[reportAttributeAccessIssue]
        if num_scheduled:
            self.lengths.observe(now, len(num_scheduled), widths.pop() if len(widths) == 1 else None, steps)
        if now > self._reported + REPORT_S and (text := self.lengths.report()):
            self._reported = now
            logger.info("specdecpp: draft tokens a step, %s", text)
        return found


class AdaptiveScheduler(_Adaptive, Scheduler):
    """The scheduler that waits for the device."""


class AdaptiveAsyncScheduler(_Adaptive, AsyncScheduler):
    """The scheduler that runs ahead of the device, vLLM's default."""
