"""The table of cases that holds every engine to the specification: rules, ways to sample and verify, ends, batches."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from distributions import random_head

from specdecpp.backends import GraphModel, NativeModel
from specdecpp.backends.graphs.engine import Device
from specdecpp.backends.native.steps import Native
from specdecpp.policies import CostAware, Costs, CumulativeConfidence, Entropy, Fixed, MaxConfidence, Policy, SpecDecPP
from specdecpp.sampling import Sampling, streams
from specdecpp.session import Session
from specdecpp.step import Host
from specdecpp.testing import tiny_draft, tiny_model
from specdecpp.verify import Verification, verifications

ENGINES: dict[str, Any] = {"native": Native, "device": Device, "host": Host}
COSTS = Costs(draft_s=0.25, passes={1: 1.0, 2: 1.1, 5: 1.4, 9: 2.0})
VOCAB = 71  # not a multiple of a register
ENDS = (7, 11, 30)


class Models:
    """A tiny target and draft: compiled in float32, or as graphs in float64."""

    def __init__(self, kind: str, *, vocab_size: int = VOCAB, noise: float = 0.4, **config: Any):
        target = tiny_model("llama", seed=1, head_dim=16, vocab_size=vocab_size, **config)
        made: Any = (lambda m: NativeModel(m, num_threads=1)) if kind == "native" else (lambda m: GraphModel(m.double()))
        self.kind, (self.target, self.draft) = kind, (made(m) for m in (target, tiny_draft(target, noise=noise)))

    def session(
        self,
        policy: Policy,
        sampling: Sampling,
        verification: str | Verification = "token",
        *,
        seed: int = 0,
        by_host: bool = False,
        **more: Any,
    ) -> Session:
        if isinstance(verification, str):
            verification = verifications()["greedy" if sampling.is_greedy and verification != "compare" else verification]
        session = Session(
            target=self.target.new_cache(),
            draft=self.draft.new_cache(),
            policy=policy,
            verification=verification,
            sampling=sampling,
            randomness=streams(seed, draw=getattr(self.draft, "draw", None)),
            **({"prompt": [3, 5, 2, 9], "max_tokens": 40, "costs": COSTS, "ends": ENDS} | more),
        )
        if by_host:
            session.engine = Host()
        return session


models_of = cache(Models)


def head(form: str = "look_ahead", **more: Any) -> Any:
    made = random_head(32, seed=4, scale=0.4, form=form, vocab_size=VOCAB if form == "look_ahead" else None, **more)
    sampled = replace(made.card.calibration, num_labels=9, bias=0.7, temperature=1.3)
    return made.with_card(calibration=sampled, greedy=replace(sampled, bias=0.3))


SCALARS = ("gap", "log_q", "depth", "entropy")
RULES: dict[str, Callable[[], Policy]] = {
    "none": lambda: Fixed(k=0),
    "fixed": lambda: Fixed(k=5),
    "max confidence": lambda: MaxConfidence(min_tokens=2, max_tokens=6),
    "cumulative q": lambda: CumulativeConfidence(),
    "entropy": lambda: Entropy(threshold=0.6),
    "specdecpp": lambda: SpecDecPP(head=head(scalars=("depth", "log_q")), threshold=0.6, min_tokens=1),
    "specdecpp, all scalars": lambda: SpecDecPP(head=head(scalars=SCALARS), threshold=0.6),
    "specdecpp, lagged": lambda: SpecDecPP(head=head("lagged"), threshold=0.6, min_tokens=1),
    "specdecpp, lagged, all scalars": lambda: SpecDecPP(head=head("lagged", scalars=SCALARS, width=9), threshold=0.6),
    "costs": lambda: CostAware(head=head(scalars=("log_q",), width=9)),
    "costs, lagged": lambda: CostAware(head=head("lagged")),
    "costs, by q": lambda: CostAware(),
    "costs, by q, from none": lambda: CostAware(prior=0.3, regret=0.2),
    "costs, from none": lambda: CostAware(head=head(), min_tokens=0, prior=0.4),
}
MANNERS: dict[str, tuple[Sampling, str]] = {
    "greedy": (Sampling(temperature=0.0), "token"),
    "greedy, compare": (Sampling(temperature=0.0), "compare"),
    "plain": (Sampling(), "token"),
    "warm": (Sampling(temperature=1.7), "token"),
    "block": (Sampling(temperature=1.3), "block"),
    "compare": (Sampling(temperature=1.3), "compare"),
    "top-p": (Sampling(temperature=1.2, top_p=0.9), "token"),
    "top-p, block": (Sampling(top_p=0.8), "block"),
    "top-k": (Sampling(temperature=1.7, top_k=7), "token"),
    "min-p": (Sampling(temperature=1.4, min_p=0.05), "token"),
    "penalty": (Sampling(temperature=1.1, repetition_penalty=1.4), "token"),
    "penalty, greedy": (Sampling(temperature=0.0, repetition_penalty=1.4), "token"),
    "penalty, compare": (Sampling(repetition_penalty=1.4), "compare"),
    "all": (Sampling(temperature=1.1, top_k=40, top_p=0.97, min_p=0.002, repetition_penalty=1.05), "block"),
}
CASES = [
    (kind, rule, manner)
    for kind in ("native", "device")
    for (i, rule), (j, manner) in itertools.product(enumerate(RULES), enumerate(MANNERS))
    if (i + j) % 3 == 0 or (kind == "native" and manner in ("greedy", "plain", "block"))
]
"""Engines, rules, manners: a third of the pairs, and by compiled code each rule in three plain manners."""
BATCHES = {"native": ([0, 1, 2], [3]), "device": ([0], [1])}
"""Seeds of requests that are decoded together."""
