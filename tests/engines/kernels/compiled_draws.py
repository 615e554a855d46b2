"""Compiles the kernels of draws, stop tests and verdicts for GPUs that need not be there, see `compiled`."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specdecpp.backends.graphs.kernels import draws, verdicts

WHOLE = ("line", "order", "sums", "totals", "masses", "inputs", "ends", "chosen", "p_totals", "q_totals")
WIDE = ("leans", "evidence", "score", "least", "uniforms", "records", "outcome", "carries", "rests", "commons")
TYPES = {
    **dict.fromkeys(WHOLE, "*i64"),
    **dict.fromkeys(WIDE, "*fp64"),
    **dict.fromkeys(("highest", "rows", "p", "q"), "*fp32"),
    **dict.fromkeys(("whose", "ties"), "*i32"),
    **dict.fromkeys(("temperature", "penalty", "top_p", "min_p", "rest", "clip"), "fp32"),
    "seen": "*i1",
}
SIZES = {"PARTS": 256}
ASKED = {"HAS_SEEN": True, "DRAFTS": True}
CUT = ASKED | SIZES | {"COUNTS": 5}
PLAIN = CUT | {"HAS_SEEN": False, "DRAFTS": False, "COUNTS": 0}
NOTED = SIZES | {"JUDGES": False, "SCORES": False, "HAS_SEEN": True, "DRAWS_ONLY": False}
CASES: dict[str, list[dict[str, Any]]] = {
    "tops": [ASKED],
    "narrow": [CUT | {"IS_COUNT": is_count} for is_count in (True, False)],
    "weigh": [CUT | {"HAS_TOP_P": True}, PLAIN | {"HAS_TOP_P": False}],
    "note": [
        NOTED | {"GREEDY": True, "EVIDENCE": 3},
        NOTED | {"GREEDY": False, "EVIDENCE": 4, "JUDGES": True, "SCORES": True},
        NOTED | {"GREEDY": False, "EVIDENCE": 0, "DRAWS_ONLY": True},
    ],
    "choose": [SIZES | {"GREEDY": is_greedy} for is_greedy in (True, False)],
    "agree": [{}],
    "carry": [{}],
    "residues": [{"IS_BLOCK": is_block} for is_block in (True, False)],
    "judge": [SIZES | {"IS_BLOCK": is_block} for is_block in (True, False)],
}


def compiled(name: str, constants: dict[str, Any], dtype: str, capability: int) -> int:
    """Bytes of the machine code of a kernel for logits of this type."""
    kernel, types = getattr(draws if hasattr(draws, name) else verdicts, name), TYPES | {"logits": f"*{dtype}"}
    signature = {p.name: "constexpr" if p.is_constexpr else types.get(p.name, "i32") for p in kernel.params}
    values = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
    code = triton.compile(ASTSource(kernel, signature, values), target=GPUTarget("cuda", capability, 32))
    return len(code.asm["cubin"])


if __name__ == "__main__":
    for dtype, capability in (("bf16", 90), ("bf16", 80), ("fp32", 90)):
        print(dtype, capability, {name: [compiled(name, c, dtype, capability) for c in cases] for name, cases in CASES.items()})
