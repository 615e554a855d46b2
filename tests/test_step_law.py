"""The distribution of a step on every engine, alone and in batches, by exact integration over uniforms."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any

import numpy as np
import pytest
import torch
from distributions import random_head, unchecked
from engine_cases import ENGINES, Models, models_of
from integration import Given, compared, completed, intervals, outcomes
from kinds import needs_compiler
from test_grammar import Automaton
from torch import Tensor

from specdecpp import Sampling
from specdecpp.grammar import Matcher, allowed_rows, restricted
from specdecpp.policies import CostAware, Costs, CumulativeConfidence, Entropy, Fixed, Policy, SpecDecPP
from specdecpp.policies.protocol import decide
from specdecpp.sampling import probabilities
from specdecpp.scheduler import Reading
from specdecpp.step import Plan, Request, Result
from specdecpp.verify import verifications

COSTS = Costs(draft_s=0.15, passes={1: 1.0, 5: 1.2})
WARM = Sampling(temperature=1.3)
Answer = tuple[int, ...]


RULES: dict[str, Callable[[], Policy]] = {
    "fixed": lambda: Fixed(k=2),
    "cumulative q": lambda: CumulativeConfidence(threshold=0.5, max_tokens=3),
    "entropy": lambda: Entropy(threshold=0.3, min_tokens=2, max_tokens=3),
    "cost-aware by q": lambda: CostAware(max_tokens=3),
    "lagged head": lambda: SpecDecPP(head=random_head(32, seed=2, scale=0.2), threshold=0.5, min_tokens=0, max_tokens=3),
    "look-ahead head": lambda: SpecDecPP(
        head=random_head(32, seed=1, scale=1.0, form="look_ahead", vocab_size=3), threshold=0.6, min_tokens=0, max_tokens=3
    ),
}
SAMPLINGS = {"warm": WARM, "top-p": Sampling(temperature=1.3, top_p=0.8), "min-p": Sampling(min_p=0.3)}


@dataclass(frozen=True)
class Cell:
    """Uniforms under which one thing happens: its chance, the ends of their intervals, and what that is."""

    chance: float
    drawn: list[tuple[float, float]]
    tested: list[tuple[float, float]]
    tokens: list[int]
    verdict: tuple[int, int]

    @property
    def answer(self) -> Answer:
        return (*self.tokens[: self.verdict[0]], self.verdict[1])


@dataclass(eq=False)
class One:
    """A request after a context, and everything that a step of it can become."""

    models: Models
    policy: Policy
    verification: str = "token"
    sampling: Sampling = WARM
    context: Answer = (2, 0, 1)
    streams: tuple[Given, Given] = field(default_factory=lambda: (Given(), Given()))
    grammar: Matcher | None = None

    @cached_property
    def request(self) -> Request:
        target, draft = self.models.target.new_cache(), self.models.draft.new_cache()
        return Request(
            target=target,
            draft=draft,
            policy=self.policy,
            verification=verifications()[self.verification],
            sampling=self.sampling,
            randomness=self.streams,
            grammar=self.grammar,
        )

    def plan(self, drawn: list[float], tested: list[float]) -> Plan:
        """A step, behind what the step before it has left in the caches."""
        self.streams[0].points, self.streams[1].points = drawn, tested
        request, context = self.request, list(self.context)
        for backend in (request.target, request.draft):
            backend.rollback(min(backend.length, len(context) - 1))
            if backend.length < len(context) - 1:
                backend.extend(context[backend.length : -1], rows=1)
        return Plan(request, context, decide(self.policy, self.policy.start(), COSTS, self.policy.max_tokens))

    @property
    def longest(self) -> int:
        return self.policy.max_tokens + 1

    def rows(self, which: int) -> dict[Answer, Tensor]:
        """The distribution of a model after each answer."""
        answers = [a for n in range(self.longest) for a in itertools.product(range(3), repeat=n)]
        model = (self.models.target, self.models.draft)[which]
        raw = {a: model.new_cache().extend([*self.context, *a], rows=1)[0] for a in answers}
        if self.grammar is not None:
            raw = {a: restricted(row, allowed_rows(self.grammar, [*a])[-1]) for a, row in raw.items()}
        return {a: probabilities(row.double(), self.sampling)[0] for a, row in raw.items()}

    def cells(self, engine: Any) -> Iterator[Cell]:
        """By the formulas; how long a step is under given draws, the request alone says."""
        p, q = self.rows(0), self.rows(1)
        told = set()
        for path in itertools.product(range(3), repeat=self.policy.max_tokens):
            drawn = [
                {i: (c, ends) for i, c, ends in intervals(q[path[:k]].tolist())}.get(token) for k, token in enumerate(path)
            ]
            known = [one for one in drawn if one is not None]
            if len(known) < len(drawn):
                continue
            num = engine.run([self.plan([sum(ends) / 2 for _, ends in known], [])])[0].num_drafted
            if path[:num] in told:
                continue
            told.add(path[:num])
            p_rows = torch.stack([p[path[:i]] for i in range(num + 1)])
            q_rows = torch.stack([q[path[:i]] for i in range(num)]) if num else p_rows[:0]
            tokens = torch.tensor(path[:num], dtype=torch.long)
            is_compared = self.verification == "compare"
            found = compared(p_rows, tokens) if is_compared else outcomes(p_rows, q_rows, tokens, self.verification)
            share = math.prod(c for c, _ in known[:num])
            for verdict, chance, ends in found:
                yield Cell(share * chance, [e for _, e in known[:num]], ends, list(path[:num]), verdict)

    def filled(self, answer: Answer) -> np.ndarray:
        """The distribution of texts of one length [3, ..., 3], after an answer that may be shorter."""
        p, distribution = self.rows(0), np.zeros((3,) * self.longest)
        for text, chance in completed({answer: 1.0}, p.__getitem__, self.longest).items():
            distribution[text] += chance
        return distribution.flatten()


def batches(kind: str) -> dict[str, tuple[int, list[dict[str, Any]]]]:
    """Lengths of a step, and requests: where a step takes long, of fewer draft tokens."""
    less = int(kind == "device")
    ragged = CumulativeConfidence(threshold=0.6, max_tokens=3 - less), CostAware(max_tokens=3 - less)
    kinds = Entropy(threshold=0.3, min_tokens=0, max_tokens=2 - less), CumulativeConfidence(threshold=0.6, max_tokens=2)
    top_p = Sampling(temperature=1.3, top_p=0.8)
    return {
        "two alike": (1, [{"policy": Fixed(k=2)}, {"policy": Fixed(k=2), "context": (0, 1)}]),
        "two, ragged": (
            2 if less else 6,
            [{"policy": ragged[0], "verification": "block", "context": (0,)}, {"policy": ragged[1], "context": (1,)}],
        ),
        "three alike": (1, [{"policy": Fixed(k=1), "context": c} for c in ((2, 0, 1), (1, 1), (0, 2, 2, 1))]),
        "three of all kinds": (
            2,
            [
                {"policy": kinds[0], "verification": "compare", "context": (0,)},
                {"policy": Fixed(k=0), "context": (1, 2), "sampling": top_p},
                {"policy": kinds[1], "verification": "block", "context": (1,)},
            ],
        ),
    }


class Three(Automaton):
    SIZE = 3

    def push(self, token: int) -> None:
        self._state = str(token)


NO_REPEATS = {str(last): {token: str(token) for token in range(3) if token != last} for last in range(3)}
NO_REPEATS["begin"] = {token: str(token) for token in range(3)}
"""A grammar without an end: no token comes twice in a row, though a text may have any."""


def alone(rule: str, verification: str, sampling: str, grammar: Matcher | None = None) -> list[dict[str, Any]]:
    return [{"policy": RULES[rule](), "verification": verification, "sampling": SAMPLINGS[sampling], "grammar": grammar}]


ELSEWHERE_SLOW = (pytest.mark.elsewhere, pytest.mark.slow)
FILTERED = [(*case, s) for s in ("top-p", "min-p") for case in [("cumulative q", "token"), ("fixed", "block")]]
SINGLE = [*((rule, verification, "warm") for rule in RULES for verification in ("token", "block", "compare")), *FILTERED]
CASES = [
    *(
        pytest.param(kind, lambda case=case: alone(*case), None, id=f"{kind}: {', '.join(case)}", marks=marks[i % 4 > 0])
        for kind, *marks in (("host", ()), ("native", *[needs_compiler] * 2), ("device", pytest.mark.elsewhere, ELSEWHERE_SLOW))
        for i, case in enumerate(SINGLE)
        if kind != "host" or i % 4 == 0  # each verification at least twice; test_law.py has all on the host
    ),
    *(
        pytest.param(
            "native", lambda c=case: alone(*c, grammar=Three(NO_REPEATS)), None, id=f"grammar: {case}", marks=needs_compiler
        )
        for case in itertools.product(RULES, ("token", "block"), ("warm",))
    ),
    *(
        pytest.param(kind, lambda batch=batch: batch, num, id=f"{kind}: {name}", marks=marks[name == "three alike"])
        for kind, *marks in (("native", *[needs_compiler] * 2), ("device", pytest.mark.elsewhere, ELSEWHERE_SLOW))
        for name, (num, batch) in batches(kind).items()
        if (kind, name) != ("device", "two alike")
    ),
]


@pytest.mark.parametrize(("kind", "batch", "num_lengths"), CASES)
def test_the_distribution_of_a_step_is_the_product_of_the_targets(
    kind: str, batch: Callable[[], Any], num_lengths: int | None
) -> None:
    """Catches a stop that depends on the draft token drawn after it, a uniform that is used twice or by two requests, and rows,
    caches, verdicts or memories that are another's: a step at an end of every piece of the uniforms of all requests, their
    places in the batch changing, a piece of somebody's prompt beside two of three.

    Computed, not sampled: no false alarms."""
    models = models_of("device" if kind == "host" else kind, vocab_size=3)
    engine, ones = ENGINES[kind](), [One(models, **how) for how in batch()]
    assert all(engine.refusal(one.request) is None for one in ones)
    sides, turns = itertools.cycle((0, 1, 1, 0, 1)), itertools.cycle(range(3))
    with unchecked():
        cells = [list(one.cells(engine)) for one in ones]
        filled = [{a: one.filled(a) for a in {(), *(c.answer for c in of)}} for one, of in zip(ones, cells, strict=True)]
        distribution: Any = 0.0
        beside = [Reading(One(models, Fixed(k=1)).request, [1, 2, 0, 0], [2, 1][:n]) for n in (0, 2)]
        lengths = set()
        for joint in itertools.product(*cells):
            plans = [
                one.plan([e[next(sides)] for e in cell.drawn], [e[next(sides)] for e in cell.tested])
                for one, cell in zip(ones, joint, strict=True)
            ]
            prompts = beside[: next(turns)] if engine.shares(ones[0].request) else []
            made = turned(engine, plans, next(turns), beside=prompts)
            found = [(one.tokens, (one.num_accepted, one.next_token)) for one in made]
            assert found == [(cell.tokens, cell.verdict) for cell in joint]
            assert not any(stream.points for one in ones for stream in one.streams), "uniforms were left over"
            texts = [of[cell.answer] for of, cell in zip(filled, joint, strict=True)]
            distribution = distribution + math.prod(cell.chance for cell in joint) * reduce(np.multiply.outer, texts)
            lengths.add(tuple(len(cell.tokens) for cell in joint))
    own = reduce(np.multiply.outer, [of[()] for of in filled])
    assert np.abs(distribution - own).max() < 1e-9
    is_fixed = all(isinstance(one.policy, Fixed) for one in ones)
    assert len(lengths) == (num_lengths or len(lengths))
    assert (len(lengths) == 1) == is_fixed


def turned(engine: Any, plans: list[Plan], by: int, *, beside: list[Reading]) -> list[Result]:
    """The results of a batch that is told in another order."""
    for reading in beside:
        reading.request.target.rollback(0)
        reading.request.draft.rollback(0)
    order = [(i + by) % len(plans) for i in range(len(plans))]
    results = dict(zip(order, engine.run([plans[i] for i in order], beside), strict=True))
    return [results[i] for i in range(len(plans))]
