"""Draws and the stop test over rows of logits, in Triton: what follows a draft's pass on a device, in a few launches.

A row is cut into parts of BLOCK tokens, a program for each. Every token has a whole number as its weight,

    w = floor(2^42 exp(z - max z)),    z = penalised logit / temperature in float32,

and its probability is w / W, W being the sum over what top-k, top-p and min-p leave. Whole numbers add up to the same in any
order, so that neither the number of programs nor their order counts, and a token is drawn without rounding: the first whose
running sum, in the order of ids, exceeds floor(u W). `sampling.probabilities` gives the same up to the rounding of its
exponentials; tokens below 2^-42 of the largest have no weight here.

Cuts need no sort. Tokens are ordered by the bits of exp(z - max z) as a whole number below 2^30, and the threshold is found
digit by digit (`narrow`): each launch adds up what lies above 64 thresholds inside the bracket of the one before. Of equal
tokens top-k keeps all, and top-p those of smaller ids, as many as begin below the share.

TRITON_INTERPRET=1 runs them on a CPU, slowly: tests do (`make engine-kernels`).
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from specdecpp.policies import score as scores

BLOCK = tl.constexpr(1024)
"""Tokens of a part."""
FAN = tl.constexpr(64)
"""Thresholds that one launch of `narrow` tries: 6 bits of a key."""
PIECE = tl.constexpr(4)
"""Thresholds at a time."""
LEVELS = tl.constexpr(5)
"""Launches that find a threshold: FAN ** LEVELS is more than there are keys."""
CELLS = tl.constexpr(1024)
"""Sums of a row, as a power of two: LEVELS of tokens, LEVELS of weights, FAN each."""
_SCALE = tl.constexpr(2.0**42)
_MIN_OTHERS, _CLIP = tl.constexpr(scores.MIN_OTHERS), tl.constexpr(scores.CLIP)
_LEAST = tl.constexpr((127 - 42 << 23) - 1)  # the bits of 2^-42, less one: what has no weight has key 0


@triton.jit
def _source(order, row, line):
    """(row of the logits, draft tokens before it that are not marked yet, whether there is nothing to do): those of a verdict
    up to its last or, without a line, a draft's last row."""
    if line is None:
        source, num_more, is_idle = tl.load(order + 2) - 1, row * 0, tl.load(order + 1) != 0
    else:
        source, num_more, is_idle = row.to(tl.int64), row, row > tl.load(order)
    return source, num_more, is_idle


@triton.jit
def _logits(logits, seen, line, at, inside, num_more, temperature, penalty):
    """Logits of one row as `sampling.probabilities` has them before any cut; the first `num_more` draft tokens are seen too."""
    z = tl.load(logits + at, mask=inside, other=-float("inf")).to(tl.float32)
    if seen is not None:
        is_seen = tl.load(seen + at, mask=inside, other=0) != 0
        if line is not None:
            for i in range(num_more):
                is_seen = is_seen | (at == tl.load(line + 1 + i))
        z = tl.where(is_seen, tl.where(z < 0, z * penalty, tl.div_rn(z, penalty)), z)
    return tl.div_rn(z, temperature)


@triton.jit
def _weight(share):
    """The whole number that a share of the largest probability stands for."""
    return (share * _SCALE).to(tl.int64)


@triton.jit
def _key(share):
    return tl.maximum(share.to(tl.int32, bitcast=True) - _LEAST, 0)


@triton.jit
def _share(key):
    return (key + _LEAST).to(tl.float32, bitcast=True)


@triton.jit
def _found(sums, need, num):
    """(the first `num` digits of a key, the sum above it): the greatest key from which on the sum is at least `need`."""
    digits = tl.arange(0, FAN)
    key, above = tl.full((), 0, tl.int32), tl.full((), 0, tl.int64)
    for level in tl.static_range(LEVELS):
        cells = tl.load(sums + level * FAN + digits)
        digit = tl.sum((cells + above >= need).to(tl.int32), 0) - 1
        more = tl.sum(tl.where(digits == digit + 1, cells, 0), 0)
        above += tl.where(level < num, more, 0)
        key = tl.where(level < num, key * FAN + digit, key)
    return key, above


@triton.jit
def _needed(sums, top_p):
    """The share `top_p` of a row's weight, rounded up."""
    whole = tl.load(sums)
    need = tl.ceil(whole.to(tl.float64) * top_p).to(tl.int64)
    return tl.maximum(tl.minimum(need, whole), 1)


@triton.jit
def tops(logits, seen, line, order, highest, whose, sums, totals, vocab, temperature, penalty):
    """The greatest logit of each part of each row, and the first token that has it. Clears what later launches add to."""
    part, row, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    source, num_more, is_idle = _source(order, row, line)
    if is_idle:
        return
    at = part * BLOCK + tl.arange(0, BLOCK)
    z = _logits(logits + source * vocab, seen, line, at, at < vocab, num_more, temperature, penalty)
    top = tl.max(z, 0)
    tl.store(highest + row * num_parts + part, top)
    tl.store(whose + row * num_parts + part, tl.min(tl.where(z == top, at, vocab), 0))
    if part == 0:
        tl.store(totals + row, tl.full((), 0, tl.int64))
        cells = tl.arange(0, CELLS)
        tl.store(sums + row * CELLS + cells, tl.zeros((CELLS,), tl.int64))


