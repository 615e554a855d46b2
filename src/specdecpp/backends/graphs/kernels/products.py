"""Products of a few rows with a weight matrix, in Triton, each with what stands before and after it in a layer.

    scaled, `project`:  out = scale (h W) + bias                              logits, and layers of unusual families
    `turn`:             the same, turned by the angles: queries, and keys and values put into the cache
    `gate`:             activation(gate) * up of gate, up = scale (h W)
    `add`:              x = x + h W;  h' = x * w, and the sums of squares of x by blocks, for the norm that follows

A pass over a few rows is bound by reading the weights, so all rows are done with one reading. A program makes BLOCK outputs;
its GROUPS warps share the inputs, DEPTH at a time, and add up their sums at the end. Nothing depends on the order in which
programs run, so that bits repeat.

RMSNorm takes no launch: x / sqrt(mean x^2) * w is x * w times a number that a row has, and that number leaves the product.
`add` writes x * w and the sums of squares of its block of x; whoever reads them takes the root.

With IS_HELD a kernel asks for the weights of its first step before all else. One that is launched while the kernel before it
runs (IS_EARLY: programmatic dependent launch, compute capability 9.0) has them on their way when the other is over; until then
it reads nothing but weights and the start of the pass, which no kernel of a layer writes.

Sources: RMSNorm, Zhang and Sennrich 2019; rotary embeddings, Su et al. 2021; sums shared among warps, "split K" of CUTLASS.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # pyright: ignore[reportMissingImports]


@triton.jit
def _held(
    weight,
    at,
    size,
    by_out,
    by_in,
    DEPTH: tl.constexpr,
    GROUPS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_HELD: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """Weights [GROUPS, len(at), DEPTH] of the first step, on their way while the kernel before runs; then wait for that one."""
    some = 0
    if IS_HELD:
        inputs = tl.arange(0, GROUPS)[:, None, None] * DEPTH + tl.arange(0, DEPTH)[None, None, :]
        places = weight + at.to(tl.int64)[None, :, None] * by_out + inputs * by_in
        if IS_EVEN:
            some = tl.load(places, eviction_policy="evict_first")
        else:
            some = tl.load(places, mask=inputs < size, other=0.0, eviction_policy="evict_first")
    if IS_EARLY:
        gdc_wait()
        gdc_launch_dependents()
        if IS_HELD:  # else the compiler waits for the weights first, to lay them out
            pack: tl.constexpr = 32 // weight.dtype.element_ty.primitive_bitwidth
            some = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [some], dtype=weight.dtype.element_ty, is_pure=False, pack=pack
            )
    return some


@triton.jit
def _sums(
    held,
    h,
    weight,
    at,
    n,
    size,
    by_out,
    by_in,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_HELD: tl.constexpr,
):
    """[len(at), ROWS] in float32: rows `at` of the weights [outputs, size] times rows of h [n, size]. STAGES of 1: one step."""
    group, row, depth = tl.arange(0, GROUPS), tl.arange(0, ROWS), tl.arange(0, DEPTH)
    inputs = group[:, None, None] * DEPTH + depth[None, None, :]
    weights = weight + at.to(tl.int64)[None, :, None] * by_out + inputs * by_in
    rows = h + row[None, :, None] * size + inputs
    is_row = row[None, :, None] < n
    sums, early = tl.zeros((GROUPS, at.shape[0], ROWS), tl.float32), 0
    if IS_HELD:
        early = tl.load(rows, mask=is_row if IS_EVEN else is_row & (inputs < size), other=0.0)
    if STAGES > 1:
        for first in tl.range(GROUPS * DEPTH if IS_HELD else 0, size, GROUPS * DEPTH, num_stages=STAGES):
            if IS_EVEN:
                some = tl.load(weights + first * by_in, eviction_policy="evict_first")
                own = tl.load(rows + first, mask=is_row, other=0.0)
            else:
                is_input = first + inputs < size
                some = tl.load(weights + first * by_in, mask=is_input, other=0.0, eviction_policy="evict_first")
                own = tl.load(rows + first, mask=is_row & is_input, other=0.0)
            sums = tl.dot(some, tl.permute(own, (0, 2, 1)), sums, input_precision="tf32x3")
    if IS_HELD:
        sums = tl.dot(held, tl.permute(early, (0, 2, 1)), sums, input_precision="tf32x3")
    return tl.sum(sums, 0)


@triton.jit
def _squares(squares, n, num_tiles, ROWS: tl.constexpr, TILES: tl.constexpr):
    """Sums of squares by blocks [TILES, ROWS], not yet added: they travel while the product is made. Without TILES none."""
    if TILES == 0:
        return tl.zeros((1, ROWS), tl.float32)
    else:  # the compiler goes on behind a return
        tile, row = tl.arange(0, TILES), tl.arange(0, ROWS)
        is_inside = (tile < num_tiles)[:, None] & (row < n)[None, :]
        return tl.load(squares + tile[:, None] * ROWS + row[None, :], mask=is_inside, other=0.0)


@triton.jit
def _scale(squares, eps, divisor, TILES: tl.constexpr):
    """The number [1, ROWS] by which the norm multiplies each row; without TILES that was done."""
    if TILES == 0:
        return squares + 1.0
    else:
        return (1.0 / tl.sqrt_rn(tl.sum(squares, 0) / divisor + eps))[None, :]


@triton.jit
def _halves(sums, HALF: tl.constexpr, ROWS: tl.constexpr):
    """The first HALF outputs and the others, [HALF, ROWS] each."""
    return tl.split(tl.permute(tl.reshape(sums, (2, HALF, ROWS)), (1, 2, 0)))


@triton.jit
def _gated(gated, up, IS_SILU: tl.constexpr):
    """activation(gate) * up."""
    argument = gated if IS_SILU else 1.5957691216057308 * (gated + 0.044715 * gated * gated * gated)
    return gated * tl.sigmoid(argument) * up


@triton.jit(do_not_specialize=["n", "eps", "divisor", "num_tiles"])
def project(
    h,
    weight,
    squares,
    bias,
    out,
    n,
    size,
    width,
    by_out,
    by_in,
    num_tiles,
    eps,
    divisor,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPS: tl.constexpr,
    STAGES: tl.constexpr,
    TILES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_HELD: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """out [n, width] = scale (h W) + bias; without TILES the scale is 1."""
    at, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, ROWS)
    rows = tl.minimum(at, width - 1)
    held = _held(weight, rows, size, by_out, by_in, DEPTH, GROUPS, IS_EVEN, IS_HELD, IS_EARLY)
    parts = _squares(squares, n, num_tiles, ROWS, TILES)
    sums = _sums(held, h, weight, rows, n, size, by_out, by_in, ROWS, DEPTH, GROUPS, STAGES, IS_EVEN, IS_HELD)
    sums *= _scale(parts, eps, divisor, TILES)
    if HAS_BIAS:
        sums += tl.load(bias + rows).to(tl.float32)[:, None]
    place = row[None, :].to(tl.int64) * width + at[:, None]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=(row < n)[None, :] & (at < width)[:, None])


@triton.jit(do_not_specialize=["n", "eps", "divisor", "num_tiles"])
def turn(
    h,
    weight,
    squares,
    bias,
    cosines,
    sines,
    start,
    queries,
    keys,
    values,
    n,
    size,
    heads,
    kv_heads,
    capacity,
    by_out,
    by_in,
    num_tiles,
    eps,
    divisor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPS: tl.constexpr,
    STAGES: tl.constexpr,
    TILES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_HELD: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """Queries [n, heads, SIZE], and keys and values at their places of the cache [kv heads, capacity, SIZE].

    A program makes outputs that are turned into one another: BLOCK / 2 of the first half of a head and the same of the second.
    Row i stands at the position start + i. Tables [positions, SIZE] have the signs of the rotation with the sines.
    """
    HALF: tl.constexpr = BLOCK // 2
    each: tl.constexpr = SIZE // BLOCK
    head = tl.program_id(0) // each
    first = (tl.program_id(0) % each) * HALF
    both, row, one = tl.arange(0, BLOCK), tl.arange(0, ROWS), tl.arange(0, HALF)
    at = head * SIZE + first + both % HALF + (both // HALF) * (SIZE // 2)
    position = tl.load(start, cache_modifier=".cg") + row
    held = _held(weight, at, size, by_out, by_in, DEPTH, GROUPS, IS_EVEN, IS_HELD, IS_EARLY)
    parts = _squares(squares, n, num_tiles, ROWS, TILES)
    sums = _sums(held, h, weight, at, n, size, by_out, by_in, ROWS, DEPTH, GROUPS, STAGES, IS_EVEN, IS_HELD)
    sums *= _scale(parts, eps, divisor, TILES)
    if HAS_BIAS:
        sums += tl.load(bias + at).to(tl.float32)[:, None]
    a, b = _halves(sums, HALF, ROWS)
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
        place = keys + ((head - heads) * capacity + position[None, :]) * SIZE
    else:
        place = values + ((head - heads - kv_heads) * capacity + position[None, :]) * SIZE
    tl.store(place + near, a.to(queries.dtype.element_ty), mask=inside)
    tl.store(place + far, b.to(queries.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n", "eps", "divisor", "num_tiles"])
def gate(
    h,
    weight,
    squares,
    out,
    n,
    size,
    width,
    by_out,
    by_in,
    num_tiles,
    eps,
    divisor,
    IS_SILU: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPS: tl.constexpr,
    STAGES: tl.constexpr,
    TILES: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_HELD: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """out [n, width] = activation(gate) * up, the activation SiLU or GELU by its tangent; rows of W: all of gate, all of up."""
    HALF: tl.constexpr = BLOCK // 2
    both, row = tl.arange(0, BLOCK), tl.arange(0, ROWS)
    first = tl.program_id(0) * HALF
    at = tl.minimum(first + both % HALF, width - 1) + (both // HALF) * width
    held = _held(weight, at, size, by_out, by_in, DEPTH, GROUPS, IS_EVEN, IS_HELD, IS_EARLY)
    parts = _squares(squares, n, num_tiles, ROWS, TILES)
    sums = _sums(held, h, weight, at, n, size, by_out, by_in, ROWS, DEPTH, GROUPS, STAGES, IS_EVEN, IS_HELD)
    sums *= _scale(parts, eps, divisor, TILES)
    gated, up = _halves(sums, HALF, ROWS)
    place = first + tl.arange(0, HALF)
    inside = (row < n)[None, :] & (place < width)[:, None]
    tl.store(out + row[None, :] * width + place[:, None], _gated(gated, up, IS_SILU).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tiles", "eps", "divisor"])
def activate(
    h,
    squares,
    out,
    width,
    num_tiles,
    eps,
    divisor,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_SILU: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """Activation of `gate` after its product: out [n, width] from h [n, 2 width], all of gate and all of up."""
    row, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    if IS_EARLY:
        gdc_wait()
        gdc_launch_dependents()
    gated = tl.load(h + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(h + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    if TILES > 0:
        tile = tl.arange(0, TILES)
        parts = tl.load(squares + tile * ROWS + row, mask=tile < num_tiles, other=0.0)
        scale = 1.0 / tl.sqrt_rn(tl.sum(parts, 0) / divisor + eps)
        gated *= scale
        up *= scale
    tl.store(out + row * width + at, _gated(gated, up, IS_SILU).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n"])
def add(
    h,
    weight,
    x,
    norm,
    out,
    squares,
    n,
    size,
    width,
    by_out,
    by_in,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_HELD: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """x [n, width] += h W; out = x * norm; squares [blocks, ROWS] = sums of x^2 over the outputs of a block."""
    at, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, ROWS)
    rows = tl.minimum(at, width - 1)
    held = _held(weight, rows, size, by_out, by_in, DEPTH, GROUPS, IS_EVEN, IS_HELD, IS_EARLY)
    place = row[None, :] * width + at[:, None]
    inside = (row < n)[None, :] & (at < width)[:, None]
    before = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(norm + rows).to(tl.float32)
    sums = _sums(held, h, weight, rows, n, size, by_out, by_in, ROWS, DEPTH, GROUPS, STAGES, IS_EVEN, IS_HELD)
    after = (before + sums).to(x.dtype.element_ty)
    tl.store(x + place, after, mask=inside)
    wide = tl.where(inside, after.to(tl.float32), 0.0)
    tl.store(out + place, (wide * factor[:, None]).to(out.dtype.element_ty), mask=inside)
    tl.store(squares + tl.program_id(0) * ROWS + row, tl.sum(wide * wide, 0))
