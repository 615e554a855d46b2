"""How a skinny product is cut into programs: measured for four sizes of models on an H200, by a rule for others."""

from typing import NamedTuple

_SHARED = 96 * 1024
"""Bytes of shared memory that a program may take on every GPU of compute capability 8.0 and above."""


class Tiling(NamedTuple):
    """How a product is cut: outputs a program, inputs a step of a warp, warps, steps that are read ahead.

    Without stages a program asks for all of its weights at once, in one step.
    """

    block: int
    depth: int
    groups: int
    stages: int


class Meta(NamedTuple):
    """Constants of a kernel of `kernels.products`: a `Tiling`, padded rows, the blocks whose squares make up a norm."""

    block: int
    depth: int
    groups: int
    stages: int
    rows: int
    num_tiles: int
    tile_block: int
    is_even: bool
    """Steps end where the inputs do."""
    is_held: bool
    is_early: bool


class RowMeta(NamedTuple):
    """Constants of a kernel of `kernels.layers`: the size of a row, and of the block that holds it."""

    size: int
    block: int
    is_early: bool


CHOICES: dict[tuple[int, int], dict[int, Tiling | None]] = {
    (2048, 2048): {32: None},
    (11264, 2048): {8: Tiling(32, 64, 2, 6), 16: Tiling(32, 64, 2, 6)},
    (2048, 5632): {32: None},
    (2560, 2048): {8: Tiling(16, 128, 4, 4), 32: None},
    (4096, 4096): {32: None},
    (28672, 4096): {8: Tiling(32, 64, 2, 6)},
    (4096, 14336): {8: Tiling(16, 128, 4, 4), 32: None},
    (6144, 4096): {32: None},
    (17920, 1536): {8: Tiling(32, 64, 2, 6), 16: Tiling(32, 64, 2, 6)},
    (1536, 8960): {32: None},
    (2048, 1536): {8: Tiling(16, 64, 4, 4)},
    (896, 896): {32: None},
    (9728, 896): {8: Tiling(32, 64, 2, 6), 16: Tiling(32, 64, 2, 6)},
    (896, 4864): {32: None},
    (1152, 896): {32: None},
    (151936, 896): {8: Tiling(32, 64, 2, 6)},
}
"""Cuts for (outputs, inputs) and padded rows in 16 bits where the rule of `shape_of` is not the fastest; None is torch's.

Found in one trial on an H200; the table as a whole has not been run on a card.
"""
EARLY = {
    2048: {"settle", "out", "gate"},
    4096: {"settle", "out", "attend", "down"},
    1536: {"settle", "out", "attend", "gate", "queries"},
    896: {"settle", "out", "attend", "gate", "queries"},
}
"""Launches that begin while the kernel before them runs, by the model's width: they gain by it, others lose."""


def shape_of(outputs: int, inputs: int, rows: int, itemsize: int, *, is_new: bool = False) -> Tiling | None:
    """A fixed choice for a matrix, so that a seed gives the same bits again. None: torch's own product."""
    known = CHOICES.get((outputs, inputs), {}) if is_new and itemsize == 2 else {}
    if rows in known:
        return known[rows]
    if rows >= 64 or (rows >= 32 and outputs > 8192):
        return None
    if is_new and itemsize == 2 and rows <= 16 and 512 < inputs <= 2048 and outputs <= 8192:
        return Tiling(16, 128 if inputs <= 1024 else 256, 8, 1)
    return in_steps(outputs, rows, itemsize)


def in_steps(outputs: int, rows: int, itemsize: int) -> Tiling:
    """Inputs in many steps."""
    block = 16 if rows <= 16 and outputs <= 8192 else 32
    depth, groups = 128 // itemsize, 4
    stages = 8 if outputs <= 132 * block else 6 if outputs <= 264 * block else 4
    return Tiling(block, depth, groups, max(2, min(stages, _SHARED // ((block + rows) * depth * groups * itemsize))))
