"""Figures of a request under the names of other servers: llama.cpp's `timings`, vLLM's `metrics.speculative_decoding`."""

from collections import Counter
from collections.abc import Sequence

from pydantic import BaseModel, Field

from specdecpp.metrics import Metrics, Step


class Timings(BaseModel):
    """llama.cpp's figures. Times are those of a clock on the wall, in milliseconds: together they reach from the end of the
    queue to the last token, the steps of other requests included. A rate over no time is null."""

    cache_n: int = Field(description="Tokens of the prompt that were in a cache.")
    prompt_n: int = Field(description="Tokens of the prompt that were read.")
    prompt_ms: float
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float | None
    predicted_per_second: float | None
    draft_n: int
    draft_n_accepted: int


class SpeculativeDecoding(BaseModel):
    """vLLM's figures of one answer. As there, a step counts when it has draft tokens (`speculative` counts all steps)."""

    mean_acceptance_length: float = Field(description="1 + accepted draft tokens per step; 1 without steps.")
    draft_acceptance_rate: float
    acceptance_histogram: list[int] = Field(description="Item j: steps that accepted j of up to num_spec_tokens draft tokens.")
    acceptance_histogram_by_draft_length: dict[int, list[int]] = Field(
        description="Item j under k: steps that accepted j of exactly k draft tokens."
    )
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int = Field(description="The most draft tokens that the policy allows in a step.")


class RequestMetrics(BaseModel):
    """vLLM's `metrics` of a reply."""

    speculative_decoding: SpeculativeDecoding | None = Field(description="null for several answers, and without drafting.")


def timings_of(metrics: Metrics, *, prompt_s: float, predicted_s: float) -> Timings:
    """llama.cpp's figures of sums over steps, and of the seconds before and after the prompt had been read."""
    num_read = metrics.num_prompt_tokens - metrics.num_cached_tokens
    return Timings(
        cache_n=metrics.num_cached_tokens,
        prompt_n=num_read,
        prompt_ms=1e3 * prompt_s,
        prompt_per_token_ms=_ratio(1e3 * prompt_s, num_read),
        prompt_per_second=_ratio(num_read, prompt_s),
        predicted_n=metrics.num_tokens,
        predicted_ms=1e3 * predicted_s,
        predicted_per_token_ms=_ratio(1e3 * predicted_s, metrics.num_tokens),
        predicted_per_second=_ratio(metrics.num_tokens, predicted_s),
        draft_n=metrics.num_draft_tokens,
        draft_n_accepted=metrics.num_accepted_draft_tokens,
    )


def speculative_decoding(steps: Sequence[Step], num_spec_tokens: int) -> SpeculativeDecoding:
    """vLLM's figures of the steps of one answer under a policy with at most `num_spec_tokens` draft tokens a step."""
    counts = Counter((step.num_drafted, step.num_accepted) for step in steps if step.num_drafted)
    by_length = {k: [counts[k, j] for j in range(k + 1)] for k in sorted({k for k, _ in counts})}
    accepted = sum(j * num for (_, j), num in counts.items())
    drafted = sum(k * num for (k, _), num in counts.items())
    return SpeculativeDecoding(
        mean_acceptance_length=1 + accepted / (counts.total() or 1),
        draft_acceptance_rate=accepted / (drafted or 1),
        acceptance_histogram=[sum(counts[k, j] for k in by_length) for j in range(num_spec_tokens + 1)],
        acceptance_histogram_by_draft_length=by_length,
        num_spec_steps=counts.total(),
        num_accepted_draft_tokens=accepted,
        num_draft_tokens=drafted,
        num_spec_tokens=num_spec_tokens,
    )


def _ratio(amount: float, per: float) -> float | None:
    return amount / per if per > 0 else None
