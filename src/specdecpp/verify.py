"""How many draft tokens are accepted, and which token follows them: pure functions of p, q and randomness.

K draft tokens Y_1..Y_K were drawn from q[0..K-1]; p has K + 1 rows, row i being the target's distribution after
Y_1..Y_i. All of it in float32 or better. The kinds below keep the target's distribution exactly.
Those that entry points name (`specdecpp.verifications`) may keep another, and must be asked for:

token    accept Y_i with probability min(1, p(Y_i)/q(Y_i)), stop at the first rejection and draw from norm((p - q)+); if
         all are accepted draw the bonus from p. One step emits y with probability
         q(y) min(1, p(y)/q(y)) + P(reject) (p(y) - q(y))+ / P(reject) = min(p, q) + (p - q)+ = p(y),
         because P(reject) = sum (q - p)+ = sum (p - q)+. (Leviathan et al. 2023; Chen et al. 2023.)
block    accept the longest prefix i whose trial succeeds, with probability h_i (Sun et al. 2024, algorithm 2). With the carry
         w_0 = 1, w_i = min(1, w_{i-1} p(Y_i)/q(Y_i)) the prefix Y_1..Y_i survives with probability w_i in all, which
         makes the joint distribution of the prefix prod q * w <= prod p; the missing mass R_i is what the residual restores.
         In expectation it accepts at least as many as `token`.
greedy   accept while the draft token is the target's most likely token. Logits do for p.
compare  draw y_i ~ p for every row and accept while Y_i = y_i: lossless for *any* draft tokens, also for draft tokens that
         were dropped after looking at them, but accepts less than `token`.

Sources on arXiv: Leviathan 2211.17192, Chen 2302.01318, Sun 2403.10444.
"""

from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdecpp.errors import UnsoundError
from specdecpp.policies import Policy
from specdecpp.sampling import Randomness, Sampling


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of one verification: the accepted prefix length and the token that follows it."""

    num_accepted: int
    next_token: int
    tv: tuple[float, ...] = ()
    """Total variation of each of these tokens from the target's distribution; empty where that is 0."""
    overlaps: tuple[float, ...] = ()
    """`overlap` in the place of each draft token that was tested; empty where it is not known."""


def token_acceptance(p: Float[Tensor, "K V"], q: Float[Tensor, "K V"], tokens: Int[Tensor, " K"]) -> Float[Tensor, " K"]:
    """min(1, p(Y_i)/q(Y_i)) for each draft token, given that those before it were accepted. A draft token has q > 0."""
    at = tokens.unsqueeze(-1)
    return (p.gather(-1, at) / q.gather(-1, at)).squeeze(-1).clamp(max=1.0)


