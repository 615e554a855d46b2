"""The tests of `verify` as pure functions of uniforms, in shapes that do not depend on the outcome.

Of W - 1 places for draft tokens the first `num` are taken. A uniform u < h accepts, and a token is drawn by inverting the
running sum of its distribution: the outcome is piecewise constant in the uniforms, and its distribution can be integrated
exactly (tests/test_step_law.py).

The bonus is the correction with q = 0: norm((p - 0)+) = p. In block verification likewise h_K = R_K/(R_K + 1 - w_K) = w_K,
since R_K = sum (w_K p - 0)+ = w_K.
"""

import torch
from jaxtyping import Float, Int
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


def verdict(
    p: Float[Tensor, "W V"],
    q: Float[Tensor, "W V"],
    tokens: Int[Tensor, " K"],
    num: Int[Tensor, " 1"],
    uniforms: Float[Tensor, " W"],
    *,
    is_block: bool = False,
) -> Int[Tensor, " 2"]:
    """(how many are accepted, which token follows) by the ratio test or block verification. The first uniform draws the token,
    from norm((w p - q)+) or, where rounding leaves no mass at all, from p."""
    place = torch.arange(len(p), device=num.device)
    q = q.masked_fill(place.unsqueeze(1) >= num, 0.0)  # behind `num` what is made of it is masked
    if is_block and len(tokens):
        h, carry = block_acceptance(p, q[:-1], tokens)
        is_accepted = (uniforms[1:] < h) & (place[:-1] < num)
        count = (is_accepted * place[1:]).amax().view(1)
    else:
        h, carry = token_acceptance(p[:-1], q[:-1], tokens), torch.ones_like(p[:, 0])
        is_accepted = (uniforms[1:] < h) & (place[:-1] < num)
        count = is_accepted.long().cumprod(0).sum().view(1)
    row = p.index_select(0, count)
    rest = (carry.index_select(0, count).unsqueeze(1) * row - q.index_select(0, count)).clamp(min=0)
    distribution = torch.where(rest.sum(-1, keepdim=True) > 0, rest, row)
    return torch.cat((count, pick(distribution, uniforms[:1])))


def agreed(chosen: Int[Tensor, " W"], tokens: Int[Tensor, " K"], num: Int[Tensor, " 1"]) -> Int[Tensor, " 2"]:
    """Verdict by comparison: accept while the draft token is the token chosen in its place, drawn or the most likely one."""
    is_taken = torch.arange(len(tokens), device=num.device) < num
    count = ((chosen[:-1] == tokens) & is_taken).long().cumprod(0).sum().view(1)
    return torch.cat((count, chosen.index_select(0, count)))
