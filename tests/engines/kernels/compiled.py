"""Compiles every kernel as passes launch it, for GPUs that need not be there; prints a line for each type and GPU."""

import warnings
from collections import Counter
from typing import Any

import torch
import transformers
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specdecpp.backends import GraphModel
from specdecpp.backends.graphs import layers as fused
from specdecpp.backends.graphs.kernels import draws, products, verdicts
from specdecpp.backends.graphs.kernels import layers as kernels

SHAPE = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 1, "head_dim": 64, "vocab_size": 304}
SHAPE |= {"num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 1024, "pad_token_id": 0}
KINDS = {
    "Qwen2": {},
    "Qwen3": {},
    "Gemma3Text": {"sliding_window": 256},
    "Llama": {"hidden_size": 2048, "num_attention_heads": 16},
}
CLASSES = {"Gemma3Text": transformers.Gemma3ForCausalLM}


class Absent:
    """The driver of a GPU that is not there."""

    def __init__(self, capability: int):
        self._target, self._capability = GPUTarget("cuda", capability, 32), capability

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        """Triton keeps the kind of each device."""
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled(fused.FusedModel):
    """A backend that compiles what it would launch."""

    found: Counter[str]

    def _launch(self, kind: str, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        early = {"launch_pdl": True} if self.is_new and kind in self.early else {}
        code = kernel.warmup(*args, grid=grid, **early, **options)
        assert code.metadata.shared <= (227 if self.is_new else 99) * 1024, (
            f"{kernel} takes {code.metadata.shared} bytes of memory"
        )
        if self.is_new:
            check_order(code.asm["ptx"])
        self.found[kernel.fn.__name__] += 1


def check_order(ptx: str) -> None:
    """Raise ValueError or AssertionError unless memory is read after the kernel before is over: all but weights, which are
    read once, and the start of the pass, which is not read from a multiprocessor's own cache."""
    body = ptx[ptx.index(".entry") :]
    wait = body.index("griddepcontrol.wait")
    for word in ("cp.async.cg", "cp.async.ca", "st.global"):
        assert word not in body[:wait], f"{word} before the wait"
    for line in body[:wait].splitlines():
        assert "ld.global" not in line or "evict_first" in line or "ld.global.cg" in line, f"before the wait: {line}"


@torch.inference_mode()
def compiled(kind: str, dtype: torch.dtype, capability: int) -> Counter[str]:
    """Launches of passes of a model by kernel: few rows and many, a text in one portion and in several."""
    config = getattr(transformers, f"{kind}Config")(**SHAPE | KINDS[kind])
    build = CLASSES.get(kind) or getattr(transformers, f"{kind}ForCausalLM")
    backend = GraphModel(build(config).to(dtype).eval(), probe=False).new_cache()
    static = backend.static
    body = static.body = object.__new__(Compiled)
    body.__dict__.update(fused.fused(backend.model).__dict__)
    body.is_new, body.found = capability >= 90, Counter()
    body.early = {"settle", "queries", "attend", "out", "gate", "down", "output"} if body.is_new else set()
    for span, width in ((256, 1), (512, 33)):
        backend.make_room(span - 33)
        static._tables[span] = [angles.at(0, span) for angles in body._angles]
        static._pass(width, span)
        static._pass(width, span, static.nodes)
        slots = backend.model.slots
        slots.body, slots._tables = body, static._tables
        slots._pass(8, min(width, 5), span)
    return body.found


# Draws, stop tests and verdicts

WHOLE = ("line", "order", "sums", "totals", "masses", "inputs", "ends", "chosen", "p_totals", "q_totals")
WIDE = ("leans", "evidence", "score", "least", "uniforms", "records", "outcome", "carries", "rests", "commons")
TYPES = {
    **dict.fromkeys(WHOLE, "*i64"),
    **dict.fromkeys(WIDE, "*fp64"),
    **dict.fromkeys(("highest", "rows", "p", "q"), "*fp32"),
    **dict.fromkeys(("whose", "ties"), "*i32"),
    **dict.fromkeys(("temperature", "penalty", "top_p", "min_p"), "fp32"),
    "seen": "*i1",
}
DRAFT = {"line": None}
PLAIN = {"seen": None, "top_k": None, "top_p": None}
TESTS = {"EVIDENCE": 0, "JUDGES": False}
CASES: dict[str, list[dict[str, Any]]] = {
    "tops": [DRAFT, {}],
    "narrow": [DRAFT | {"top_p": None}, DRAFT],
    "weigh": [DRAFT, PLAIN],
    "note": [
        TESTS | {"EVIDENCE": 3, "uniforms": None, "score": None},
        TESTS | {"EVIDENCE": 4, "JUDGES": True},
        TESTS | {"inputs": None},
    ],
    "choose": [{"uniforms": None}, {}],
    "agree": [{}],
    "carry": [{}],
    "residues": [{}, {"carries": None}],
    "judge": [{}, {"carries": None}],
}


def compiled_row(name: str, constants: dict[str, Any], dtype: str, capability: int) -> int:
    """Bytes of the machine code of a kernel for logits of this type."""
    kernel, types = getattr(draws if hasattr(draws, name) else verdicts, name), TYPES | {"logits": f"*{dtype}"}
    if "PARTS" in kernel.arg_names:
        constants = constants | {"PARTS": 256}
    is_constant = {p.name: p.is_constexpr or p.name in constants for p in kernel.params}
    signature = {name: "constexpr" if is_constant[name] else types.get(name, "i32") for name in is_constant}
    values = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
    code = triton.compile(ASTSource(kernel, signature, values), target=GPUTarget("cuda", capability, 32))
    return len(code.asm["cubin"])


if __name__ == "__main__":
    for row_type, capability in (("bf16", 90), ("bf16", 80), ("fp32", 90)):
        sizes = {name: [compiled_row(name, c, row_type, capability) for c in cases] for name, cases in CASES.items()}
        print(row_type, capability, sizes, flush=True)
    warnings.simplefilter("ignore")
    fused._is_interpreted = lambda: True
    fused._kernels = lambda device: (kernels, products)  # pyright: ignore[reportAttributeAccessIssue]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for capability in (80, 90):
            triton.runtime.driver.set_active(Absent(capability))
            print(dtype, capability, dict(sum((compiled(kind, dtype, capability) for kind in KINDS), Counter())), flush=True)
