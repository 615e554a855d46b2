"""Verdicts over rows of weights, in Triton: the acceptance test that follows a target's pass on a device.

Rows of p and q hold each token as a share of the largest probability, as `draws.weigh` leaves them.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from specdecpp.backends.graphs.kernels.draws import BLOCK, _argmax, _drawn, _weight

LINES = tl.constexpr(64)
"""Rows of a verdict, as a power of two."""


@triton.jit
def choose(rows, highest, whose, masses, order, uniforms, chosen, vocab, PARTS: tl.constexpr):
    """A token of each row: drawn or, without uniforms, the most likely one."""
    row = tl.program_id(0)
    if row > tl.load(order):
        return
    base = row * tl.cdiv(vocab, BLOCK)
    if uniforms is None:
        token = _argmax(highest + base, whose + base, vocab, PARTS)
    else:
        token, _, _ = _drawn(rows + row.to(tl.int64) * vocab, masses + base, tl.load(uniforms + row), vocab, PARTS)
    tl.store(chosen + row, token.to(tl.int64))


@triton.jit
def agree(chosen, line, order, outcome):
    """(how many are accepted, which token follows): accept while the draft token is the token chosen in its place."""
    num, at = tl.load(order), tl.arange(0, LINES)
    own = tl.load(chosen + at, mask=at <= num, other=-1)
    given = tl.load(line + 1 + at, mask=at < num, other=-2)
    count = tl.min(tl.where(own == given, LINES, at), 0)
    tl.store(outcome, count.to(tl.float64))
    tl.store(outcome + 1, tl.load(chosen + count).to(tl.float64))


@triton.jit
def _ratios(p, q, p_totals, q_totals, line, num, vocab):
    """p/q of each draft token in its place, 1 behind the last."""
    at = tl.arange(0, LINES)
    is_taken = at < num
    place = at.to(tl.int64) * vocab + tl.load(line + 1 + at, mask=is_taken, other=0)
    own = _weight(tl.load(p + place, mask=is_taken, other=1.0)).to(tl.float64)
    given = _weight(tl.load(q + place, mask=is_taken, other=1.0)).to(tl.float64)
    p_total = tl.load(p_totals + at, mask=is_taken, other=1).to(tl.float64)
    q_total = tl.load(q_totals + at, mask=is_taken, other=1).to(tl.float64)
    return tl.where(is_taken, (own / p_total) / (given / q_total), 1.0)


@triton.jit
def carry(p, q, p_totals, q_totals, line, order, carries, vocab):
    """Block verification's w_0 = 1, w_i = min(1, w_(i-1) p/q)."""
    num, at = tl.load(order), tl.arange(0, LINES)
    ratios = _ratios(p, q, p_totals, q_totals, line, num, vocab)
    last = tl.full((), 1.0, tl.float64)
    made = tl.full((LINES,), 1.0, tl.float64)
    for i in range(num):
        last = tl.minimum(last * tl.sum(tl.where(at == i, ratios, 0.0), 0), 1.0)
        made = tl.where(at == i + 1, last, made)
    tl.store(carries + at, made)


@triton.jit
def _rest(p, q, p_total, q_total, factor, at, inside, is_taken):
    """((factor p - q)+, min(p, q), weights of p) of some tokens of a row; q is 0 where there is no draft token."""
    weight = _weight(tl.load(p + at, mask=inside, other=0.0))
    own = weight.to(tl.float64) / p_total.to(tl.float64)
    given = _weight(tl.load(q + at, mask=inside, other=0.0)).to(tl.float64) / tl.maximum(q_total, 1).to(tl.float64)
    given = tl.where(is_taken, given, 0.0)
    return tl.maximum(factor * own - given, 0.0), tl.minimum(own, given), weight


