"""One list of all policies, with settings under which they stop, learn and remember within a few tokens of a tiny pair, and one
of the verifications of ours that are for any temperature.

Tests of exactness (test_law), of engines (engine_cases) and of replay (test_replay) go through them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from distributions import random_head

from specdecpp import lab
from specdecpp.head import AcceptanceHead, Calibration, HeadCard
from specdecpp.policies import CostAware, CumulativeConfidence, DraftSoFar, Entropy, Fixed, MaxConfidence, Policy, SpecDecPP
from specdecpp.verify import verifications

VERIFICATIONS = {
    name: kind for name, kind in verifications().items() if type(kind).__module__ == "specdecpp.verify" and not kind.greedy_only
}
SCALARS = ("log_q", "entropy", "gap", "depth")


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Calibrated heads for the models of a test; `deep` is a lagged one that reads all scalars."""

    lagged: AcceptanceHead
    deep: AcceptanceHead
    ahead: AcceptanceHead


@cache
def heads_for(hidden_size: int, vocab_size: int, *, scale: float = 2.0) -> Heads:
    """Heads with random weights; larger ones give estimates that differ more from token to token."""
    sampled = Calibration(num_labels=9, bias=-0.1, temperature=1.3)
    card: dict[str, Any] = {"calibration": sampled, "greedy": replace(sampled, bias=0.3)}
    lagged = random_head(hidden_size, seed=5, scale=scale, **card)
    deep = random_head(hidden_size, seed=12, scale=1.5 * scale, scalars=SCALARS, **card)
    ahead = random_head(hidden_size, seed=5, scale=scale / 2, form="look_ahead", vocab_size=vocab_size, scalars=SCALARS, **card)
    for head in (lagged, deep, ahead):
        torch.nn.init.zeros_(head.output.bias)
    return Heads(lagged=lagged, deep=deep, ahead=ahead)


def constant_head(logit: float, **card: Any) -> AcceptanceHead:
    """A head that gives every draft token the same logit."""
    head = AcceptanceHead(HeadCard(hidden_size=4, num_layers=0, **card))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
        head.output.bias.fill_(logit)
    return head


@dataclass(frozen=True, kw_only=True)
class UntilToken(Policy):
    """A rule of a user's own: stop after drawing one particular token."""

    token: int = 1

    def stop(self, draft: DraftSoFar, memory: Any) -> str | None:
        return "the token" if draft.num_tokens and draft.tokens[-1] == self.token else None


@dataclass(frozen=True, kw_only=True)
class Example:
    """A policy as a function of heads and of the most draft tokens of a step, at least 2. Every one is lossless."""

    make: Callable[[Heads, int], Policy]
    looks: bool = True
    """It stops by what it has drafted."""
    learns: bool = False
    """It remembers outcomes."""
    fused: bool = True
    """Backends run it in their own draft loop."""


def _head(policy: Callable[..., Policy], form: str, **settings: Any) -> Callable[[Heads, int], Policy]:
    return lambda heads, most: policy(head=getattr(heads, form), max_tokens=most, **settings)


def _free(policy: Callable[..., Policy], **settings: Any) -> Callable[[Heads, int], Policy]:
    return lambda heads, most: policy(max_tokens=most, **settings)


_specdecpp = partial(_head, SpecDecPP, calibrated=True)
EXAMPLES: dict[str, Example] = {
    "none": Example(make=lambda heads, most: Fixed(k=0), looks=False),
    "fixed-1": Example(make=lambda heads, most: Fixed(k=1), looks=False),
    "fixed": Example(make=lambda heads, most: Fixed(k=most), looks=False),
    "heuristic": Example(make=_free(lab.Heuristic, start_tokens=1), looks=False, learns=True),
    "ema": Example(make=_free(lab.AcceptanceEMA, start_tokens=2, eta=0.6), looks=False, learns=True),
    "argmax": Example(make=_free(lab.ArgmaxLength, prior=0.6, prior_tokens=1), looks=False, learns=True),
    "argmax-fading": Example(
        make=_free(lab.ArgmaxLength, prior=0.6, prior_tokens=1, fading=0.5, min_tokens=0), looks=False, learns=True
    ),
    "ucb-specstop": Example(make=lambda heads, most: lab.UCBSpecStop(max_tokens=min(3, most)), looks=False, learns=True),
    "cascade": Example(
        make=_free(lab.Cascade, start_tokens=2, trial_steps=1, max_trials=2, set_steps=1), looks=False, learns=True
    ),
    "frontier": Example(make=_free(lab.FrontierLength, probe_every=1, fading=0.5, min_tests=1), looks=False, learns=True),
    "ema-skip": Example(make=_free(lab.SkippingEMA, skip_below=0.7, probe_every=2), looks=False, learns=True),
    "online-logistic": Example(make=_free(lab.OnlineLogistic, fit_every=1, warm_up=0, damping=0.0), looks=False, learns=True),
    "disco": Example(make=_free(lab.Disco, threshold=0.6, bias=0.2, by_entropy=-0.5, by_gap=0.3, by_depth=-0.4)),
    "max-confidence": Example(make=_free(MaxConfidence, threshold=0.5)),
    "cumulative": Example(make=_free(CumulativeConfidence, threshold=0.4)),
    "cumulative-2": Example(make=_free(CumulativeConfidence, threshold=0.9, min_tokens=2), looks=False),
    "entropy": Example(make=_free(Entropy, threshold=0.3)),
    "draft-verify": Example(make=_free(lab.DraftVerify, threshold=0.4, step=3.0), learns=True),
    "adaptive-entropy": Example(make=_free(lab.AdaptiveEntropy, threshold=0.57, step=2.0), learns=True),
    "specdecpp-lagged": Example(make=_specdecpp("lagged", threshold=0.5, min_tokens=0)),
    "specdecpp-deep": Example(make=_specdecpp("deep", threshold=0.5, min_tokens=1)),
    "specdecpp-ahead": Example(make=_specdecpp("ahead", threshold=0.5, min_tokens=0)),
    "specdecpp-ahead-2": Example(make=_specdecpp("ahead", threshold=0.2, min_tokens=2), looks=False),
    "cost-aware-by-q": Example(make=_free(CostAware, prior=0.4, prior_steps=1), looks=False),
    "cost-aware-from-none": Example(make=_free(CostAware, prior=0.3, prior_steps=1, regret=0.5), looks=False),
    "cost-aware": Example(make=_head(CostAware, "ahead", min_tokens=0, prior=0.4, prior_steps=1), learns=True),
    "cost-aware-lagged": Example(make=_head(CostAware, "deep", prior_steps=1), learns=True),
    "bandit": Example(
        make=lambda heads, most: lab.Bandit(
            arms=(
                Fixed(k=2),
                CumulativeConfidence(threshold=0.4, max_tokens=most),
                lab.Heuristic(start_tokens=1, max_tokens=most),
            )
        ),
        looks=False,
        learns=True,
    ),
    "auto-off": Example(
        make=lambda heads, most: lab.AutoOff(
            policy=CumulativeConfidence(threshold=0.2, max_tokens=most), patience=1, probe_every=2
        ),
        looks=False,
        learns=True,
    ),
    "until-token": Example(make=_free(UntilToken), fused=False),
}


def policies(heads: Heads, most: int, *, fused_only: bool = False) -> dict[str, Policy]:
    """Every policy by its name."""
    return {name: example.make(heads, most) for name, example in EXAMPLES.items() if example.fused or not fused_only}
