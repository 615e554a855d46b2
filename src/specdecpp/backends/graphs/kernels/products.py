"""Products of a few rows with a weight matrix, in Triton, each with what stands before and after it in a layer.

    scaled, `project`:  out = scale (h W) + bias                              logits, and layers of unusual families
    `turn`:             the same, turned by the angles: queries, and keys and values put into the cache
    `gate`:             activation(gate) * up of gate, up = scale (h W)
    `add`:              x = x + h W;  h' = x * w, and the sums of squares of x by blocks, for the norm that follows

A pass over a few rows is bound by reading the weights, so all rows are done with one reading. A program makes `block` outputs;
its `groups` warps share the inputs, `depth` at a time, and add up their sums at the end (META is a `tiling.Meta`). Nothing
depends on the order in which programs run, so that bits repeat.

RMSNorm takes no launch: x / sqrt(mean x^2) * w is x * w times a number that a row has, and that number leaves the product.
`add` writes x * w and the sums of squares of its block of x; whoever reads them takes the root.

With `is_held` a kernel asks for the weights of its first step before all else. One that is launched while the kernel before it
runs (`is_early`: programmatic dependent launch, compute capability 9.0) has them on their way when the other is over; until
then it reads nothing but weights and the start of the pass, which no kernel of a layer writes.

Sources: RMSNorm, Zhang and Sennrich 2019; rotary embeddings, Su et al. 2021; sums shared among warps, "split K" of CUTLASS.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # pyright: ignore[reportMissingImports]

from specdecpp.backends.graphs.kernels.layers import place_of


@triton.jit
def _held(weight, at, size, by_out, by_in, META: tl.constexpr):
    """Weights [groups, len(at), depth] of the first step, on their way while the kernel before runs; then wait for that one."""
    some = 0
    if META.is_held:
        inputs = tl.arange(0, META.groups)[:, None, None] * META.depth + tl.arange(0, META.depth)[None, None, :]
        places = weight + at.to(tl.int64)[None, :, None] * by_out + inputs * by_in
        if META.is_even:
            some = tl.load(places, eviction_policy="evict_first")
        else:
            some = tl.load(places, mask=inputs < size, other=0.0, eviction_policy="evict_first")
    if META.is_early:
        gdc_wait()
        gdc_launch_dependents()
        if META.is_held:  # else the compiler waits for the weights first, to lay them out
            pack: tl.constexpr = 32 // weight.dtype.element_ty.primitive_bitwidth
            some = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [some], dtype=weight.dtype.element_ty, is_pure=False, pack=pack
            )
    return some


@triton.jit
def _sums(held, h, weight, at, n, size, by_out, by_in, META: tl.constexpr):
    """[len(at), rows] in float32: rows `at` of the weights [outputs, size] times rows of h [n, size]. One stage: one step."""
    group, row, depth = tl.arange(0, META.groups), tl.arange(0, META.rows), tl.arange(0, META.depth)
    inputs = group[:, None, None] * META.depth + depth[None, None, :]
    weights = weight + at.to(tl.int64)[None, :, None] * by_out + inputs * by_in
    rows = h + row[None, :, None] * size + inputs
    is_row = row[None, :, None] < n
    sums, early = tl.zeros((META.groups, at.shape[0], META.rows), tl.float32), 0
    if META.is_held:
        early = tl.load(rows, mask=is_row if META.is_even else is_row & (inputs < size), other=0.0)
    if META.stages > 1:
        step: tl.constexpr = META.groups * META.depth
        for first in tl.range(step if META.is_held else 0, size, step, num_stages=META.stages):
            if META.is_even:
                some = tl.load(weights + first * by_in, eviction_policy="evict_first")
                own = tl.load(rows + first, mask=is_row, other=0.0)
            else:
                is_input = first + inputs < size
                some = tl.load(weights + first * by_in, mask=is_input, other=0.0, eviction_policy="evict_first")
                own = tl.load(rows + first, mask=is_row & is_input, other=0.0)
            sums = tl.dot(some, tl.permute(own, (0, 2, 1)), sums, input_precision="tf32x3")
    if META.is_held:
        sums = tl.dot(held, tl.permute(early, (0, 2, 1)), sums, input_precision="tf32x3")
    return tl.sum(sums, 0)


@triton.jit
def _scaled(h, weight, at, n, size, by_out, by_in, squares, eps, divisor, META: tl.constexpr):
    """`_sums` of rows that the norm scales; without squares that was done. They travel while the product is made."""
    held = _held(weight, at, size, by_out, by_in, META)
    if squares is None:
        sums = _sums(held, h, weight, at, n, size, by_out, by_in, META)
    else:
        tile, row = tl.arange(0, META.tile_block), tl.arange(0, META.rows)
        is_inside = (tile < META.num_tiles)[:, None] & (row < n)[None, :]
        parts = tl.load(squares + tile[:, None] * META.rows + row[None, :], mask=is_inside, other=0.0)
        sums = _sums(held, h, weight, at, n, size, by_out, by_in, META)
        sums *= (1.0 / tl.sqrt_rn(tl.sum(parts, 0) / divisor + eps))[None, :]
    return sums


@triton.jit
def _halves(sums, HALF: tl.constexpr, ROWS: tl.constexpr):
    """The first HALF outputs and the others, [HALF, ROWS] each."""
    return tl.split(tl.permute(tl.reshape(sums, (2, HALF, ROWS)), (1, 2, 0)))


@triton.jit
def _gated(gated, up, IS_SILU: tl.constexpr):
    """activation(gate) * up."""
    argument = gated if IS_SILU else 1.5957691216057308 * (gated + 0.044715 * gated * gated * gated)
    return gated * tl.sigmoid(argument) * up


@triton.jit(do_not_specialize=["n", "eps", "divisor"])
def project(h, weight, n, size, by_out, by_in, squares, eps, divisor, bias, out, width, META: tl.constexpr):
    """out [n, width] = scale (h W) + bias; without squares the scale is 1."""
    at, row = tl.program_id(0) * META.block + tl.arange(0, META.block), tl.arange(0, META.rows)
    rows = tl.minimum(at, width - 1)
    sums = _scaled(h, weight, rows, n, size, by_out, by_in, squares, eps, divisor, META)
    if bias is not None:
        sums += tl.load(bias + rows).to(tl.float32)[:, None]
    place = row[None, :].to(tl.int64) * width + at[:, None]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=(row < n)[None, :] & (at < width)[:, None])


@triton.jit(do_not_specialize=["n", "eps", "divisor", "width"])
def turn(
    h,
    weight,
    n,
    size,
    by_out,
    by_in,
    squares,
    eps,
    divisor,
    bias,
    cosines,
    sines,
    start,
    queries,
    keys,
    values,
    heads,
    kv_heads,
    capacity,
    SIZE: tl.constexpr,
    places,
    width,
    META: tl.constexpr,
    positions=None,
):
    """Queries [n, heads, SIZE], and keys and values at their places of the cache [kv heads, capacity, SIZE].

    A program makes outputs that are turned into one another: half a block of each half of a head.
    The place of row i is start + i (of slots see `kernels.layers`), and so is its position unless `positions` says another.
    Tables [positions, SIZE] have the signs of the rotation with the sines.
    """
    HALF: tl.constexpr = META.block // 2
    each: tl.constexpr = SIZE // META.block
    head = tl.program_id(0) // each
    first = (tl.program_id(0) % each) * HALF
    both, row, one = tl.arange(0, META.block), tl.arange(0, META.rows), tl.arange(0, HALF)
    at = head * SIZE + first + both % HALF + (both // HALF) * (SIZE // 2)
    slot = tl.minimum(row, n - 1) // width
    if places is None:
        own = tl.load(start, cache_modifier=".cg") + row
    else:
        own = tl.load(start + slot, cache_modifier=".cg") + row % width
    position = own
    if positions is not None:
        position = tl.load(positions + row, mask=row < n, other=0, cache_modifier=".cg")
    sums = _scaled(h, weight, at, n, size, by_out, by_in, squares, eps, divisor, META)
    if bias is not None:
        sums += tl.load(bias + at).to(tl.float32)[:, None]
    a, b = _halves(sums, HALF, META.rows)
    inside = (row < n)[None, :]
    near = (first + one)[:, None]
    far = near + SIZE // 2
    if head < heads + kv_heads:
        cell = position[None, :] * SIZE + near
        cosine = tl.load(cosines + cell, mask=inside, other=0.0).to(tl.float32)
        sine = tl.load(sines + cell + SIZE // 2, mask=inside, other=0.0).to(tl.float32)
        turned, b = a * cosine - b * sine, b * cosine + a * sine
        a = turned
    if head < heads:
        place = queries + (row[None, :] * heads + head) * SIZE
    elif head < heads + kv_heads:
        place = keys + ((head - heads) * capacity + own[None, :]) * SIZE
        if places is not None:
            shift, _, room = place_of(places, slot)
            place = keys + ((head - heads) * room + own)[None, :] * SIZE + shift[None, :]
    else:
        place = values + ((head - heads - kv_heads) * capacity + own[None, :]) * SIZE
        if places is not None:
            _, shift, room = place_of(places, slot)
            place = values + ((head - heads - kv_heads) * room + own)[None, :] * SIZE + shift[None, :]
    tl.store(place + near, a.to(queries.dtype.element_ty), mask=inside)
    tl.store(place + far, b.to(queries.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n", "eps", "divisor"])
def gate(h, weight, n, size, by_out, by_in, squares, eps, divisor, out, width, IS_SILU: tl.constexpr, META: tl.constexpr):
    """out [n, width] = activation(gate) * up, the activation SiLU or GELU by its tangent; rows of W: all of gate, all of up."""
    HALF: tl.constexpr = META.block // 2
    both, row = tl.arange(0, META.block), tl.arange(0, META.rows)
    first = tl.program_id(0) * HALF
    at = tl.minimum(first + both % HALF, width - 1) + (both // HALF) * width
    sums = _scaled(h, weight, at, n, size, by_out, by_in, squares, eps, divisor, META)
    gated, up = _halves(sums, HALF, META.rows)
    place = first + tl.arange(0, HALF)
    inside = (row < n)[None, :] & (place < width)[:, None]
    tl.store(out + row[None, :] * width + place[:, None], _gated(gated, up, IS_SILU).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["eps", "divisor"])
def activate(h, squares, eps, divisor, out, width, IS_SILU: tl.constexpr, META: tl.constexpr):
    """Activation of `gate` after its product: out [n, width] from h [n, 2 width], all of gate and all of up."""
    row, at = tl.program_id(0), tl.program_id(1) * META.block + tl.arange(0, META.block)
    inside = at < width
    if META.is_early:
        gdc_wait()
        gdc_launch_dependents()
    gated = tl.load(h + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(h + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    if squares is not None:
        tile = tl.arange(0, META.tile_block)
        parts = tl.load(squares + tile * META.rows + row, mask=tile < META.num_tiles, other=0.0)
        scale = 1.0 / tl.sqrt_rn(tl.sum(parts, 0) / divisor + eps)
        gated *= scale
        up *= scale
    tl.store(out + row * width + at, _gated(gated, up, IS_SILU).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n"])
def add(h, weight, n, size, by_out, by_in, squares, x, norm, out, width, META: tl.constexpr):
    """x [n, width] += h W; out = x * norm; squares [blocks, rows] = sums of x^2 over the outputs of a block."""
    at, row = tl.program_id(0) * META.block + tl.arange(0, META.block), tl.arange(0, META.rows)
    rows = tl.minimum(at, width - 1)
    held = _held(weight, rows, size, by_out, by_in, META)
    place = row[None, :] * width + at[:, None]
    inside = (row < n)[None, :] & (at < width)[:, None]
    before = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(norm + rows).to(tl.float32)
    sums = _sums(held, h, weight, rows, n, size, by_out, by_in, META)
    after = (before + sums).to(x.dtype.element_ty)
    tl.store(x + place, after, mask=inside)
    wide = tl.where(inside, after.to(tl.float32), 0.0)
    tl.store(out + place, (wide * factor[:, None]).to(out.dtype.element_ty), mask=inside)
    tl.store(squares + tl.program_id(0) * META.rows + row, tl.sum(wide * wide, 0))