@triton.jit
def residues(p, q, p_totals, q_totals, carries, order, rests, commons, vocab):
    """Add each part of each row to sum (w p - q)+ and to sum min(p, q); without carries w is 1."""
    part, row, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    num = tl.load(order)
    if row > num:
        return
    at = part * BLOCK + tl.arange(0, BLOCK)
    factor = tl.full((), 1.0, tl.float64)
    if carries is not None:
        factor = tl.load(carries + row)
    base = row.to(tl.int64) * vocab
    is_taken = row < num
    rest, common, _ = _rest(
        p + base, q + base, tl.load(p_totals + row), tl.load(q_totals + row), factor, at, at < vocab, is_taken
    )
    tl.store(rests + row * num_parts + part, tl.sum(rest, 0))
    tl.store(commons + row * num_parts + part, tl.sum(common, 0))


@triton.jit
def _line_sums(cells, num, num_parts):
    """Sums of rows [lines, parts], the parts in pieces of 32."""
    at = tl.arange(0, LINES)
    total = tl.zeros((LINES,), tl.float64)
    for first in range(0, num_parts, 32):
        part = first + tl.arange(0, 32)
        mask = (at <= num)[:, None] & (part < num_parts)[None, :]
        total += tl.sum(tl.load(cells + at[:, None] * num_parts + part[None, :], mask=mask, other=0.0), 1)
    return total


@triton.jit
def judge(
    p, q, p_totals, q_totals, carries, masses, rests, commons, line, order, uniforms, outcome, vocab, PARTS: tl.constexpr
):
    """(number accepted, the token that follows, overlaps of p and q) by the ratio test; with carries by block verification.

    Uniform i tests draft token i + 1, the one behind them draws. One program.
    """
    num, at, num_parts = tl.load(order), tl.arange(0, LINES), tl.cdiv(vocab, BLOCK)
    coins = tl.load(uniforms + at, mask=at < num, other=2.0)
    ratios = _ratios(p, q, p_totals, q_totals, line, num, vocab)
    factor = tl.full((), 1.0, tl.float64)
    if carries is not None:
        survival = tl.load(carries + 1 + at, mask=at < num, other=0.0)  # w_1, w_2, ...
        sums = _line_sums(rests + num_parts, num - 1, num_parts)
        chance = tl.where(sums > 0, sums / (sums + (1.0 - survival)), 0.0)
        chance = tl.where(at == num - 1, survival, chance)
        count = tl.max(tl.where((at < num) & (coins < chance), at + 1, 0), 0)
        factor = tl.load(carries + count)
    else:
        count = tl.min(tl.where((at < num) & (coins < ratios), LINES, at), 0)
        tl.store(outcome + 2 + at, _line_sums(commons, num - 1, num_parts), mask=at < num)
    parts, places = tl.arange(0, PARTS), tl.arange(0, BLOCK)
    mass = tl.load(rests + count * num_parts + parts, mask=parts < num_parts, other=0.0)
    total = tl.sum(mass, 0)
    has_rest = total > 0
    own = tl.load(masses + count * num_parts + parts, mask=parts < num_parts, other=0).to(tl.float64)
    mass = tl.where(has_rest, mass, own)
    ends = tl.cumsum(mass, 0)
    point = tl.load(uniforms + num) * tl.sum(mass, 0)
    last = tl.max(tl.where(mass > 0, parts, 0), 0)
    part = tl.minimum(tl.min(tl.where((mass > 0) & (ends > point), parts, PARTS), 0), last)
    before = tl.sum(tl.where(parts < part, mass, 0.0), 0)
    at = part * BLOCK + places
    base, is_taken = count.to(tl.int64) * vocab, count < num
    p_total, q_total = tl.load(p_totals + count), tl.load(q_totals + count)
    rest, _, weight = _rest(p + base, q + base, p_total, q_total, factor, at, at < vocab, is_taken)
    rest = tl.where(has_rest, rest, weight.to(tl.float64))
    last = tl.max(tl.where(rest > 0, places, 0), 0)
    is_first = (rest > 0) & (before + tl.cumsum(rest, 0) > point)
    place = tl.minimum(tl.min(tl.where(is_first, places, BLOCK), 0), last)
    tl.store(outcome, count.to(tl.float64))
    tl.store(outcome + 1, (part * BLOCK + place).to(tl.float64))
