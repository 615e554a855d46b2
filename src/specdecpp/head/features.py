"""Inputs of a head beside the hidden state: four scalars of a draft token and of the distribution q that it was drawn from.

    log_q      log q(Y), at least that of 1e-30, so that no scalar is infinite
    entropy    H(q) in nats
    gap        the lead of the argmax over the second token; 0 where there is no second
    depth      the place of the token in its step, from 1

Under greedy drafting nothing is drawn, and q is the softmax of the logits at T = 1.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from specdecpp.policies.protocol import DraftSoFar

SCALARS = ("log_q", "entropy", "gap", "depth")
LEAST_Q = 1e-30


def log_q(q: Float[Tensor, "*rows V"], tokens: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
    """log q(Y), -inf where q is 0."""
    return q.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).log()


def entropy(q: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows"]:
    """H(q) in nats."""
    return torch.special.entr(q).sum(-1)


def gap(q: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows"]:
    """The difference of the two largest probabilities."""
    top = q.topk(min(2, q.shape[-1]), dim=-1).values
    return top[..., 0] - top[..., -1]


def rows(
    names: Sequence[str],
    *,
    tokens: Int[Tensor, "*rows"],
    q: Float[Tensor, "*rows V"],
    depth: int | Int[Tensor, "*rows"],
) -> Float[Tensor, "*rows S"]:
    """The scalars `names` of tokens and the distributions that they were drawn from, a column for each; others cost nothing.

    >>> rows(("entropy", "depth"), tokens=torch.tensor([1]), q=torch.tensor([[0.5, 0.5]]), depth=3)
    tensor([[0.6931, 3.0000]])
    """
    made = {
        "log_q": lambda: log_q(q, tokens),
        "entropy": lambda: entropy(q),
        "gap": lambda: gap(q),
        "depth": lambda: torch.full(tokens.shape, depth, device=q.device) if isinstance(depth, int) else depth,
    }
    return recorded(names, {name: made[name]() for name in names}, like=q[..., 0])


def recorded(names: Sequence[str], known: Mapping[str, Tensor], *, like: Float[Tensor, "*rows"]) -> Float[Tensor, "*rows S"]:
    """The scalars `names` from numbers that are `known` by name, in float32; `like` has the rows' shape and device."""
    if not names:
        return like.new_zeros((*like.shape, 0), dtype=torch.float32)
    found = torch.stack([known[name].float() for name in names], -1)
    return found.clamp(min=math.log(LEAST_Q))  # the others are never below that


def of_last(names: Sequence[str], draft: "DraftSoFar") -> tuple[float, ...]:
    """The scalars `names` of the last token of a step that is decoded token by token."""
    made = {
        "log_q": lambda: math.log(max(draft.confidence(-1), LEAST_Q)),
        "entropy": lambda: draft.entropy(-1),
        "gap": lambda: draft.gap(-1),
        "depth": lambda: float(draft.num_tokens),
    }
    return tuple(made[name]() for name in names)
