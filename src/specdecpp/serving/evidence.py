"""Log-probabilities of tokens and details of steps, for requests that ask for them.

Log-probabilities are the target's own, log softmax of its raw logits, before temperature, top-k, top-p and penalties: the
convention of OpenAI and vLLM. p and q are those that decided the step, under the sampling parameters of the request; at
temperature 0, where these are one-hot, both are softmaxes at temperature 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import Any

from torch import Tensor

from specdecpp.policies import protocol
from specdecpp.sampling import at_least_float32
from specdecpp.session import Session, Step
from specdecpp.step import Plan, Result

LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


@dataclass(frozen=True, kw_only=True)
class ScoredToken:
    """A token with the target's log-probability, and the top tokens at its place with theirs.

    `num_shown` characters of it are seen in the answer: none of a special token.
    """

    text: str
    num_shown: int
    logprob: float
    top: tuple[tuple[str, float], ...]


class Recorder:
    """A session's `watch`: it keeps what decided a step until that is read."""

    def __init__(self, session: Session, tokenizer: Any):
        self._tokenizer, self._sampling, self._ends = tokenizer, session.sampling, session.ends
        self._seen: tuple[Plan, Result] | None = None
        session.watch = self

    def __call__(self, plan: Plan, result: Result) -> None:
        self._seen = plan, result

    def scores(self, step: Step, num_top: int) -> list[ScoredToken]:
        """One score for every token of the last step but the one that ends the text, each with `num_top` alternatives."""
        assert self._seen is not None, "the recorder watched this step"
        rows: Any = self._seen[1].rows
        tokens = [t for t in step.tokens if t not in self._ends]
        if not tokens:
            return []
        logp = at_least_float32(rows.logits[: len(tokens)]).log_softmax(-1)
        own = logp.gather(-1, logp.new_tensor(tokens).long().unsqueeze(-1)).squeeze(-1).tolist()
        values, ids = logp.topk(min(num_top, logp.shape[-1]), dim=-1)
        return [
            ScoredToken(
                text=self._text(token),
                num_shown=len(self._text(token, skip_special=True)),
                logprob=max(logprob, LEAST),
                top=tuple((self._text(i), max(value, LEAST)) for i, value in zip(*row, strict=True)),
            )
            for token, logprob, *row in zip(tokens, own, ids.tolist(), values.tolist(), strict=True)
        ]

    def details(self, step: Step) -> dict[str, Any]:
        """The last step in JSON's types: draft tokens and pieces with p, q, estimate and outcome, and where it stopped.

        `survival` is the product of estimates, or of q, after every draft token; the rule goes on where it is not below the
        threshold of that place.
        """
        assert self._seen is not None, "the recorder watched this step"
        plan, result = self._seen
        rows: Any = result.rows
        p: Tensor = at_least_float32(rows.logits).softmax(-1) if self._sampling.is_greedy else rows.p
        judged = plan.decision.read(result.judged)
        estimates = [*judged, *[None] * result.num_drafted]
        num_read = len(rows.q)

        def token_details(i: int, token: int, text: str, outcome: str) -> dict[str, Any]:
            q = float(rows.q[i, token]) if i < num_read else None
            estimate = estimates[i] if outcome in ("accepted", "rejected", "unused") else None
            return {"token": token, "text": text, "outcome": outcome, "p": float(p[i, token]), "q": q, "estimate": estimate}

        drafted = [token_details(i, t, self._text(t), _outcome(i, step)) for i, t in enumerate(result.tokens[:num_read])]
        believed = judged or [draft_token["q"] for draft_token in drafted]
        watched = protocol.Evidence.SURVIVAL if judged else protocol.Evidence.PRODUCT_OF_Q
        rule, num = plan.decision.rule, result.num_drafted
        return {
            "num_drafted": step.num_drafted,
            "num_accepted": step.num_accepted,
            "stop_reason": step.stop_reason,
            "survival": list(accumulate(believed, mul)),
            "survival_of": "head" if judged else "q",
            "thresholds": _aligned(rule.thresholds(num + 1), len(believed)) if rule and rule.evidence is watched else None,
            "draft_tokens": drafted,
            "pieces": [token_details(i, piece.token, piece.text, piece.origin) for i, piece in enumerate(step.pieces)],
            "times": {name: getattr(step, name) for name in ("draft_s", "head_s", "verify_s", "other_s")},
        }

    def _text(self, token: int, *, skip_special: bool = False) -> str:
        return _token_text(self._tokenizer, token, skip_special)


@lru_cache(2**17)
def _token_text(tokenizer: Any, token: int, skip_special: bool) -> str:
    """A token by itself; decoding one takes as long as a small model's draft step."""
    return tokenizer.decode([token], skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)


def _aligned(least: Sequence[float], num: int) -> list[float]:
    """The threshold for each survival. Those of a lagged head come one draft token later, hence they are aligned at the end.

    A threshold above 1, which no survival reaches, becomes 1: JSON has no infinity.
    """
    return [min(max(threshold, 0.0), 1.0) for threshold in least[len(least) - num :]]


def _outcome(i: int, step: Step) -> str:
    """The outcome of draft token i: those after the first rejected one, or after the end of the answer, are not looked at."""
    if i < step.num_accepted:
        return "accepted"
    is_rejected = i == step.num_accepted and step.pieces[-1].origin == "correction"
    return "rejected" if is_rejected else "unused"
