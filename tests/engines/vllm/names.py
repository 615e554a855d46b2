"""A program: whether vLLM's second model runner and its scheduler still have what the plugin builds on. Prints what they lack.

PYTHONPATH=sources python names.py
"""

import inspect
import json
from pkgutil import resolve_name
from typing import Any

from specdecpp.integrations.vllm import speculator as ours_of

GPU = "vllm.v1.worker.gpu"
STANDALONE = f"{GPU}.spec_decode.standalone_ar.speculator:StandaloneARSpeculator"
GRAPHS = f"{GPU}.spec_decode.target_dependent_ar.cudagraph_utils:SpeculatorCudaGraphManager"
OVERRIDDEN = {
    f"{GPU}.spec_decode:init_speculator": ours_of.init_speculator,
    f"{STANDALONE}.propose": ours_of.AdaptiveSpeculator.propose,
    f"{STANDALONE}.init_cudagraph_manager": ours_of.AdaptiveSpeculator.init_cudagraph_manager,
    f"{STANDALONE}.capture": ours_of.AdaptiveSpeculator.capture,
    f"{STANDALONE}.set_attn": ours_of.AdaptiveSpeculator.set_attn,
}
"""What stands in the place of vLLM's, with the same parameters."""
CALLED = [
    (f"{STANDALONE}.__init__", 3, ""),
    (f"{STANDALONE}._copy_request_inputs", 5, ""),
    (f"{STANDALONE}._run_model", 6, ""),
    (f"{STANDALONE}.sample_draft", 8, ""),
    (f"{STANDALONE}._maybe_predict_acceptance", 4, ""),
    (f"{STANDALONE}._update_draft_decode_metadata", 3, ""),
    (f"{STANDALONE}._build_uniform_attn_metadata", 5, "step"),
    (f"{STANDALONE}._build_attn_metadata", 5, "step slot_mappings"),
    (f"{GPU}.block_table:BlockTables.compute_slot_mappings", 5, "out"),
    ("vllm.v1.worker.utils:AttentionGroup.map_to_kernel_block_table", 2, ""),
    (f"{GPU}.attn_utils:build_slot_mappings_by_layer", 2, ""),
    (f"{GPU}.cudagraph_utils:BatchExecutionDescriptor", 0, "cg_mode num_tokens num_reqs uniform_token_count"),
    (f"{GRAPHS}.__init__", 4, "decode_query_len"),
    (f"{GRAPHS}.capture", 7, "progress_bar_desc specialize_spec_tokens"),
    (f"{GRAPHS}.specialize_spec_tokens", 3, ""),
    (f"{GPU}.cudagraph_utils:CudaGraphManager.dispatch", 5, ""),
    (f"{GPU}.cudagraph_utils:CudaGraphManager.run_fullgraph", 2, ""),
    ("vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder.update_draft_decode_metadata", 2, ""),
    ("vllm.v1.core.sched.scheduler:Scheduler.update_from_output", 3, ""),
    ("vllm.v1.core.sched.async_scheduler:AsyncScheduler.update_from_output", 3, ""),
    ("vllm.v1.executor.abstract:Executor.__init__", 2, ""),
    ("vllm.v1.worker.worker_base:WorkerBase.__init__", 2, "local_rank rank distributed_init_method"),
]
"""What we call: its name, the number of arguments that we give by place, and those by name."""
USED = {
    f"{GPU}.model_runner": (
        "init_speculator(\n                    self.vllm_config, self.device, self.req_states",
        "draft_tokens[:, num_spec_tokens:] = -1",
        "self.speculator.set_attn(",
        "self.speculator.init_cudagraph_manager(cudagraph_mode)",
        "self.speculator.capture()",
        "record_confidences(\n                    self.speculator.draft_token_confidence_probs",
    ),
    "vllm.v1.core.sched.scheduler": (
        "self.dynamic_sd_lookup[\n                len(num_scheduled_tokens)",
        "num_speculative_tokens_per_batch_size",
        "self.vllm_config = ",
    ),
    "vllm.v1.core.sched.async_scheduler": ("scheduler_output.num_spec_tokens_to_schedule",),
    f"{GPU}.spec_decode.rejection_sampler_utils": ("is_valid_draft = draft_sampled >= 0",),
    f"{GPU}.states:RequestState": ("self.all_token_ids = ", "self.total_len = "),
}
"""Text that the code of vLLM around ours has to have: what it calls, what it leaves for us, what it does with a -1."""


def lacking() -> list[str]:
    found = [f"{name}: other parameters" for name, ours in OVERRIDDEN.items() if _names(ours) != _names(resolve_name(name))]
    for name, num, keywords in CALLED:
        try:
            inspect.signature(resolve_name(name)).bind(*range(num), **dict.fromkeys(keywords.split()))
        except (AttributeError, TypeError) as error:
            found.append(f"{name}: {error}")
    return found + [text for name, texts in USED.items() for text in texts if text not in inspect.getsource(resolve_name(name))]


def _names(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


if __name__ == "__main__":
    print(json.dumps(lacking()))