@triton.jit
def _top(highest, num_parts, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    return tl.max(tl.load(highest + part, mask=part < num_parts, other=-float("inf")), 0)


@triton.jit(do_not_specialize=["top_k", "level"])
def narrow(
    logits, seen, line, order, highest, sums, ties, vocab, temperature, penalty, top_k, top_p, level, PARTS: tl.constexpr
):
    """The next digit of a threshold: tokens or, with `top_p`, their weights from each of FAN keys on, as far as they lie inside
    the bracket; of weights at the last level also how many tokens of a part have each key. Those of weights follow those of
    tokens, if there is a `top_k`."""
    part, row, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    source, num_more, is_idle = _source(order, row, line)
    if is_idle:
        return
    at = part * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    z = _logits(logits + source * vocab, seen, line, at, inside, num_more, temperature, penalty)
    share = tl.exp(z - _top(highest + row * num_parts, num_parts, PARTS))
    key, own = _key(share), sums + row * CELLS
    if top_p is None:
        known, _ = _found(own, top_k, level)
    else:
        if top_k is not None:
            least, _ = _found(own, top_k, LEVELS)
            inside = inside & (key >= least)
            own += LEVELS * FAN
        known, _ = _found(own, _needed(own, top_p), level)
    digit = (key >> (6 * (LEVELS - 1 - level))) - known * FAN
    inside = inside & (digit >= 0) & (digit < FAN)
    digit = tl.where(inside, digit, -1)
    counts = ties + (row * num_parts + part) * FAN
    if tl.max(inside.to(tl.int32), 0) > 0:
        weight = tl.where(inside, _weight(share), 0)
        for first in range(0, FAN, PIECE):
            digits = first + tl.arange(0, PIECE)
            if top_p is None:
                made = tl.sum((digit[:, None] >= digits[None, :]).to(tl.int32), 0).to(tl.int64)
            else:
                made = tl.sum(tl.where(digit[:, None] >= digits[None, :], weight[:, None], 0), 0)
                if level == LEVELS - 1:
                    tl.store(counts + digits, tl.sum((digit[:, None] == digits[None, :]).to(tl.int32), 0))
            tl.atomic_add(own + level * FAN + digits, made, mask=made > 0, sem="relaxed")
    elif level == LEVELS - 1:
        tl.store(counts + tl.arange(0, FAN), tl.zeros((FAN,), tl.int32))


@triton.jit(do_not_specialize=["top_k"])
def weigh(
    logits,
    seen,
    line,
    order,
    highest,
    sums,
    ties,
    rows,
    masses,
    totals,
    leans,
    vocab,
    temperature,
    penalty,
    top_k,
    top_p,
    min_p,
    PARTS: tl.constexpr,
):
    """Rows of probabilities: each token's as a share of the largest, 0 where it is cut, which is written to `rows`; the sum
    of weights of each part and of each row, and of weights times logarithms of shares.

    A draft's goes to the row of its draft token, a verdict's each to its own.
    """
    part, row, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    source, num_more, is_idle = _source(order, row, line)
    if is_idle:
        return
    at = part * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    z = _logits(logits + source * vocab, seen, line, at, inside, num_more, temperature, penalty)
    below = z - _top(highest + row * num_parts, num_parts, PARTS)
    share = tl.exp(below)
    key, own = _key(share), sums + row * CELLS
    is_kept = inside & (key > 0) & (share >= min_p)
    if top_k is not None:
        least, _ = _found(own, top_k, LEVELS)
        is_kept = is_kept & (key >= least)
        own += LEVELS * FAN
    if top_p is not None:
        need = _needed(own, top_p)
        least, above = _found(own, need, LEVELS)
        weight = tl.maximum(_weight(_share(least)), 1)
        num_equal = (need - above + weight - 1) // weight
        others = tl.arange(0, PARTS)
        counts = ties + (row * num_parts + others) * FAN + least % FAN
        before = tl.sum(tl.load(counts, mask=others < part, other=0), 0)
        is_equal = inside & (key == least)
        rank = before + tl.cumsum(is_equal.to(tl.int32), 0) - 1
        is_kept = is_kept & ((key > least) | (is_equal & (rank < num_equal)))
    share = tl.where(is_kept, share, 0.0)
    weight = _weight(share)
    mass = tl.sum(weight, 0)
    line_of = row
    if line is None:
        line_of = tl.load(order).to(tl.int32)
    tl.store(rows + line_of.to(tl.int64) * vocab + at, share, mask=inside)
    tl.store(masses + row * num_parts + part, mass)
    tl.store(leans + row * num_parts + part, tl.sum(weight.to(tl.float64) * tl.where(is_kept, below, 0.0), 0))
    tl.atomic_add(totals + row, mass, sem="relaxed")


@triton.jit
def _drawn(rows, masses, u, vocab, PARTS: tl.constexpr):
    """(token, its weight, the sum of all): the first token whose running sum exceeds floor(u W)."""
    parts, places, num_parts = tl.arange(0, PARTS), tl.arange(0, BLOCK), tl.cdiv(vocab, BLOCK)
    mass = tl.load(masses + parts, mask=parts < num_parts, other=0)
    total = tl.sum(mass, 0)
    point = tl.minimum((u * total.to(tl.float64)).to(tl.int64), total - 1)
    part = tl.sum((tl.cumsum(mass, 0) <= point).to(tl.int32), 0)
    before = tl.sum(tl.where(parts < part, mass, 0), 0)
    at = part * BLOCK + places
    weight = _weight(tl.load(rows + at, mask=at < vocab, other=0.0))
    place = tl.sum((before + tl.cumsum(weight, 0) <= point).to(tl.int32), 0)
    return part * BLOCK + place, tl.sum(tl.where(places == place, weight, 0), 0), total


@triton.jit
def _argmax(highest, whose, vocab, PARTS: tl.constexpr):
    parts, num_parts = tl.arange(0, PARTS), tl.cdiv(vocab, BLOCK)
    top = tl.load(highest + parts, mask=parts < num_parts, other=-float("inf"))
    first = tl.load(whose + parts, mask=parts < num_parts, other=vocab)
    return tl.min(tl.where(top == tl.max(top, 0), first, vocab), 0)


@triton.jit(do_not_specialize=["num_ends"])
def note(
    rows,
    highest,
    whose,
    masses,
    leans,
    order,
    line,
    evidence,
    score,
    least,
    uniforms,
    inputs,
    records,
    totals,
    seen,
    ends,
    vocab,
    num_ends,
    EVIDENCE: tl.constexpr,
    JUDGES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One draft token of a draft: drawn, judged, tested and written down, as `steps.DraftStep` says.

    EVIDENCE: 1 last q, 2 product of q, 3 negative entropy, 4 survival. JUDGES: by q. Without uniforms the token is the most
    likely one; without inputs it is only drawn. One program. A draft that has stopped leaves everything as it is.
    """
    count = tl.load(order)
    if tl.load(order + 1) != 0:
        return
    own = rows + count * vocab
    parts, num_parts = tl.arange(0, PARTS), tl.cdiv(vocab, BLOCK)
    if uniforms is None:
        token = _argmax(highest, whose, vocab, PARTS)
        total = tl.sum(tl.load(masses + parts, mask=parts < num_parts, other=0), 0)
        weight = _weight(tl.load(own + token))
    else:
        token, weight, total = _drawn(own, masses, tl.load(uniforms + count), vocab, PARTS)
    token = token.to(tl.int64)
    q = weight.to(tl.float64) / total.to(tl.float64)
    tl.store(totals + count, total)
    tl.store(records + 5 * count, token.to(tl.float64))
    tl.store(records + 5 * count + 1, q)
    if inputs is not None:
        accept = tl.full((), 1.0, tl.float64)
        if JUDGES:
            accept = 1.0 / (1.0 + tl.maximum(1.0 - q, _MIN_OTHERS))
        value = tl.load(evidence)
        if EVIDENCE == 1:
            value = q
        if EVIDENCE == 2:
            value = value * q
        if EVIDENCE == 3:
            lean = tl.sum(tl.load(leans + parts, mask=parts < num_parts, other=0.0), 0)
            value = lean / total.to(tl.float64) - tl.log(total.to(tl.float64) / _SCALE)
        if EVIDENCE == 4:
            factor = accept
            if score is not None:
                clipped = tl.minimum(tl.maximum(accept, _CLIP), 1.0 - _CLIP)
                logit = tl.log(clipped / (1.0 - clipped))
                factor = 1.0 / (1.0 + tl.exp(-(tl.load(score) + tl.load(score + 1) * logit)))
            value = value * factor
        flags = tl.where(value >= tl.load(least + count + 1), 0, 1)
        for i in range(num_ends):
            flags += tl.where(token == tl.load(ends + i), 2, 0)
        tl.store(evidence, value)
        tl.store(records + 5 * count + 2, accept)
        tl.store(records + 5 * count + 3, flags.to(tl.float64))
        tl.store(records + 5 * count + 4, value)
        if seen is not None:
            tl.store(seen + token, 1)
        tl.store(line + count + 1, token)
        tl.store(inputs, tl.load(inputs) + tl.load(order + 2))
        tl.store(inputs + 1, token)
        tl.store(order, count + 1)
        tl.store(order + 1, (flags != 0).to(tl.int64))
        tl.store(order + 2, tl.full((), 1, tl.int64))
