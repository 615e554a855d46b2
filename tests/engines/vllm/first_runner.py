"""A program: whether vLLM's first model runner still has the interfaces that routes A and B build on. Prints what is missing.

PYTHONPATH=sources python first_runner.py
"""

import inspect
import json
from typing import Any

EXPECTED: dict[str, tuple[str, ...]] = {
    "__init__": ("vllm_config", "device", "runner"),
    "load_model": ("target_model",),
    "prepare_next_token_ids_padded": ("sampled_token_ids", "requests", "gpu_input_batch", "discard_request_mask"),
    "prepare_inputs_padded": ("common_attn_metadata", "spec_decode_metadata", "valid_sampled_tokens_count"),
    "propose": ("num_speculative_tokens", "common_attn_metadata", "sampling_metadata"),
    "_sample_draft_tokens": ("hidden_states", "sampling_metadata"),
    "_sample_from_logits": ("logits", "sampling_metadata"),
    "take_last_draft_probs": (),
    "initialize_attn_backend": ("kv_cache_config", "kernel_block_sizes"),
    "build_per_group_and_layer_attn_metadata": ("common_attn_metadata",),
    "build_model_inputs_first_pass": ("num_tokens", "num_input_tokens", "mm_embed_inputs"),
    "_determine_batch_execution_and_padding": ("num_tokens",),
    "_set_positions": ("num_tokens", "positions"),
    "_get_slot_mapping": ("num_tokens", "slot_mapping"),
}
METADATA = (
    *("query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu_upper_bound", "num_reqs", "num_actual_tokens"),
    *("max_query_len", "max_seq_len", "block_table_tensor", "slot_mapping"),
)


def missing() -> list[str]:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.spec_decode import draft_model, llm_base_proposer
    from vllm.v1.worker import gpu_model_runner

    found: list[str] = []
    if gpu_model_runner.DraftModelProposer is not draft_model.DraftModelProposer:
        found.append("gpu_model_runner.DraftModelProposer")
    for name, parameters in EXPECTED.items():
        method: Any = getattr(draft_model.DraftModelProposer, name, None)
        have = () if method is None else inspect.signature(method).parameters
        found += [f"{name}({p})" for p in parameters if p not in have] or ([name] if method is None else [])
    fields = inspect.signature(CommonAttentionMetadata).parameters
    found += [f"CommonAttentionMetadata({name})" for name in METADATA if name not in fields]
    found += [name for name, field in fields.items() if field.default is field.empty and name not in METADATA]
    source = inspect.getsource(llm_base_proposer.SpecDecodeBaseProposer.propose)
    if source.count("self._sample_draft_tokens(") != 3:
        found.append("propose draws at three places")
    runner = inspect.getsource(gpu_model_runner.GPUModelRunner)
    calls = ("drafter.prepare_next_token_ids_padded(", "drafter.prepare_inputs_padded(", "drafter.take_last_draft_probs(")
    return found + [call for call in calls if call not in runner]


if __name__ == "__main__":
    print(json.dumps(missing()))
