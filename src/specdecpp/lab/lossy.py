"""Verifications that do not keep the target's distribution p, each with the m(p, q) that it keeps instead: lossless=False.

All of them are the ratio test of m where the lossless one has p: accept Y ~ q with probability min(1, m(Y)/q(Y)), else draw
norm((m - q)+). So a token with a draft token in its place has the distribution

    min(m, q) + (m - q)+  =  m,      rejected with probability TV(m, q), the least that any test for m can have,

and the token after the last draft token has the distribution p. Because it is the least, a rule whose authors test draft tokens
otherwise (Fuzzy SD rejects outright and draws from p, typical acceptance too) has their distribution here and accepts at least
as often. How many tokens are not the target's is the sum of TV(m, p) over places: the share of tokens that differ from the
target's draws when both are coupled as well as distributions can be.

Temperature 0 (`AtZero`): p and q are taken at temperature 1, and the token is the likeliest of m(p, q).

Sources: Fuzzy SD, Holsinger et al. 2025 (2502.20704); cascades, Narasimhan et al. 2024 (2405.19261); typical acceptance, Cai et
al. 2024 (2401.10774); a budget, Yin et al. 2024 (2411.00841).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdecpp.sampling import Randomness
from specdecpp.verify import Verdict, overlap, residual, token_acceptance

Divergence = Literal["kl", "js", "tv"]


def variation(p: Float[Tensor, "*rows V"], q: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows"]:
    """TV(p, q) = sum |p - q| / 2."""
    return (p - q).abs().sum(-1) / 2


def divergence(kind: Divergence, p: Float[Tensor, "*rows V"], q: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows"]:
    """KL(p || q) in nats, infinite where q lacks a token of p; JS in nats, at most ln 2; or TV."""
    if kind == "tv":
        return variation(p, q)
    if kind == "kl":
        return torch.where(p > 0, p * (p / q).log(), 0.0).sum(-1)
    middle = (p + q) / 2
    return (divergence("kl", p, middle) + divergence("kl", q, middle)) / 2


@dataclass(frozen=True)
class Lossy:
    """A verification by the distribution that it keeps, `distribution(p, q)`."""

    allows_dropping: ClassVar[bool] = False
    greedy_only: ClassVar[bool] = False
    is_lossless: ClassVar[bool] = False
    changes_greedy: ClassVar[bool] = True
    """Tell whether temperature 0 is anything but the target's own text."""

    @property
    def at_zero(self) -> "AtZero | None":
        """Its form at temperature 0; None for the target's own text."""
        return AtZero(self) if self.changes_greedy else None

    def distribution(self, p: Float[Tensor, "*rows V"], q: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows V"]:
        """m(p, q), the distribution of a token whose draft token was drawn from q."""
        raise NotImplementedError

    def __call__(
        self, p: Float[Tensor, "K1 V"], q: Float[Tensor, "K V"], tokens: Int[Tensor, " K"], randomness: Randomness
    ) -> Verdict:
        num = len(tokens)
        if num == 0:
            return Verdict(num_accepted=0, next_token=randomness.categorical(p[0]))
        m = self.distribution(p[:num], q)
        accepted = randomness.bernoulli(token_acceptance(m, q, tokens)).tolist()
        count = accepted.index(False) if False in accepted else num
        distribution = p[num] if count == num else residual(m[count], q[count])
        spent = [*variation(m, p[:num]).tolist(), 0.0]
        overlaps = tuple(overlap(m, q).tolist()[: count + 1])
        return Verdict(
            num_accepted=count, next_token=randomness.categorical(distribution), tv=tuple(spent[: count + 1]), overlaps=overlaps
        )


@dataclass(frozen=True)
class Fuzzy(Lossy):
    """Fuzzy SD: m = q where D(p, q) <= threshold, elsewhere p. D is KL(p || q), JS (both in nats) or TV."""

    threshold: float = 0.1
    by: Divergence = "js"

    def __post_init__(self) -> None:
        _check("threshold", self.threshold, most=float("inf"))
        if self.by not in ("kl", "js", "tv"):
            raise ValueError(f"there is no divergence {self.by!r}. There are kl, js and tv.")

    def distribution(self, p: Float[Tensor, "*rows V"], q: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows V"]:
        return torch.where((divergence(self.by, p, q) <= self.threshold)[..., None], q, p)


@dataclass(frozen=True)
class Chow(Lossy):
    """A speculative cascade by Chow's rule: m = p where max q < 1 - alpha, elsewhere q."""

    alpha: float = 0.1

    def __post_init__(self) -> None:
        _check("alpha", self.alpha)

    def distribution(self, p: Float[Tensor, "*rows V"], q: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows V"]:
        return torch.where(q.amax(-1, keepdim=True) < 1 - self.alpha, p, q)


@dataclass(frozen=True)
class OptimalDeferral(Lossy):
    """A speculative cascade by the OPT rule: m = p where max q < max p - alpha TV(p, q), elsewhere q."""

    alpha: float = 0.1

    def __post_init__(self) -> None:
        _check("alpha", self.alpha, most=float("inf"))

    def distribution(self, p: Float[Tensor, "*rows V"], q: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows V"]:
        return torch.where((q.amax(-1) < p.amax(-1) - self.alpha * variation(p, q))[..., None], p, q)


def trusting(
    p: Float[Tensor, "*rows V"], q: Float[Tensor, "*rows V"], trusted: Bool[Tensor, "*rows V"]
) -> Float[Tensor, "*rows V"]:
    """q on the trusted tokens, the rest of its mass by p: m = q 1_T + (1 - q(T)) p."""
    kept = q * trusted
    return kept + (q * ~trusted).sum(-1, keepdim=True) * p


@dataclass(frozen=True)
class TokenCascade(Lossy):
    """A token-specific speculative cascade (the third of the paper's rules): m = q 1_T + (1 - q(T)) p with the tokens that the
    target finds nearly as good as its best, T = {x: p(x) >= (1 - alpha) max p}. Where q = p this is not p: it favours T."""

    alpha: float = 0.1

    def __post_init__(self) -> None:
        _check("alpha", self.alpha)

    def distribution(self, p: Float[Tensor, "*rows V"], q: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows V"]:
        return trusting(p, q, p >= (1 - self.alpha) * p.amax(-1, keepdim=True))


@dataclass(frozen=True)
class Typical(Lossy):
    """Typical acceptance as in Medusa: m = q 1_T + (1 - q(T)) p with T = {x: p(x) > min(epsilon, delta exp(-H(p)))}.

    Medusa takes delta = sqrt(epsilon), and so does None. Where q = p this is not p: it favours T.
    """

    epsilon: float = 0.09
    delta: float | None = None

    def __post_init__(self) -> None:
        _check("epsilon", self.epsilon)
        if self.delta is not None:
            _check("delta", self.delta, most=float("inf"))

    @property
    def share(self) -> float:
        """delta, as it is used."""
        return self.epsilon**0.5 if self.delta is None else self.delta

    def distribution(self, p: Float[Tensor, "*rows V"], q: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows V"]:
        entropy = -torch.where(p > 0, p * p.log(), 0.0).sum(-1, keepdim=True)
        return trusting(p, q, p > (self.share * (-entropy).exp()).clamp(max=self.epsilon))


@dataclass(frozen=True)
class TVBudget(Lossy):
    """At most `eps` of total variation a token: m = p + min(1, eps/TV(p, q)) (q - p).

    No distribution within the budget is rejected less often: TV(m, q) >= TV(p, q) - TV(m, p) >= TV(p, q) - eps, which this one
    reaches. At temperature 0, where any other token than the target's is a variation of 1, it is greedy and exact.
    """

    changes_greedy: ClassVar[bool] = False
    eps: float = 0.1

    def __post_init__(self) -> None:
        _check("eps", self.eps)

    def distribution(self, p: Float[Tensor, "*rows V"], q: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows V"]:
        share = (self.eps / variation(p, q).clamp(min=1e-30)).clamp(max=1.0)[..., None]
        return p + share * (q - p)


@dataclass(frozen=True)
class AtZero:
    """A lossy rule at temperature 0: accept while the draft token is the likeliest of m(p, q), p and q at temperature 1."""

    rule: Lossy
    is_lossless: ClassVar[bool] = False
    reads_q: ClassVar[bool] = True
    allows_dropping: ClassVar[bool] = True
    greedy_only: ClassVar[bool] = True  # p are logits

    def __call__(
        self, p: Float[Tensor, "K1 V"], q: Float[Tensor, "K V"], tokens: Int[Tensor, " K"], randomness: Randomness
    ) -> Verdict:
        num, best, distribution = len(tokens), p.argmax(-1), p.softmax(-1)
        kept = torch.cat([self.rule.distribution(distribution[:num], q).argmax(-1), best[num:]]) if num else best
        chosen = kept.tolist()
        count = next((i for i, token in enumerate(tokens.tolist()) if chosen[i] != token), num)
        return Verdict(num_accepted=count, next_token=chosen[count], tv=tuple((kept != best)[: count + 1].double().tolist()))


def _check(name: str, value: float, *, most: float = 1.0) -> None:
    if not 0 <= value <= most:
        raise ValueError(f"{name} must be {'at least 0' if most > 1 else 'between 0 and 1'}, got {value}")


LOSSY: dict[str, Lossy] = {
    "fuzzy": Fuzzy(),
    "chow": Chow(),
    "opt": OptimalDeferral(),
    "token-cascade": TokenCascade(),
    "typical": Typical(),
    "tv": TVBudget(),
}
"""Lossy verifications by name, in their usual settings."""
