"""Compiles every kernel for GPUs that need not be there: the interpreter takes more of Python than the compiler does."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specdecpp.runners import kernels

WIDE = dict.fromkeys(("tops", "sums", "mixtures"), "*fp32")
NUMBERS = dict.fromkeys(("eps", "divisor", "scale"), "fp32")
OWN = ("x", "out", "qkv", "cosines", "sines", "q_weight", "k_weight", "weight", "queries", "keys", "values")
CONSTANTS = {
    "norm": {"BLOCK": 4096},
    "rotate": {"SIZE": 96, "BLOCK": 128, "HAS_NORMS": True},
    "attend": {"SIZE": 96, "BLOCK": 128, "ROWS": kernels.ROWS, "POSITIONS": kernels.POSITIONS},
    "combine": {"SIZE": 96, "BLOCK": 128, "PARTS": kernels.PARTS},
    "gate": {"IS_SILU": False, "BLOCK": 512},
}


def compiled(name: str, dtype: str, capability: int) -> int:
    """Bytes of the machine code of a kernel for weights of this type."""
    kernel, constants = getattr(kernels, name), CONSTANTS[name]
    types = {"start": "*i64"} | dict.fromkeys(OWN, f"*{dtype}") | WIDE | NUMBERS
    signature = {p.name: "constexpr" if p.is_constexpr else types.get(p.name, "i32") for p in kernel.params}
    values = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
    code = triton.compile(ASTSource(kernel, signature, values), target=GPUTarget("cuda", capability, 32))
    return len(code.asm["cubin"])


if __name__ == "__main__":
    for dtype in ("bf16", "fp16", "fp32"):
        for capability in (80, 90):
            print(dtype, capability, {name: compiled(name, dtype, capability) for name in CONSTANTS})
