"""Which rules, verifications, sampling and runners go together: what does not is refused before a round is run."""

from typing import Any

from specdecpp.errors import UnsoundError
from specdecpp.policies import Policy
from specdecpp.rounds.verification import Verification, check_lossless


def check_rule(policy: Policy, verification: Verification, *, lossless: bool) -> None:
    """Raise `UnsoundError` for a rule and a verification that together would change the law unasked, whatever the sampling, and
    ValueError for a rule made of others that may not be parts of one."""
    check_lossless(verification, lossless=lossless)
    check_parts(policy)
    if policy.drops_last and not verification.allows_dropping:
        raise UnsoundError(
            f"{policy} removes a sampled candidate after looking at it, and {type(verification).__name__} then no longer "
            "keeps the target's distribution. Keep the candidate (drop=False), or use GreedyVerification() with "
            "temperature 0, or CompareVerification()."
        )
    policy.check(verification)


def check_request(
    policy: Policy,
    verification: Verification,
    *,
    draft: Any,
    is_greedy: bool,
    has_costs: bool,
    lossless: bool,
) -> None:
    """Raise `UnsoundError` for what would change the law unasked, ValueError for what cannot be run, each saying what to do."""
    check_lossless(verification, lossless=lossless)
    if policy.needs_costs and not has_costs:
        raise ValueError(
            f"{type(policy).__name__} weighs what steps cost, and no costs were given. Give costs=Costs(...), as the "
            "Decoder does once it has measured them."
        )
    if is_greedy and not verification.allows_dropping:
        raise UnsoundError(
            f"at temperature 0 candidates have no distribution q, which {type(verification).__name__} compares with. "
            "Use GreedyVerification(), as the Decoder does."
        )
    check_parts(policy)
    policy.check(verification, is_greedy=is_greedy, draft=draft)


def check_parts(policy: Policy) -> None:
    """Raise ValueError unless a rule made of others is made of rules for chains of one draft's candidates."""
    for part in policy.parts:
        if part.engine() is not None:
            raise ValueError(
                f"{type(policy).__name__} is made of rules for chains of one draft, and {type(part).__name__} drafts "
                "otherwise. Use that alone."
            )
        check_parts(part)
