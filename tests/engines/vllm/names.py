"""A program: whether vLLM's second model runner and its scheduler still have what the plugin builds on. Prints what they lack.

PYTHONPATH=sources python names.py
"""

import inspect
import json
from typing import Any

ANY: Any = None


def overridden() -> list[str]:
    """Methods of ours with other parameters than those they stand for."""
    from vllm.v1.worker.gpu import spec_decode
    from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

    from specdecpp.integrations.vllm import speculator as ours_of

    pairs = [(ours_of.init_speculator, spec_decode.init_speculator)]
    pairs += [
        (getattr(ours_of.AdaptiveSpeculator, name), getattr(StandaloneARSpeculator, name))
        for name in ("propose", "init_cudagraph_manager", "capture", "set_attn")
    ]
    return [ours.__qualname__ for ours, theirs in pairs if list(_names(ours)) != list(_names(theirs))]


def called() -> list[str]:
    """What we call, and what no longer takes the arguments that we give."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
    from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator as Standalone
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorCudaGraphManager
    from vllm.v1.worker.utils import AttentionGroup
    from vllm.v1.worker.worker_base import WorkerBase

    five, four = (ANY,) * 5, (ANY,) * 4
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (Standalone.__init__, (ANY, ANY, ANY), {}),
        (Standalone._copy_request_inputs, five, {}),
        (Standalone._run_model, (*five, ANY), {}),
        (Standalone.sample_draft, (*five, ANY, ANY, ANY), {}),
        (Standalone._maybe_predict_acceptance, four, {}),
        (Standalone._update_draft_decode_metadata, (ANY, ANY, ANY), {}),
        (Standalone._build_uniform_attn_metadata, five, {"step": 0}),
        (Standalone._build_attn_metadata, five, {"step": 0, "slot_mappings": ANY}),
        (BlockTables.compute_slot_mappings, five, {"out": ANY}),
        (AttentionGroup.map_to_kernel_block_table, (ANY, ANY), {}),
        (build_slot_mappings_by_layer, (ANY, ANY), {}),
        (BatchExecutionDescriptor, (), {"cg_mode": ANY, "num_tokens": 1, "num_reqs": 1, "uniform_token_count": 1}),
        (SpeculatorCudaGraphManager.__init__, four, {"decode_query_len": 2}),
        (SpeculatorCudaGraphManager.capture, (*five, ANY, ANY), {"progress_bar_desc": "", "specialize_spec_tokens": True}),
        (SpeculatorCudaGraphManager.specialize_spec_tokens, (ANY, ANY, 2), {}),
        (CudaGraphManager.dispatch, five, {}),
        (CudaGraphManager.run_fullgraph, (ANY, ANY), {}),
        (FlashAttentionMetadataBuilder.update_draft_decode_metadata, (ANY, ANY), {}),
        (Scheduler.update_from_output, (ANY, ANY, ANY), {}),
        (AsyncScheduler.update_from_output, (ANY, ANY, ANY), {}),
        (Executor.__init__, (ANY, ANY), {}),
        (WorkerBase.__init__, (ANY, ANY), {"local_rank": 0, "rank": 0, "distributed_init_method": ""}),
    ]
    lacking = []
    for call, args, kwargs in calls:
        try:
            inspect.signature(call).bind(*args, **kwargs)
        except TypeError as error:
            lacking.append(f"{call.__qualname__}: {error}")
    return lacking


def used() -> list[str]:
    """Names that the code of vLLM around ours has to have: what it calls, what it leaves for us, what it does with a -1."""
    from vllm.v1.core.sched import async_scheduler, scheduler
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils
    from vllm.v1.worker.gpu.states import RequestState

    expected = {
        model_runner: (
            "init_speculator(\n                    self.vllm_config, self.device, self.req_states",
            "draft_tokens[:, num_spec_tokens:] = -1",
            "self.speculator.set_attn(",
            "self.speculator.init_cudagraph_manager(cudagraph_mode)",
            "self.speculator.capture()",
            "record_confidences(\n                    self.speculator.draft_token_confidence_probs",
        ),
        scheduler: (
            "self.dynamic_sd_lookup[\n                len(num_scheduled_tokens)",
            "num_speculative_tokens_per_batch_size",
            "self.vllm_config = ",
        ),
        async_scheduler: ("scheduler_output.num_spec_tokens_to_schedule",),
        rejection_sampler_utils: ("is_valid_draft = draft_sampled >= 0",),
        RequestState: ("self.all_token_ids = ", "self.total_len = "),
    }
    return [text for module, texts in expected.items() for text in texts if text not in inspect.getsource(module)]


def _names(function: Any) -> Any:
    return inspect.signature(function).parameters


if __name__ == "__main__":
    print(json.dumps([*overridden(), *called(), *used()]))
