"""Compiles every kernel for GPUs that need not be there: the interpreter takes more of Python than the compiler does."""

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specdecpp.runners import kernels, products

WIDE = dict.fromkeys(("tops", "sums", "mixtures", "squares"), "*fp32")
NUMBERS = dict.fromkeys(("eps", "divisor", "own_eps", "own_divisor", "factor", "scale"), "fp32")
OWN = ("x", "h", "out", "qkv", "cosines", "sines", "q_weight", "k_weight", "weight", "bias", "norm", "own", "source", "queries")
OWN += ("keys", "values")
SIXTEENS = {*OWN, *WIDE, "size", "width", "by_out", "by_row", "capacity"}
"""Addresses and numbers that 16 divides, which Triton then knows."""


def cases(itemsize: int) -> dict[str, list[tuple[Any, dict[str, Any], int]]]:
    """(kernel, constants, warps) by name."""
    cut = {"DEPTH": 128 // itemsize, "GROUPS": 4, "STAGES": 3, "FETCH": 256}
    narrow, wide = {"BLOCK": 16, "ROWS": 8}, {"BLOCK": 64, "ROWS": 64, "STAGES": 2}
    product = [cut | narrow | {"IS_EVEN": True}, cut | wide | {"IS_EVEN": False}]
    normed = [product[0] | {"TILES": 128}, product[1] | {"TILES": 0}]
    head = {"SIZE": 64, "BLOCK": 64}
    attend = head | {"ROWS": kernels.ROWS, "POSITIONS": kernels.POSITIONS, "STAGES": 2}
    settle = ["embedded", "added", "normed", "given"]
    return {
        "project": [(products.project, c | {"HAS_BIAS": c["IS_EVEN"]}, 4) for c in normed],
        "turn": [(products.turn, c | {"SIZE": 64, "HAS_BIAS": c["IS_EVEN"]}, 4) for c in normed],
        "gate": [(products.gate, c | {"IS_SILU": c["IS_EVEN"]}, 4) for c in normed],
        "add": [(products.add, c, 4) for c in product],
        "settle": [(kernels.settle, {"BLOCK": 4096, "HOW": how}, 8) for how in settle],
        "rotate": [(kernels.rotate, {"SIZE": 96, "BLOCK": 128, "HAS_NORMS": True}, 1)],
        "attend": [(kernels.attend, attend | {"IS_WHOLE": whole}, 4) for whole in (True, False)],
        "combine": [(kernels.combine, {"SIZE": 96, "BLOCK": 128, "PARTS": kernels.PARTS}, 1)],
    }


def compiled(kernel: Any, constants: dict[str, Any], num_warps: int, dtype: str, capability: int) -> Any:
    """The code of a kernel for weights of this type."""
    types = {"start": "*i64", "tokens": "*i64"} | dict.fromkeys(OWN, f"*{dtype}") | WIDE | NUMBERS
    constants = constants | {"by_in": 1, "by_column": 1, "IS_EARLY": capability >= 90}
    signature = {p.name: "constexpr" if p.name in constants else types.get(p.name, "i32") for p in kernel.params}
    values = {(kernel.arg_names.index(key),): value for key, value in constants.items() if key in signature}
    known = {(i,): [["tt.divisibility", 16]] for i, p in enumerate(kernel.params) if p.name in SIXTEENS}
    options = {"num_warps": num_warps, "launch_pdl": capability >= 90}
    return triton.compile(
        ASTSource(kernel, signature, values, known), target=GPUTarget("cuda", capability, 32), options=options
    )


def order(ptx: str) -> None:
    """Raise AssertionError unless what the kernel before has written is read after it is over."""
    body = ptx[ptx.index(".entry") :]
    wait = body.index("griddepcontrol.wait")
    for word in ("ld.global", "cp.async.cg", "cp.async.ca", "st.global"):
        assert word not in body[:wait], f"{word} before the wait"


if __name__ == "__main__":
    for dtype, itemsize in (("bf16", 2), ("fp16", 2), ("fp32", 4)):
        for capability in (80, 90):
            sizes = {}
            for name, found in cases(itemsize).items():
                codes = [compiled(*case, dtype, capability) for case in found]
                sizes[name] = [len(code.asm["cubin"]) for code in codes]
                if capability >= 90:
                    for code in codes:
                        order(code.asm["ptx"])
                if "-v" in sys.argv:
                    print(name, [code.metadata.shared for code in codes], flush=True)
            print(dtype, capability, sizes)
