"""The table of cases that holds every engine to the specification: rules, ways to sample and verify, ends, batches."""

import itertools
from functools import cache
from typing import Any

from policies_list import heads_for, policies

from specdecpp.backends import GraphModel, NativeModel
from specdecpp.backends.graphs.engine import Device
from specdecpp.backends.native.steps import Native
from specdecpp.policies import Costs, Policy
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
    """A tiny target and draft: compiled in float32, or as graphs (or another backend) in float64."""

    def __init__(
        self,
        kind: str,
        *,
        vocab_size: int = VOCAB,
        noise: float = 0.4,
        device: str = "cpu",
        backend: Any = GraphModel,
        **config: Any,
    ):
        target = tiny_model("llama", seed=1, head_dim=16, vocab_size=vocab_size, **config)

        def made(model: Any) -> Any:
            return NativeModel(model, num_threads=1) if kind == "native" else backend(model.double().to(device))

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
        given = {"draft": self.draft.new_cache(), "prompt": [3, 5, 2, 9], "max_tokens": 40, "costs": COSTS, "ends": ENDS}
        session = Session(
            target=self.target.new_cache(),
            policy=policy,
            verification=verification,
            sampling=sampling,
            randomness=streams(seed, draw=getattr(self.draft, "draw", None)),
            **(given | more),
        )
        if by_host:
            session.engine = Host()
        return session


models_of = cache(Models)


HEADS = heads_for(32, VOCAB, scale=0.6)
RULES = {
    name: rule
    for name, rule in policies(HEADS, 6, fused_only=True).items()
    if type(rule).__module__.startswith("specdecpp.policies")
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