def overlap(p: Float[Tensor, "*rows V"], q: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows"]:
    """sum min(p, q), the chance that a draft token drawn from q passes the ratio test: 1 - TV(p, q)."""
    return torch.minimum(p, q).sum(-1)


def residual(p: Float[Tensor, " V"], q: Float[Tensor, " V"], carry: Float[Tensor, ""] | float = 1.0) -> Float[Tensor, " V"]:
    """norm((carry * p - q)+), the distribution of the correction. Where rounding leaves no mass at all, p itself."""
    rest = (carry * p - q).clamp(min=0)
    mass = rest.sum()
    return rest / mass if mass > 0 else p


@runtime_checkable
class Verification(Protocol):
    """A pure function of rows, draft tokens and a stream of uniforms: those below, and any of your own.

    Optional attributes: `is_lossless` (True), `at_zero`, the form at temperature 0 (`GreedyVerification`), and `reads_q` (not
    `allows_dropping`).
    """

    allows_dropping: ClassVar[bool]
    """True where draft tokens may have been dropped after looking at them: it then reads no q, and takes greedy drafting."""
    greedy_only: ClassVar[bool]
    """True where it keeps the target's distribution at temperature 0 only. Logits do for p then."""

    def __call__(
        self, p: Float[Tensor, "K1 V"], q: Float[Tensor, "K V"], tokens: Int[Tensor, " K"], randomness: Randomness
    ) -> Verdict:
        """How many of the K draft tokens are accepted, and the token after them."""
        ...


def block_acceptance(
    p: Float[Tensor, "K1 V"], q: Float[Tensor, "K V"], tokens: Int[Tensor, " K"]
) -> tuple[Float[Tensor, " K"], Float[Tensor, " K1"]]:
    """(h_1..h_K, carry w_0..w_K) of block verification.

    h_i = R_i/(R_i + 1 - w_i) with R_i = sum_x (w_i p(x|Y_<=i) - q(x|Y_<=i))+ for i < K, and h_K = w_K.
    """
    num = len(tokens)
    at = tokens.unsqueeze(-1)
    ratio = (p[:num].gather(-1, at) / q.gather(-1, at)).squeeze(-1)
    carry = [torch.ones((), dtype=p.dtype, device=p.device)]
    for r in ratio:
        carry.append((carry[-1] * r).clamp(max=1.0))
    w = torch.stack(carry)
    missing = (w[1:num, None] * p[1:num] - q[1:]).clamp(min=0).sum(-1)
    inner = missing / (missing + (1 - w[1:num]))  # in this order: missing may be far below 1
    # 0/0: p = q after a prefix that is certain. A longer prefix is then certain too, so this one is never the last.
    return torch.cat([inner.nan_to_num(nan=0.0), w[num:]]), w


@dataclass(frozen=True)
class TokenVerification:
    """The ratio test, draft token by draft token (Leviathan et al. 2023)."""

    allows_dropping: ClassVar[bool] = False
    greedy_only: ClassVar[bool] = False

    def __call__(
        self, p: Float[Tensor, "K1 V"], q: Float[Tensor, "K V"], tokens: Int[Tensor, " K"], randomness: Randomness
    ) -> Verdict:
        num = len(tokens)
        accepted = randomness.bernoulli(token_acceptance(p[:num], q, tokens)).tolist() if num else []
        count = accepted.index(False) if False in accepted else num
        distribution = p[num] if count == num else residual(p[count], q[count])
        tested = slice(min(count + 1, num))
        overlaps = tuple(overlap(p[tested], q[tested]).tolist())
        return Verdict(num_accepted=count, next_token=randomness.categorical(distribution), overlaps=overlaps)


@dataclass(frozen=True)
class BlockVerification:
    """Accept the longest prefix whose trial succeeds (Sun et al. 2024): in expectation at least as many as the ratio test."""

    allows_dropping: ClassVar[bool] = False
    greedy_only: ClassVar[bool] = False

    def __call__(
        self, p: Float[Tensor, "K1 V"], q: Float[Tensor, "K V"], tokens: Int[Tensor, " K"], randomness: Randomness
    ) -> Verdict:
        num = len(tokens)
        if num == 0:
            return Verdict(num_accepted=0, next_token=randomness.categorical(p[0]))
        h, carry = block_acceptance(p, q, tokens)
        passed = randomness.bernoulli(h).nonzero()
        count = int(passed[-1]) + 1 if len(passed) else 0
        distribution = p[num] if count == num else residual(p[count], q[count], carry[count])
        return Verdict(num_accepted=count, next_token=randomness.categorical(distribution))


@dataclass(frozen=True)
class GreedyVerification:
    """Accept while the draft token is the target's most likely token; p is one-hot, q is not read. Temperature 0."""

    allows_dropping: ClassVar[bool] = True
    greedy_only: ClassVar[bool] = True

    def __call__(
        self, p: Float[Tensor, "K1 V"], q: Float[Tensor, "_ V"] | None, tokens: Int[Tensor, " K"], randomness: Randomness
    ) -> Verdict:
        best, given = p.argmax(-1).tolist(), tokens.tolist()
        count = next((i for i, token in enumerate(given) if best[i] != token), len(given))
        return Verdict(num_accepted=count, next_token=best[count])


@dataclass(frozen=True)
class CompareVerification:
    """Draw y_i ~ p for each row, accept while the draft token equals it. Exact for any draft tokens, dropped ones included."""

    allows_dropping: ClassVar[bool] = True
    greedy_only: ClassVar[bool] = False

    def __call__(
        self, p: Float[Tensor, "K1 V"], q: Float[Tensor, "_ V"] | None, tokens: Int[Tensor, " K"], randomness: Randomness
    ) -> Verdict:
        for i, token in enumerate(tokens.tolist()):
            drawn = randomness.categorical(p[i])
            if drawn != token:
                return Verdict(num_accepted=i, next_token=drawn)
        return Verdict(num_accepted=len(tokens), next_token=randomness.categorical(p[len(tokens)]))


@cache
def verifications() -> dict[str, Verification]:
    """All kinds by the names that people type, those that entry points name among them. `greedy` is what temperature 0 has,
    unless a kind has a form of its own for it (`at_zero`)."""
    own = {
        "token": TokenVerification(),
        "block": BlockVerification(),
        "compare": CompareVerification(),
        "greedy": GreedyVerification(),
    }
    found = {name: kind for point in entry_points(group="specdecpp.verifications") for name, kind in point.load().items()}
    if taken := own.keys() & found.keys():
        raise ValueError(f"an installed package names a verification {min(taken)!r}, one of ours. Uninstall it, or rename it.")
    return own | found


def is_lossless(verification: Verification) -> bool:
    """True where the output keeps the target's distribution: all do but those that say `is_lossless = False`."""
    return getattr(verification, "is_lossless", True)


def check_lossless(verification: Verification, *, lossless: bool) -> None:
    """Raise `UnsoundError` for a verification that changes the distribution, where nobody has said that it may."""
    if lossless and not is_lossless(verification):
        raise UnsoundError(
            f"{verification} does not keep the target's distribution, and lossless output is asked for. Say that another "
            "distribution will do (lossless=False; --lossy on the command line), or use TokenVerification()."
        )


def verification_for(sampling: Sampling, verification: Verification) -> Verification:
    """The verification as a request under this sampling has it: temperature 0 compares the likeliest tokens."""
    if not sampling.is_greedy:
        return verification
    return getattr(verification, "at_zero", None) or GreedyVerification()


def check_rule(policy: Policy, verification: Verification, *, lossless: bool) -> None:
    """Raise `UnsoundError` for a rule and a verification that together would change the distribution unasked, whatever the
    sampling, and ValueError for a rule made of others that may not be parts of one."""
    check_lossless(verification, lossless=lossless)
    check_parts(policy)
    if policy.drops_last and not verification.allows_dropping:
        raise UnsoundError(
            f"{policy} removes a sampled draft token after looking at it, and {type(verification).__name__} then no longer "
            "keeps the target's distribution. Keep the draft token (drop=False), or use GreedyVerification() with "
            "temperature 0, or CompareVerification()."
        )
    policy.check(verification)


def check_request(
    policy: Policy,
    verification: Verification,
    *,
    is_greedy: bool,
    has_costs: bool,
    lossless: bool,
    has_grammar: bool = False,
) -> None:
    """Raise `UnsoundError` for what would change the distribution unasked, ValueError for what cannot be run, each saying what
    to do."""
    check_lossless(verification, lossless=lossless)
    if policy.needs_costs and not has_costs:
        raise ValueError(
            f"{type(policy).__name__} weighs what steps cost, and no costs were given. Give costs=Costs(...), as the "
            "Decoder does once it has measured them."
        )
    if is_greedy and not verification.allows_dropping:
        raise UnsoundError(
            f"at temperature 0 draft tokens have no distribution q, which {type(verification).__name__} compares with. "
            "Use GreedyVerification(), as the Decoder does."
        )
    if has_grammar and policy.engine() is not None:
        raise ValueError(f"{type(policy).__name__} brings its own engine, which follows no grammar. Use another rule.")
    check_parts(policy)
    policy.check(verification, is_greedy=is_greedy)


def check_parts(policy: Policy) -> None:
    """Raise ValueError unless the parts of a rule made of others draft one chain with the draft model."""
    for part in policy.parts:
        if part.engine() is not None:
            raise ValueError(
                f"{type(policy).__name__} is made of rules for chains of one draft, and {type(part).__name__} drafts "
                "otherwise. Use that alone."
            )
        check_parts(part)
