"""Verifications as the compiled code knows them (`runners/native/cpp/lossy.h`): a number, and those of a law that is not p."""

from typing import Any, NamedTuple

from specdecpp.rounds.lossy import AtZero, Chow, Fuzzy, OptimalDeferral, TokenCascade, TVBudget, Typical
from specdecpp.rounds.verification import (
    BlockVerification,
    CompareVerification,
    GreedyVerification,
    TokenVerification,
    Verification,
)

COMPARE = 2
_SAMPLED = {TokenVerification: 0, BlockVerification: 1, CompareVerification: COMPARE}
_GREEDY = {GreedyVerification: 0, CompareVerification: COMPARE}
_FUZZY: dict[str, int] = {"kl": 3, "js": 4, "tv": 5}
_LOSSY: dict[type, int] = {Chow: 6, OptimalDeferral: 7, TokenCascade: 8, Typical: 9, TVBudget: 10}


class Coded(NamedTuple):
    """A verification as the compiled code is told of it: its number, and those of its law."""

    verification: int
    first: float = 0.0
    second: float = 0.0


def coded(verification: Verification, *, is_greedy: bool) -> Coded | None:
    """None for a verification that the compiled code does not know at this temperature."""
    if (kind := type(verification)) in (_GREEDY if is_greedy else _SAMPLED):
        return Coded((_GREEDY if is_greedy else _SAMPLED)[kind])
    rule: Any = verification.rule if is_greedy and isinstance(verification, AtZero) else verification
    if is_greedy and rule is verification:
        return None
    if type(rule) is Fuzzy:
        return Coded(_FUZZY[rule.by], rule.threshold)
    if type(rule) is Typical:
        return Coded(_LOSSY[Typical], rule.epsilon, rule.share)
    if type(rule) is TVBudget:
        return Coded(_LOSSY[TVBudget], rule.eps)
    return Coded(_LOSSY[type(rule)], rule.alpha) if type(rule) in _LOSSY else None


def is_lossy(of: Coded) -> bool:
    """Whether its law is another than p."""
    return of.verification > COMPARE
