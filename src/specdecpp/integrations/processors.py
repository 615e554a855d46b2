"""Logits processors of transformers: read as a `Sampling`, or applied by a cache.

    LogitsProcessorList -> (Sampling, what is left) -> Processed(cache, what is left)

A list is read as a `Sampling` where that means the same thing in the same order; any other list is applied as it is, to the
logits of both models and position by position. Speculative decoding keeps the distribution of whatever p is, and this p is that
of `generate` (Leviathan et al. 2023, appendix A.1), as long as a processor is a function of the tokens and the logits.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from specdecpp.backends import Cache
from specdecpp.sampling import Sampling, at_least_float32

_REMEMBERING = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)
_FIELDS: dict[type[LogitsProcessor], str] = {  # in the order in which `Sampling` applies them
    RepetitionPenaltyLogitsProcessor: "penalty",
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
_ORDER = list(_FIELDS)


def as_sampling(
    processors: LogitsProcessorList, *, is_greedy: bool, num_padding: int = 0
) -> tuple[Sampling, LogitsProcessorList]:
    """Processors as a `Sampling`, and those that must be applied: all of them or none.

    `num_padding` tokens on the left are no part of the prompt. Raises ValueError for processors that remember tokens.

    >>> as_sampling(LogitsProcessorList([TopKLogitsWarper(5)]), is_greedy=False)[0].top_k
    5
    """
    for processor in processors:
        if isinstance(processor, _REMEMBERING):
            raise ValueError(
                f"{type(processor).__name__} remembers the tokens it has seen, and draft tokens may be taken back. "
                "Leave it out, or use generate without a draft."
            )
    kinds = [type(processor) for processor in processors]
    known = [kind for kind in (_ORDER[:1] if is_greedy else _ORDER) if kind in kinds]  # warpers are not for greedy decoding
    temperature = 0.0 if is_greedy else 1.0
    if kinds != known or not all(_is_plain(processor, num_padding) for processor in processors):
        return Sampling(temperature=temperature), processors
    options: dict[str, Any] = {"temperature": temperature}
    options |= {_FIELDS[kind]: getattr(p, _FIELDS[kind]) for kind, p in zip(kinds, processors, strict=True)}
    penalty = options.pop("penalty", 1.0)
    return Sampling(repetition_penalty=penalty, **options), LogitsProcessorList()


def _is_plain(processor: Any, num_padding: int) -> bool:
    """Tell whether a processor does what `Sampling` does by that name."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    return (
        getattr(processor, "min_tokens_to_keep", 1) == 1
        and getattr(processor, "filter_value", -torch.inf) == -torch.inf
        and getattr(processor, "top_p", 1.0) > 0
        and (0 if ignored is None else int(ignored)) == num_padding
    )


class Processed(Cache):
    """A cache whose logits have gone through logits processors of transformers.

    `before` are tokens that the processors see in front of what the backend reads, as padding.

    >>> backend = Processed(cache, LogitsProcessorList([NoRepeatNGramLogitsProcessor(3)]))    # doctest: +SKIP
    """

    def __init__(self, cache: Cache, processors: LogitsProcessorList, *, before: tuple[int, ...] = ()):
        super().__init__(cache.model)
        self._cache, self._processors, self._before = cache, processors, before
        self._tokens = list(before)

    @property
    def length(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._cache.length

    def extend(self, tokens: list[int], *, rows: int) -> tuple[Float[Tensor, "rows V"], Float[Tensor, "rows D"]]:
        """The cache's own rows, each through the processors with the tokens up to it."""
        logits, hidden = self._cache.extend(tokens, rows=rows)
        self._tokens += tokens
        context: Any = torch.tensor([self._tokens], device=logits.device)
        first = len(self._tokens) - rows + 1
        copies = [at_least_float32(row[None].clone()) for row in logits]  # a processor may write into what it is given
        return torch.cat([self._processors(context[:, : first + i], row) for i, row in enumerate(copies)]), hidden

    def rollback(self, length: int) -> None:
        self._cache.rollback(length)
        del self._tokens[len(self._before) + length :]
