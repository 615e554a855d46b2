"""Log-probabilities of tokens and details of steps, for requests that ask for them.

Log-probabilities are the target's own, log softmax of its raw logits, before temperature, top-k, top-p and penalties: the
convention of OpenAI and vLLM. p and q are those that decided the step, under the sampling parameters of the request; at
temperature 0, where these are one-hot, both are softmaxes at temperature 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from operator import mul
from typing import Any, Literal

from torch import Tensor

from specdecpp.detokenize import Detokenizer
from specdecpp.policies import protocol
from specdecpp.sampling import at_least_float32
from specdecpp.serving.replies import StepDetails, TokenDetails
from specdecpp.session import Session, Step
from specdecpp.step import Plan, Result

LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


@dataclass(frozen=True, kw_only=True)
class ScoredToken:
    """A token with the target's log-probability, the top tokens at its place with theirs, and how many characters it shows."""

    text: str
    num_shown: int
    logprob: float
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True)
class StepEvidence:
    """Evidence of one step: a score per token of the answer, details, or both."""

    scores: tuple[ScoredToken, ...] = ()
    details: StepDetails | None = None


class Recorder:
    """A session's `watch`: it keeps what decided a step, and makes the evidence of it (`num_top` None: no scores)."""

    def __init__(self, session: Session, tokenizer: Any, *, num_top: int | None = None, details: bool = False):
        self._is_greedy, self._ends = session.sampling.is_greedy, session.ends
        self._text, self._num_top, self._details = partial(_token_text, tokenizer), num_top, details
        self._shown = Detokenizer(tokenizer, before=session.tokens)
        self._seen: tuple[Plan, Result] | None = None

    def __call__(self, plan: Plan, result: Result) -> None:
        self._seen = plan, result

    def evidence(self, step: Step, at_s: float = 0.0) -> StepEvidence:
        """Return the evidence of the step that has just been decided, and forget it."""
        assert self._seen is not None, "the recorder watched this step"
        (plan, result), self._seen = self._seen, None
        rows: Any = result.rows
        return StepEvidence(
            scores=() if self._num_top is None else self._scores(step, rows.logits),
            details=self._step_details(step, plan, result, at_s) if self._details else None,
        )

    def _scores(self, step: Step, logits: Tensor) -> tuple[ScoredToken, ...]:
        """One for every token of the step but the one that ends the text."""
        tokens = [t for t in step.tokens if t not in self._ends]
        logp = at_least_float32(logits[: len(tokens)]).log_softmax(-1)
        own = [float(row[token]) for row, token in zip(logp, tokens, strict=True)]
        values, ids = logp.topk(min(self._num_top or 0, logp.shape[-1]), dim=-1)
        return tuple(
            ScoredToken(
                text=self._text(token),
                num_shown=len(self._shown.push(token)[0]),
                logprob=max(logprob, LEAST),
                top=tuple((self._text(i), max(value, LEAST)) for i, value in zip(best, found, strict=True)),
            )
            for token, logprob, best, found in zip(tokens, own, ids.tolist(), values.tolist(), strict=True)
        )

    def _step_details(self, step: Step, plan: Plan, result: Result, at_s: float) -> StepDetails:
        rows: Any = result.rows
        p = at_least_float32(rows.logits).softmax(-1) if self._is_greedy else rows.p
        judged = plan.decision.read(result.judged)
        estimates = [*judged, *[None] * result.num_drafted]
        num_read = len(rows.q)

        def details(i: int, token: int, outcome: Any, text: str) -> TokenDetails:
            q = float(rows.q[i, token]) if i < num_read else None
            estimate = estimates[i] if outcome in ("accepted", "rejected", "unused") else None
            return TokenDetails(token=token, text=text, outcome=outcome, p=float(p[i, token]), q=q, estimate=estimate)

        draft_tokens = [details(i, t, _outcome(i, step), self._text(t)) for i, t in enumerate(result.tokens[:num_read])]
        pieces = [details(i, piece.token, piece.origin, piece.text) for i, piece in enumerate(step.pieces)]
        believed = judged or [draft_token.q or 0.0 for draft_token in draft_tokens]
        watched = protocol.Evidence.SURVIVAL if judged else protocol.Evidence.PRODUCT_OF_Q
        rule, num = plan.decision.rule, result.num_drafted
        return StepDetails(
            num_drafted=step.num_drafted,
            num_accepted=step.num_accepted,
            stop_reason=step.stop_reason,
            survival=list(accumulate(believed, mul)),
            survival_of="head" if judged else "q",
            thresholds=_aligned(rule.thresholds(num + 1), len(believed)) if rule and rule.evidence is watched else None,
            draft_tokens=draft_tokens,
            pieces=pieces,
            times={name: getattr(step, name) for name in ("draft_s", "head_s", "verify_s", "other_s")},
            at_s=at_s,
        )


@lru_cache(2**17)
def _token_text(tokenizer: Any, token: int) -> str:
    """A token as it reads behind a letter: some decoders strip the first space. It takes as long as a small draft step."""
    letter, length = _letter(tokenizer)
    return tokenizer.decode([*letter, token], clean_up_tokenization_spaces=False)[length:]


@lru_cache
def _letter(tokenizer: Any) -> tuple[list[int], int]:
    """Ids of a letter, and the length of their text."""
    ids = tokenizer.encode("a", add_special_tokens=False)
    return ids, len(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _aligned(least: Sequence[float], num: int) -> list[float]:
    """The threshold for each survival, infinite ones as 1; those of a lagged head come one draft token later, at the end."""
    return [min(max(threshold, 0.0), 1.0) for threshold in least[len(least) - num :]]


def _outcome(i: int, step: Step) -> Literal["accepted", "rejected", "unused"]:
    """The outcome of draft token i: those after the first rejected one, or after the end of the answer, are not looked at."""
    if i < step.num_accepted:
        return "accepted"
    is_rejected = i == step.num_accepted and step.pieces[-1].origin == "correction"
    return "rejected" if is_rejected else "unused"
