"""What verifications are made of: the ratio test of a candidate, the law of a correction, and the outcome."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of one verification: the accepted prefix length and the token that follows it."""

    num_accepted: int
    next_token: int
    tv: tuple[float, ...] = ()
    """Of each of these tokens: the total variation between the law it came from and the target's. Empty where that is 0."""
    overlaps: tuple[float, ...] = ()
    """Of each candidate that was tested: how likely a draw from q in its place passes, `overlap`. Empty where nobody knows."""


def token_acceptance(p: Float[Tensor, "K V"], q: Float[Tensor, "K V"], tokens: Int[Tensor, " K"]) -> Float[Tensor, " K"]:
    """min(1, p(Y_i)/q(Y_i)) for each candidate, given that those before it were accepted. A candidate has q > 0."""
    at = tokens.unsqueeze(-1)
    return (p.gather(-1, at) / q.gather(-1, at)).squeeze(-1).clamp(max=1.0)


def overlap(p: Float[Tensor, "*rows V"], q: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows"]:
    """sum min(p, q), the chance that a candidate drawn from q passes the ratio test: 1 - TV(p, q)."""
    return torch.minimum(p, q).sum(-1)


def residual(p: Float[Tensor, " V"], q: Float[Tensor, " V"], carry: Float[Tensor, ""] | float = 1.0) -> Float[Tensor, " V"]:
    """norm((carry * p - q)+), the law of the correction. Where rounding leaves no mass at all, p itself."""
    rest = (carry * p - q).clamp(min=0)
    mass = rest.sum()
    return rest / mass if mass > 0 else p
