"""Evidence of a step for those who ask: the target's log-probabilities, and p, q and estimates of every draft token.

A `Witness` is a session's `watch`: it keeps what a step was decided on and reads it afterwards, so a request that asks for
nothing pays for nothing.

Log-probabilities are the target's own, log softmax of its raw logits, before temperature, top-k, top-p and penalties: the
convention of OpenAI and vLLM. p and q are what the step was decided on, under the sampling parameters of the request; at
temperature 0, where these are one-hot, both are softmaxes at temperature 1.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from specdecpp.policies import protocol
from specdecpp.sampling import Sampling, at_least_float32
from specdecpp.session import Step
from specdecpp.step import Plan, Result

_TEXTS: WeakKeyDictionary[Any, dict[tuple[int, bool], str]] = WeakKeyDictionary()
"""Of single tokens, by tokenizer: spelling one takes as long as a small model's draft step."""
LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """One token with the target's log-probability, and the likeliest tokens at its place with theirs.

    `num_shown` characters of it are seen in the answer: none of a special token.
    """

    text: str
    num_shown: int
    logprob: float
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True)
class StepEvidence:
    """Evidence of one step: a score per token of the answer, the story of the step, or both."""

    scores: tuple[Scored, ...] = ()
    story: dict[str, Any] | None = None


class Witness:
    """Watches a session, and tells about its last step.

    `num_top` likeliest tokens come with every score; None for no scores. `details` asks for the story.
    """

    def __init__(
        self,
        tokenizer: Any,
        sampling: Sampling,
        *,
        ends: Collection[int],
        num_top: int | None = None,
        details: bool = False,
    ):
        self._tokenizer, self._sampling, self._ends = tokenizer, sampling, frozenset(ends)
        self._num_top, self._details = num_top, details
        self._seen: tuple[Plan, Result] | None = None
        self._texts = _TEXTS.setdefault(tokenizer, {})

    def __call__(self, plan: Plan, result: Result) -> None:
        self._seen = plan, result

    def evidence(self, outcome: Step) -> StepEvidence:
        """Return the evidence of the step that has just been decided, and forget it."""
        assert self._seen is not None, "the witness watched this step"
        (plan, result), self._seen = self._seen, None
        rows: Any = result.rows
        return StepEvidence(
            scores=() if self._num_top is None else self._scores(outcome, rows.logits),
            story=self._story(outcome, plan, result) if self._details else None,
        )

    def _scores(self, outcome: Step, logits: Tensor) -> tuple[Scored, ...]:
        """One for every token of the step but the one that ends the text."""
        tokens = [t for t in outcome.tokens if t not in self._ends]
        if not tokens:
            return ()
        logp = at_least_float32(logits[: len(tokens)]).log_softmax(-1)
        own = logp.gather(-1, logp.new_tensor(tokens).long().unsqueeze(-1)).squeeze(-1).tolist()
        values, ids = logp.topk(min(self._num_top or 0, logp.shape[-1]), dim=-1)
        top = [
            tuple((self.text(i), max(v, LEAST)) for i, v in zip(*row, strict=True))
            for row in zip(ids.tolist(), values.tolist(), strict=True)
        ]
        return tuple(
            Scored(
                text=self.text(token),
                num_shown=len(self.text(token, skip_special=True)),
                logprob=max(logprob, LEAST),
                top=likeliest,
            )
            for token, logprob, likeliest in zip(tokens, own, top, strict=True)
        )

    def _story(self, outcome: Step, plan: Plan, result: Result) -> dict[str, Any]:
        """A step as the playground draws it: its draft tokens with their fate, its tokens with their origin."""
        rows: Any = result.rows
        p = at_least_float32(rows.logits).softmax(-1) if self._sampling.is_greedy else rows.p
        judged = plan.decision.read(result.judged)
        estimates = [*judged, *[None] * result.num_drafted]
        candidates = [
            {"token": token, "text": self.text(token), "p": float(p[i, token]), "q": float(rows.q[i, token])}
            | {"estimate": estimates[i], "outcome": _fate(i, outcome)}
            for i, token in enumerate(result.tokens[: len(rows.q)])
        ]
        pieces = [
            {"token": piece.token, "text": piece.text, "origin": piece.origin, "p": float(p[i, piece.token])}
            | {"q": float(rows.q[i, piece.token]) if i < len(rows.q) else None}
            | {"estimate": estimates[i] if piece.origin == "accepted" else None}
            for i, piece in enumerate(outcome.pieces)
        ]
        believed = judged or [c["q"] for c in candidates]
        watched = protocol.Evidence.SURVIVAL if judged else protocol.Evidence.PRODUCT_OF_Q
        rule, num = plan.decision.rule, result.num_drafted
        return {
            "num_drafted": outcome.num_drafted,
            "num_accepted": outcome.num_accepted,
            "stop_reason": outcome.stop_reason,
            "survival": list(accumulate(believed, mul)),
            "survival_of": "head" if judged else "q",
            "thresholds": _beside(believed, rule.thresholds(num + 1)) if rule and rule.evidence is watched else None,
            "candidates": candidates,
            "pieces": pieces,
            "times": {name: getattr(outcome, name) for name in ("draft_s", "head_s", "verify_s", "other_s")},
        }

    def text(self, token: int, *, skip_special: bool = False) -> str:
        """A token by itself."""
        key = token, skip_special
        if key not in self._texts:
            options = {"skip_special_tokens": skip_special, "clean_up_tokenization_spaces": False}
            self._texts[key] = self._tokenizer.decode([token], **options)
        return self._texts[key]


def _beside(survival: Sequence[float], least: Sequence[float]) -> list[float]:
    """The threshold for each survival. Those of a lagged head come one draft token later, hence they are aligned at the end.

    A threshold above 1, which no survival reaches, becomes 1: JSON has no infinity.
    """
    return [min(max(floor, 0.0), 1.0) for floor in least[len(least) - len(survival) :]]


def _fate(i: int, outcome: Step) -> str:
    """The fate of draft token i: those after the first rejected one, or after the end of the answer, are not looked at."""
    if i < outcome.num_accepted:
        return "accepted"
    is_rejected = i == outcome.num_accepted and outcome.pieces[-1].origin == "correction"
    return "rejected" if is_rejected else "unused"
