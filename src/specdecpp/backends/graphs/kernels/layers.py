"""Kernels between the products of a layer, in Triton: attention, and what `products` does not do on its way.

    settle   the embedding and its norm; residuals and norms of families whose norms stand after the products
    rotate   norms of single heads, angles of part of a head; keys and values go into the cache
    attend   attention to portions of the text, which `combine` puts together

Arithmetic is in float32. Where the text ends is read from the device, so that all can be recorded. META is a `tiling.RowMeta`.

Of several sequences, slots of `width` rows each, a table `places` [3, SLOTS] says how far a slot's keys and values lie from
`keys` and `values`, in elements, and its capacity. `start` has an entry for each slot then.

Sources: RMSNorm, Zhang and Sennrich 2019; rotary embeddings, Su et al. 2021; attention in portions of the text that are put
together afterwards, Flash-Decoding, Dao et al. 2023.

TRITON_INTERPRET=1 runs them on a CPU, slowly: tests do (`make engine-kernels`).
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # pyright: ignore[reportMissingImports]

ROWS = tl.constexpr(16)
"""Rows of queries that one program of `attend` takes: the fewest that the matrix units do."""
POSITIONS = tl.constexpr(64)
"""Positions that it reads at a time."""
PARTS = 32
"""Most portions of a text."""
WARPS = 4
"""Warps of a program of `attend`."""
STAGES = tl.constexpr(2)
"""Steps of `attend` that are read ahead, and the one that it is at."""
SLOTS = tl.constexpr(8)
"""Most sequences of a pass."""


def block_of(size: int) -> int:
    """The block that holds so many numbers: a power of two, and what the matrix units take."""
    return max(16, triton.next_power_of_2(size))


@triton.jit(do_not_specialize=["factor", "eps", "divisor", "own_eps", "own_divisor"])
def settle(
    source, tokens, own, x, weight, out, factor, own_eps, own_divisor, eps, divisor, by_row, by_column, META: tl.constexpr
):
    """out = norm(x) of each row, after x was made: with tokens x = source[token] * factor; else x += source, of which `own` has
    a norm of its own; without a source x stays.
    """
    row, at = tl.program_id(0), tl.arange(0, META.block)
    inside = at < META.size
    if META.is_early:
        gdc_wait()
        gdc_launch_dependents()
    place = row * META.size + at
    if tokens is not None:
        cells = tl.load(tokens + row).to(tl.int64) * by_row + at * by_column
        values = tl.load(source + cells, mask=inside, other=0.0).to(tl.float32) * factor
    else:
        values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        if source is not None:
            more = tl.load(source + row * by_row + at * by_column, mask=inside, other=0.0).to(tl.float32)
            if own is not None:
                more = _normed(more, own, at, inside, own_eps, own_divisor).to(x.dtype.element_ty).to(tl.float32)
            values += more
    if source is not None:
        rounded = values.to(x.dtype.element_ty)
        tl.store(x + place, rounded, mask=inside)
        values = rounded.to(tl.float32)
    tl.store(out + place, _normed(values, weight, at, inside, eps, divisor).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _normed(values, weight, at, inside, eps, divisor):
    """values / sqrt(sum(values^2) / divisor + eps) * weight."""
    scale = 1.0 / tl.sqrt_rn(tl.sum(values * values, 0) / divisor + eps)
    return values * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def place_of(places, slot):
    """(shift of keys, shift of values, capacity) of a slot, or of many."""
    keys, values = tl.load(places + slot), tl.load(places + SLOTS + slot)
    capacity = tl.load(places + 2 * SLOTS + slot).to(tl.int32)
    return tl.multiple_of(keys, 16), tl.multiple_of(values, 16), capacity


@triton.jit(do_not_specialize=["eps", "divisor", "width"])
def rotate(
    qkv,
    cosines,
    sines,
    q_weight,
    k_weight,
    start,
    queries,
    keys,
    values,
    eps,
    divisor,
    kv_heads,
    capacity,
    half,
    places,
    width,
    META: tl.constexpr,
    positions=None,
):
    """Norms, if there are weights, and angles of a head of a row of `qkv` [n, heads + 2 kv heads, size]; stores keys, values.

    The place of row i is start + i, and so is its position unless `positions` says another. Tables [positions, size] have the
    signs of the rotation with the sines.
    """
    SIZE: tl.constexpr = META.size
    row, head, at = tl.program_id(0), tl.program_id(1), tl.arange(0, META.block)
    heads = tl.num_programs(1) - 2 * kv_heads
    inside = at < SIZE
    if META.is_early:
        gdc_wait()
        gdc_launch_dependents()
    if places is None:
        cell = tl.load(start) + row
    else:
        cell = tl.load(start + row // width) + row % width
        to_keys, to_values, capacity = place_of(places, row // width)
        keys, values = keys + to_keys, values + to_values
    position = cell
    if positions is not None:
        position = tl.load(positions + row)
    source = qkv + (row * (heads + 2 * kv_heads) + head) * SIZE
    x = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    if head >= heads + kv_heads:
        place = values + ((head - heads - kv_heads) * capacity + cell) * SIZE
        tl.store(place + at, x.to(values.dtype.element_ty), mask=inside)
    else:
        other = tl.where(at < half, at + half, at - half)  # behind both halves the sines are 0
        y = tl.load(source + other, mask=inside, other=0.0).to(tl.float32)
        if q_weight is not None:
            scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / divisor + eps)
            weight = q_weight
            if head >= heads:
                weight = k_weight
            x *= scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
            y *= scale * tl.load(weight + other, mask=inside, other=0.0).to(tl.float32)
        cosine = tl.load(cosines + position * SIZE + at, mask=inside, other=0.0).to(tl.float32)
        sine = tl.load(sines + position * SIZE + at, mask=inside, other=0.0).to(tl.float32)
        x = x * cosine + y * sine
        if head < heads:
            tl.store(queries + (row * heads + head) * SIZE + at, x.to(queries.dtype.element_ty), mask=inside)
        else:
            place = keys + ((head - heads) * capacity + cell) * SIZE
            tl.store(place + at, x.to(keys.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n", "window", "portion"])
def attend(
    queries,
    keys,
    values,
    start,
    tops,
    sums,
    mixtures,
    out,
    n,
    groups,
    capacity,
    window,
    portion,
    scale,
    places,
    META: tl.constexpr,
    text=None,
    masks=None,
):
    """Attention of up to ROWS queries of one kv head to one portion of the text. A window of 0 is none. With `masks` a row sees
    the first `text` places, and of the next 62 those whose bits its mask has.

    Of the whole text: out [n, kv heads, groups, size]. With `mixtures` of a portion: the greatest score and the sum of
    exponentials [kv heads, portions, n * groups], and what they mix [kv heads, portions, n * groups, size], not yet divided by
    the sum. Of several slots n is the rows of one, and all follow one another.
    """
    SIZE: tl.constexpr = META.size
    kv, kv_heads, part, num_parts = tl.program_id(0), tl.num_programs(0), tl.program_id(1), tl.num_programs(1)
    block, slot, num_rows, before, at = tl.program_id(2), 0, n * groups, 0, tl.arange(0, META.block)
    if places is not None:
        num_blocks = tl.cdiv(n * groups, ROWS)
        slot, block = block // num_blocks, block % num_blocks
        num_rows, before, start = num_rows * (tl.num_programs(2) // num_blocks), slot * n * groups, start + slot
    row = block * ROWS + tl.arange(0, ROWS)
    is_row, inside = row < n * groups, at < SIZE
    first = tl.load(start, cache_modifier=".cg").to(tl.int32)
    if META.is_early:
        gdc_wait()
        gdc_launch_dependents()
    if places is not None:
        to_keys, to_values, capacity = place_of(places, slot)
        keys, values = keys + to_keys, values + to_values
        queries, out = queries + before * kv_heads * SIZE, out + before * kv_heads * SIZE
    own = first + row // groups
    place = ((row // groups) * kv_heads * groups + kv * groups + row % groups) * SIZE
    query = tl.load(queries + place[:, None] + at[None, :], mask=is_row[:, None] & inside[None, :], other=0.0)
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mask, behind_text = tl.zeros((ROWS,), tl.int64), 0
    if masks is not None:
        mask, behind_text = tl.load(masks + row // groups, mask=is_row, other=0), tl.load(text).to(tl.int32)
    mixed = tl.zeros((ROWS, META.block), tl.float32)
    begin, end = part * portion, tl.minimum((part + 1) * portion, first + n)
    for some in tl.range(begin, end, POSITIONS, num_stages=STAGES):
        position = some + tl.arange(0, POSITIONS)
        cells = (kv * capacity + position)[:, None] * SIZE + at[None, :]
        is_cell = (position < end)[:, None] & inside[None, :]
        key = tl.load(keys + cells, mask=is_cell, other=0.0)
        value = tl.load(values + cells, mask=is_cell, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="tf32x3") * scale
        if masks is None:
            behind = own[:, None] - position[None, :]
            is_seen = (behind >= 0) & ((behind < window) | (window == 0))
        else:
            node = position - behind_text
            bit = tl.minimum(tl.maximum(node, 0), 62).to(tl.int64)
            is_seen = (node < 0)[None, :] | ((mask[:, None] >> bit[None, :]) & 1 == 1)
        scores = tl.where(is_seen & (position < end)[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp(scores - base[:, None])
        decay = tl.exp(top - base)
        total = total * decay + tl.sum(weights, 1)
        mixed = mixed * decay[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="tf32x3")
        top = higher
    if mixtures is None:
        made = (mixed / tl.maximum(total, 1.0)[:, None]).to(out.dtype.element_ty)
        tl.store(out + place[:, None] + at[None, :], made, mask=is_row[:, None] & inside[None, :])
    else:
        line = (kv * num_parts + part) * num_rows + before + row
        tl.store(tops + line, top, mask=is_row)
        tl.store(sums + line, total, mask=is_row)
        tl.store(mixtures + line[:, None] * SIZE + at[None, :], mixed, mask=is_row[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_parts"])
def combine(tops, sums, mixtures, out, groups, num_parts, PARTS: tl.constexpr, META: tl.constexpr):
    """The portions of `attend` as one: out [n, kv heads, groups, size]."""
    SIZE: tl.constexpr = META.size
    kv, kv_heads, row, num_rows = tl.program_id(0), tl.num_programs(0), tl.program_id(1), tl.num_programs(1)
    at, part = tl.arange(0, META.block), tl.arange(0, PARTS)
    inside, is_part = at < SIZE, part < num_parts
    if META.is_early:
        gdc_wait()
        gdc_launch_dependents()
    lines = (kv * num_parts + part) * num_rows + row
    top = tl.load(tops + lines, mask=is_part, other=-float("inf"))
    weight = tl.exp(top - tl.max(top, 0))
    total = tl.sum(weight * tl.load(sums + lines, mask=is_part, other=0.0), 0)
    cells = lines[:, None] * SIZE + at[None, :]
    mixed = tl.load(mixtures + cells, mask=is_part[:, None] & inside[None, :], other=0.0)
    mixed = tl.sum(mixed * weight[:, None], 0) / total
    place = ((row // groups) * kv_heads * groups + kv * groups + row % groups) * SIZE
    tl.store(out + place + at, mixed.to(out.dtype.element_ty), mask=inside)
