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
}


def missing() -> list[str]:
    from vllm.v1.spec_decode import draft_model, llm_base_proposer
    from vllm.v1.worker import gpu_model_runner

    found: list[str] = []
    if gpu_model_runner.DraftModelProposer is not draft_model.DraftModelProposer:
        found.append("gpu_model_runner.DraftModelProposer")
    for name, parameters in EXPECTED.items():
        method: Any = getattr(draft_model.DraftModelProposer, name, None)
        have = () if method is None else inspect.signature(method).parameters
        found += [f"{name}({p})" for p in parameters if p not in have] or ([name] if method is None else [])
    source = inspect.getsource(llm_base_proposer.SpecDecodeBaseProposer.propose)
    if source.count("self._sample_draft_tokens(") != 3:
        found.append("propose draws at three places")
    runner = inspect.getsource(gpu_model_runner.GPUModelRunner)
    calls = ("drafter.prepare_next_token_ids_padded(", "drafter.prepare_inputs_padded(", "drafter.take_last_draft_probs(")
    return found + [call for call in calls if call not in runner]


if __name__ == "__main__":
    print(json.dumps(missing()))
