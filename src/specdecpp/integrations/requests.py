"""A request to `generate` of transformers, as far as a loop of ours can do it; the rest is refused with the reason.

generate(...) -> encoded_prompt(...), end_ids(...), streamer_of_caller() -> the loop of `integrations.transformers`
"""

import inspect
from typing import Any

from torch import Tensor
from transformers.generation.configuration_utils import GenerationMode

_PREPARED = ("attention_mask", "position_ids", "past_key_values", "cache", "use_cache", "logits_to_keep", "cache_position")


def encoded_prompt(input_ids: Tensor, config: Any, more: dict[str, Any]) -> tuple[tuple[int, ...], list[int]]:
    """The padding on the left of the one sequence, and its tokens. Raises ValueError for what is asked and cannot be done."""
    if input_ids.shape[0] != 1:
        raise ValueError(
            f"speculative decoding here runs one sequence at a time, got {input_ids.shape[0]} (a batch, beams or "
            "num_return_sequences): steps of several sequences end at different places. Call generate for each."
        )
    _check_options(config, more)
    ids, mask = input_ids[0].tolist(), more.get("attention_mask")
    num = 0 if mask is None else int((mask[0] == 0).long().cumprod(0).sum())
    if mask is not None and not bool(mask[0, num:].all()):
        raise ValueError(
            "the attention mask hides tokens in the middle or at the end. Only padding on the left can be left out."
        )
    positions = more.get("position_ids")
    if positions is not None and positions.flatten()[num:].tolist() != list(range(len(ids) - num)):
        raise ValueError(
            "position_ids other than 0, 1, 2, ... are not supported: the backends count for themselves. Leave them out."
        )
    return tuple(ids[:num]), ids[num:]


def _check_options(config: Any, more: dict[str, Any]) -> None:
    """Raise ValueError for options of `generate` that would go unheeded."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(f"{mode.value.replace('_', ' ')} is another way to decode, and custom_generate is one already.")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            raise ValueError(f"{name} is not supported: the target reads several positions at once, and keeps none of them.")
    if config.cache_implementation not in (None, "dynamic"):
        raise ValueError(
            f"cache_implementation={config.cache_implementation!r} is not supported: draft tokens that are rejected are cut "
            "from the cache. Leave it out."
        )
    cache = more.get("cache", more.get("past_key_values"))  # renamed in transformers 5.24
    if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0):
        raise ValueError(
            "past_key_values is not supported: the draft has not read what is in it, and it would not be filled. Leave it "
            "out and pass the whole text."
        )
    unknown = [name for name, value in more.items() if name not in _PREPARED and value is not None and value is not False]
    if unknown:
        raise ValueError(
            f"{', '.join(sorted(unknown))}: not supported by speculative decoding, where both models read input_ids alone."
        )


def end_ids(config: Any) -> tuple[int, ...]:
    """Ids that end a text."""
    ends = config.eos_token_id
    return () if ends is None else tuple(ends) if isinstance(ends, list | tuple) else (int(ends),)


def streamer_of_caller() -> Any:
    """The streamer of the `generate` that called, which transformers 5 does not hand on to a callable."""
    frame = inspect.currentframe()
    while frame is not None and not (frame.f_code.co_name == "generate" and "custom_generate" in frame.f_locals):
        frame = frame.f_back
    return frame.f_locals.get("streamer") if frame is not None else None
