"""Traces of requests over tables: every one that a recording could have made, with its probability."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import torch
from distributions import Distribution, Request, unchecked

from specdecpp.head import AcceptanceHead
from specdecpp.policies import Costs, Policy
from specdecpp.replay.replay import Player
from specdecpp.replay.trace import Opinion, Trace
from specdecpp.sampling import probabilities
from specdecpp.session import Session, Step
from specdecpp.verify import TokenVerification

COSTS = Costs(draft_s=0.2, passes={1: 1.0, 2: 1.05, 3: 1.4, 4: 1.45})
NAMES = ("tokens", "log_q", "entropy", "gap")
Text = tuple[int, ...]


@dataclass(kw_only=True)
class Recording:
    """All recordings of a request, with branches of up to `length` tokens, and the heads that judge them."""

    request: Request
    length: int
    heads: Sequence[AcceptanceHead] = ()
    _rows: dict[Any, dict[Any, np.ndarray]] = field(default_factory=dict)

    def session_distribution(self, policy: Policy, outcome: Any) -> Distribution:
        """The exact distribution of `outcome(session, steps)` in the real session."""

        return replace(self.request, costs=COSTS).distribution(policy, TokenVerification(), outcome)

    def replay_distribution(self, policy: Policy, outcome: Any) -> Distribution:
        """The exact distribution of `outcome(answer, steps)` in replay."""
        distribution: Distribution = {}
        for text, probability, trace in self.traces:
            runs = trace.runs(np.full((1, len(trace)), 0.5))[0].tolist()
            with unchecked():
                key = outcome(text, list(Player(trace, policy, COSTS).steps(runs)))
            distribution[key] = distribution.get(key, 0.0) + probability
        return distribution

    @cached_property
    def traces(self) -> list[tuple[Text, float, Trace]]:
        """(answer, probability, trace) with every coin and every branch decided: odds are 0 or 1."""
        with unchecked():
            return [case for (text, _), p in self.request.own_distribution().items() for case in self._decided(text, p)]

    @cached_property
    def num_places(self) -> int:
        """As the session has it: max_tokens and the target's context less the target's token, and the draft's context."""
        r, num = self.request, len(self.request.prompt)
        limits = [r.max_tokens - 1]
        if r.target.max_length is not None:
            limits.append(r.target.max_length - num - 1)
        if r.draft.max_length is not None:
            limits.append(r.draft.max_length - num + 1)
        return max(0, min(limits))

    def _decided(self, text: Text, probability: float) -> Iterator[tuple[Text, float, Trace]]:
        places = [list(self._options(text, i)) for i in range(len(text))]
        for chosen in product(*places):
            yield text, probability * math.prod(p for p, _ in chosen), self.trace(text, [branch for _, branch in chosen])

    def _options(self, text: Text, i: int) -> Iterator[tuple[float, Text | None]]:
        """(probability, the branch, None where the draft token is the answer's own token)."""
        context = (*self.request.prompt, *text[:i])
        p, q = self._distributions(context)
        odds = min(1.0, q[text[i]] / p[text[i]])
        if i >= self.num_places:
            yield 1.0, None
            return
        if odds > 0:
            yield odds, None
        rest = [max(0.0, b - a) for a, b in zip(p, q, strict=True)]
        if odds < 1:
            for branch, chance in self._branches(context, rest, min(self.length, self.num_places - i)):
                yield (1 - odds) * chance / sum(rest), branch

    def _branches(self, context: Text, distribution: Sequence[float], num: int) -> Iterator[tuple[Text, float]]:
        """Texts of `num` tokens, the first of them by the weights given; shorter where they end."""
        for token, chance in enumerate(distribution):
            if chance > 0 and (num == 1 or token in self.request.ends):
                yield (token,), chance
            elif chance > 0:
                after = (*context, token)
                for more, p in self._branches(after, self._distributions(after)[1], num - 1):
                    yield (token, *more), chance * p

    def _overlap(self, context: Text) -> float:
        """1 - TV(p, q)."""
        return sum(map(min, *self._distributions(context)))

    def _distributions(self, context: Text) -> tuple[list[float], list[float]]:
        r = self.request
        return self._sampled(r.target.distribution(context)).tolist(), self._sampled(r.draft.distribution(context)).tolist()

    def _sampled(self, distribution: torch.Tensor) -> torch.Tensor:
        """As the request samples from it; greedy rules look at the distribution itself."""
        sampling = self.request.sampling
        return distribution if sampling.is_greedy else probabilities(distribution.log(), sampling)

    def trace(self, text: Text, branches: Sequence[Text | None]) -> Trace:
        rows = [self._row((*self.request.prompt, *text[:i]), text[i], b or ()) for i, b in enumerate(branches)]
        lengths = np.array([len(b or ()) for b in branches])
        opinions = {(head, True): Opinion(accept=np.stack([row[h] for row in rows])) for h, head in enumerate(self.heads)}
        made = Trace(
            **{name: np.stack([row[name] for row in rows]) for name in NAMES},
            odds=np.array([float(b is None) for b in branches]),
            overlap=np.array([self._overlap((*self.request.prompt, *text[:i])) for i in range(len(text))]),
            branch_length=lengths,
            is_closed=np.array([bool(b) and b[-1] in self.request.ends for b in branches], dtype=bool),
            is_ended=text[-1] in self.request.ends,
            num_places=self.num_places,
            opinions=opinions,
        )
        made.__dict__["is_greedy"] = self.request.sampling.is_greedy  # with every coin decided, odds do not tell
        return made

    def _row(self, context: Text, token: int, branch: Text) -> dict[Any, np.ndarray]:
        """Everything about a position of the answer and the branch there, as it stands in a row of a trace."""
        if (found := self._rows.get((context, token, branch))) is not None:
            return found
        cells = [self._cell(context, token)]
        cells += [self._cell((*context, *branch[:m]), branch[m]) for m in range(len(branch))]
        cells += [cells[0]] * (self.length - len(branch))  # padding has some value
        row = {key: np.array([cell[key] for cell in cells]) for key in cells[0]}
        self._rows[context, token, branch] = row
        return row

    def _cell(self, context: Text, token: int) -> dict[Any, Any]:
        """About one token: what the draft believed, and what the heads say in every place of a step."""
        distribution = self.request.draft.distribution(context)
        q = self._sampled(distribution)
        top = q.topk(2).values.tolist()
        log_q = float(q[token].log())
        known = {"log_q": max(log_q, math.log(1e-30)), "entropy": float(torch.special.entr(q).sum()), "gap": top[0] - top[1]}
        cell: dict[Any, Any] = {"tokens": token, "log_q": log_q, "entropy": known["entropy"], "gap": known["gap"]}
        for h, head in enumerate(self.heads):
            is_ahead, estimate = head.card.form == "look_ahead", head.estimator(calibrated=True)
            hidden = distribution if is_ahead else self.request.draft.distribution((*context, token))
            depths = range(1, self.length + 1) if "depth" in head.card.scalars else [1]
            scalars = [known | {"depth": float(k)} for k in depths]
            said = [estimate(hidden, token, tuple(of[name] for name in head.card.scalars)) for of in scalars]
            cell[h] = said
        return cell


def of_session(session: Session, steps: list[Step]) -> Any:
    """The text, and what each step drafted and accepted."""
    text = tuple(session.tokens[session.num_prompt_tokens :])
    return text, tuple((r.num_drafted, r.num_accepted, r.num_tokens) for r in steps)


def of_replay(text: Text, steps: list[Any]) -> Any:
    return text, tuple((r.num_drafted, r.num_accepted, r.num_tokens) for r in steps)


def greedy_trace(request: Request, text: Text, *, length: int) -> Trace:
    """The one recording of a greedy answer: a draft token is the draft's likeliest token, and so are those after it."""
    recording, draft = Recording(request=request, length=length), request.draft
    branches: list[Text | None] = []
    for i, token in enumerate(text):
        branch: Text = ()
        while len(branch) < length and not (branch and branch[-1] in request.ends):
            branch = (*branch, int(draft.distribution((*request.prompt, *text[:i], *branch)).argmax()))
        branches.append(None if branch[0] == token else branch)
    return recording.trace(text, branches)
