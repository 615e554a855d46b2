"""The tests of `verify` as pure functions of uniforms, in shapes that do not depend on the outcome.

Of W - 1 places for draft tokens the first `num` are taken. A uniform u < h accepts, and a token is drawn by inverting the
running sum of its distribution: the outcome is piecewise constant in the uniforms, and its distribution can be integrated
exactly (tests/test_step_law.py).

The bonus is the correction with q = 0: norm((p - 0)+) = p. In block verification likewise h_K = R_K/(R_K + 1 - w_K) = w_K,
since R_K = sum (w_K p - 0)+ = w_K.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdecpp.verify import block_acceptance, token_acceptance


def pick(p: Float[Tensor, "N V"], u: Float[Tensor, " N"]) -> Int[Tensor, " N"]:
    """A token of each row, of any positive scale, by inverting its running sum in float64, as `sampling.Uniforms` does.

    >>> pick(torch.tensor([[0.5, 0.0, 1.5]]), torch.tensor([0.3], dtype=torch.float64))
    tensor([2])
    """
    cdf = p.cumsum(-1, dtype=torch.float64)
    place = torch.searchsorted(cdf, u.unsqueeze(-1) * cdf[:, -1:], right=True)
    return place.squeeze(-1).clamp(max=p.shape[-1] - 1)


def token_verdict(
    p: Float[Tensor, "W V"],
    q: Float[Tensor, "W V"],
    tokens: Int[Tensor, " K"],
    num: Int[Tensor, " 1"],
    uniforms: Float[Tensor, " W"],
) -> Int[Tensor, " 2"]:
    """(how many are accepted, which token follows) by the ratio test; the first draws the token."""
    is_taken = _taken(tokens, num)
    is_accepted = (uniforms[1:] < token_acceptance(p[:-1], q[:-1], tokens)) & is_taken
    count = is_accepted.long().cumprod(0).sum().view(1)
    return _verdict(p, _proposed(q, num), count, torch.ones_like(p[:1, 0]), uniforms)


def block_verdict(
    p: Float[Tensor, "W V"],
    q: Float[Tensor, "W V"],
    tokens: Int[Tensor, " K"],
    num: Int[Tensor, " 1"],
    uniforms: Float[Tensor, " W"],
) -> Int[Tensor, " 2"]:
    """Verdict by block verification: the longest prefix whose uniform says so."""
    q = _proposed(q, num)
    if not len(tokens):
        return _verdict(p, q, num, torch.ones_like(p[:1, 0]), uniforms)
    h, carry = block_acceptance(p, q[:-1], tokens)  # behind `num` it is made of 0/0, and masked
    is_accepted = (uniforms[1:] < h) & _taken(tokens, num)
    count = (is_accepted * torch.arange(1, len(tokens) + 1, device=p.device)).amax().view(1)
    return _verdict(p, q, count, carry.index_select(0, count), uniforms)


def greedy_verdict(logits: Float[Tensor, "W V"], tokens: Int[Tensor, " K"], num: Int[Tensor, " 1"]) -> Int[Tensor, " 2"]:
    """Verdict at temperature 0: accept while the draft token is the target's most likely token."""
    return _agreed(logits.argmax(-1), tokens, num)


def compare_verdict(
    p: Float[Tensor, "W V"], tokens: Int[Tensor, " K"], num: Int[Tensor, " 1"], uniforms: Float[Tensor, " W"]
) -> Int[Tensor, " 2"]:
    """Verdict by comparison: a token is drawn in every place, and accepted while the draft token is the same."""
    return _agreed(pick(p, uniforms), tokens, num)


def _agreed(chosen: Int[Tensor, " W"], tokens: Int[Tensor, " K"], num: Int[Tensor, " 1"]) -> Int[Tensor, " 2"]:
    """Accept while the draft token is the token chosen in its place."""
    count = ((chosen[:-1] == tokens) & _taken(tokens, num)).long().cumprod(0).sum().view(1)
    return torch.cat((count, chosen.index_select(0, count)))


def _taken(tokens: Int[Tensor, " K"], num: Int[Tensor, " 1"]) -> Bool[Tensor, " K"]:
    return torch.arange(len(tokens), device=num.device) < num


def _proposed(q: Float[Tensor, "W V"], num: Int[Tensor, " 1"]) -> Float[Tensor, "W V"]:
    """q, and 0 in the rows of no draft token."""
    return q.masked_fill(torch.arange(len(q), device=num.device).unsqueeze(1) >= num, 0.0)


def _verdict(
    p: Float[Tensor, "W V"],
    q: Float[Tensor, "W V"],
    count: Int[Tensor, " 1"],
    carry: Float[Tensor, " 1"],
    uniforms: Float[Tensor, " W"],
) -> Int[Tensor, " 2"]:
    """The token after `count` accepted ones, from norm((carry p - q)+); where rounding leaves no mass at all, from p."""
    row = p.index_select(0, count)
    rest = (carry.unsqueeze(1) * row - q.index_select(0, count)).clamp(min=0)
    distribution = torch.where(rest.sum(-1, keepdim=True) > 0, rest, row)
    return torch.cat((count, pick(distribution, uniforms[:1])))
