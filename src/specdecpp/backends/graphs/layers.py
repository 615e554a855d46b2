"""The layers of `LeanModel` by kernels of our own, five launches a layer or six, for passes that are recorded."""

import os
import warnings
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdecpp.backends import trimmed
from specdecpp.backends.graphs.tiling import EARLY, Meta, RowMeta, Tiling, in_steps, shape_of
from specdecpp.backends.lean import LeanModel, Norm, _Layer

_PROGRAMS = 512
"""Programs of `kernels.attend` at once: four for each multiprocessor of a large GPU."""
_WHOLE = 256
"""Positions that are not read in portions: putting them together takes as long."""
_ACTIVATED = 1024
"""Outputs of a program of `products.activate`."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_Two = tuple[Tensor, Tensor]
_Where = tuple[Tensor, Tensor, Tensor | None]
"""Keys and values of a layer, and the places of slots."""
Nodes = tuple[Int[Tensor, " 1"], Int[Tensor, " n"], Int[Tensor, " n"]]
"""Rows that are nodes of a tree behind a text: the text's length, their positions, and as bits which of the next 62 places each
of them sees."""


@dataclass(slots=True)
class _Stream:
    """Rows x that the layers add to, and their norm h, which without squares is complete; else readers scale it: `products`."""

    x: Float[Tensor, "n D"]
    h: Float[Tensor, "n D"]
    norm: Norm
    squares: Float[Tensor, "tiles rows"] | None = None

    @property
    def scale(self) -> tuple[Tensor | None, float, float]:
        """Arguments from which a kernel makes the scale of h."""
        return self.squares, self.norm.eps, self.norm.divisor


class FusedModel(LeanModel):
    """A `LeanModel` whose static passes are launches of kernels; `fused` makes one."""

    kernels: Any
    products: Any
    is_new: bool
    """The GPU can launch kernels while the one before them runs."""
    early: set[str]
    """Those that are: `tiling.EARLY`."""

    def read_static(
        self,
        tokens: Int[Tensor, " n"],
        start: Int[Tensor, " slots"],
        span: int,
        tables: list[_Two],
        out: Float[Tensor, "n D"],
        keys: list[Tensor],
        values: list[Tensor],
        places: Int[Tensor, "layers 3 SLOTS"] | None = None,
        nodes: Nodes | None = None,
    ) -> None:
        """Put into `out` the states that the output layer reads: n rows from `start`, in caches [kv heads, capacity, size] of
        each layer; with `places` (`kernels.layers`) n / slots rows of each slot. Texts end within `span`."""
        x = self._embedding.new_empty(len(tokens), self.hidden_size)
        rows = _Stream(x, torch.empty_like(x), self._layers[0].norm)
        self._settle(rows, self._embedding, tokens=tokens)
        for i, layer in enumerate(self._layers):
            where = keys[i], values[i], None if places is None else places[i]
            queries = self._queries(rows, layer, start, tables[layer.view], where, nodes)
            mixed = self._mixed(queries, layer, start, span, where, nodes)
            self._add("out", rows, mixed, layer.out, layer.out_norm, layer.mlp_norm)
            gated = self._through_gate(rows, layer.gate_up)
            last = i + 1 == len(self._layers)
            self._add("down", rows, gated, layer.down, layer.down_norm, self._norm if last else self._layers[i + 1].norm)
        rows.h = out
        self._settle(rows)

    def _score(self, hidden: Float[Tensor, "n D"]) -> Float[Tensor, "n V"]:
        logits = self.logits(hidden, hidden.new_empty(len(hidden), self._output.shape[1]))
        return logits if self.output_ids is None else trimmed.widened(logits, self.output_ids, vocab_size=self.vocab_size)

    def _settle(
        self, rows: _Stream, source: Tensor | None = None, *, tokens: Tensor | None = None, own: Norm | None = None
    ) -> None:
        """Add a source, begin with an embedding or leave x as it is; then its norm."""
        norm, (own_eps, own_divisor) = rows.norm, (own.eps, own.divisor) if own else (0.0, 1.0)
        tensors = source, tokens, own and own.weight, rows.x, norm.weight, rows.h
        numbers = self.family.embedding_scale, own_eps, own_divisor, norm.eps, norm.divisor
        meta, strides = self._row_meta(rows.x.shape[1]), (0, 0) if source is None else source.stride()
        self._launch("settle", self.kernels.settle, (len(rows.x),), *tensors, *numbers, *strides, META=meta, num_warps=8)
        rows.squares = None

    def _queries(
        self, rows: _Stream, layer: _Layer, start: Tensor, tables: _Two, where: _Where, nodes: Nodes | None
    ) -> Float[Tensor, "n heads size"]:
        """Queries, turned; keys and values are put into the cache."""
        (keys, values, places), positions = where, None if nodes is None else nodes[1]
        n, size, heads, kv, capacity = len(rows.x), self._head_size, self._heads, self._kv_heads, keys.shape[1]
        width = n // len(start)
        queries = rows.x.new_empty(n, heads, size)
        shape = self._shape(layer.qkv, n, rows.squares)
        if shape and layer.head_norms is None and len(self._turned) == 2 and size % shape.block == 0:
            own = (*rows.scale, layer.qkv_bias, *tables, start, queries, keys, values, heads, kv, capacity, size)
            own += places, width
            self._multiply("queries", self.products.turn, rows.h, layer.qkv, shape, *own, positions=positions)
            return queries
        qkv = rows.x.new_empty(n, layer.qkv.shape[1])
        self._project("queries", rows.h, layer.qkv, qkv, rows=rows, bias=layer.qkv_bias)
        q_norm, k_norm = layer.head_norms or (None, None)
        tensors = qkv, *tables, q_norm and q_norm.weight, k_norm and k_norm.weight, start, queries, keys, values
        numbers = (q_norm or layer.norm).eps, (q_norm or layer.norm).divisor, kv, capacity, self._turned[0], places, width
        grid, meta = (n, heads + 2 * kv), self._row_meta(size)
        options = {"META": meta, "num_warps": 1, "positions": positions}
        self._launch("rotate", self.kernels.rotate, grid, *tensors, *numbers, **options)
        return queries

    def _mixed(
        self, queries: Tensor, layer: _Layer, start: Tensor, span: int, where: _Where, nodes: Nodes | None
    ) -> Float[Tensor, "n E"]:
        """Attention to the text up to each row, or of a node to the text and to what its mask says."""
        (keys, values, places), kernels = where, self.kernels
        (n, _, size), meta = queries.shape, self._row_meta(queries.shape[2])
        kv, groups = self._kv_heads, self._heads // self._kv_heads
        width, most = n // len(start), span // kernels.POSITIONS.value
        blocks = len(start) * -(-width * groups // kernels.ROWS.value)
        parts = 1 if span <= _WHOLE else max(1, min(most, _PROGRAMS // (kv * blocks), kernels.PARTS))
        portion, out = -(-most // parts) * kernels.POSITIONS.value, torch.empty_like(queries)
        tops, sums = queries.new_empty(2, kv, parts, n * groups, dtype=torch.float32)
        mixtures = None if parts == 1 else queries.new_empty(kv, parts, n * groups, size, dtype=torch.float32)
        made, window = (tops, sums, mixtures, out), self.family.views[layer.view].window or 0
        numbers, grid = (width, groups, keys.shape[1], window, portion, self.family.score_scale), (kv, parts, blocks)
        text, _, masks = nodes or (None, None, None)
        options = {"META": meta, "num_warps": kernels.WARPS, "text": text, "masks": masks}
        self._launch("attend", kernels.attend, grid, queries, keys, values, start, *made, *numbers, places, **options)
        if mixtures is not None:
            numbers, grid = (groups, parts, kernels.PARTS), (kv, n * groups)
            self._launch("combine", kernels.combine, grid, *made, *numbers, META=meta, num_warps=1)
        return out.view(n, -1)

    def _through_gate(self, rows: _Stream, weight: Tensor) -> Float[Tensor, "n F"]:
        n, width, is_silu = len(rows.x), weight.shape[1] // 2, self.family.activation == "silu"
        out = rows.x.new_empty(n, width)
        if shape := self._shape(weight, n):
            self._multiply("gate", self.products.gate, rows.h, weight, shape, *rows.scale, out, width, is_silu)
            return out
        meta = self._meta("activate", Tiling(_ACTIVATED, 0, 1, 0), n, width, rows.squares)
        made, grid = torch.mm(rows.h, weight), (n, -(-width // _ACTIVATED))
        self._launch("activate", self.products.activate, grid, made, *rows.scale, out, width, is_silu, META=meta, num_warps=4)
        return out

    def _add(self, kind: str, rows: _Stream, h: Tensor, weight: Tensor, norm: Norm | None, after: Norm) -> None:
        """Add a product, which may have a norm of its own, and begin the norm after it. x times its weight may leave the range
        of float16, so that it is scaled at once."""
        n, width = rows.x.shape
        rows.norm = after
        if norm is not None or rows.x.dtype == torch.float16:
            more = torch.empty_like(rows.x)
            self._project(kind, h, weight, more)
            self._settle(rows, more, own=norm)
            return
        shape = self._shape(weight, n)
        if shape is None:
            torch.addmm(rows.x, h, weight, out=rows.x)
            self._settle(rows)
            return
        rows.squares = rows.x.new_empty(-(-width // shape.block), _padded(n), dtype=torch.float32)
        self._multiply(kind, self.products.add, h, weight, shape, rows.squares, rows.x, after.weight, rows.h, width)

    def logits(self, hidden: Float[Tensor, "n D"], out: Float[Tensor, "n S"]) -> Float[Tensor, "n S"]:
        """Those of the tokens that are scored, put into `out`."""
        return self._project("output", hidden, self._output, out)

    def _project(
        self, kind: str, h: Tensor, weight: Tensor, out: Tensor, *, rows: _Stream | None = None, bias: Tensor | None = None
    ) -> Tensor:
        scale = rows.scale if rows else (None, 0.0, 1.0)
        shape = self._shape(weight, len(h), scale[0])
        if shape is None:
            return torch.mm(h, weight, out=out) if bias is None else torch.addmm(bias, h, weight, out=out)
        self._multiply(kind, self.products.project, h, weight, shape, *scale, bias, out, weight.shape[1])
        return out

    def _shape(self, weight: Tensor, n: int, squares: Tensor | None = None) -> Tiling | None:
        """The choice for n rows; for rows that have no scale yet never torch's product, which leaves it out."""
        outputs, rows, size = weight.shape[1], _padded(n), weight.element_size()
        shape = shape_of(outputs, weight.shape[0], rows, size, is_new=self.is_new)
        return in_steps(outputs, rows, size) if shape is None and squares is not None else shape

    def _multiply(
        self, kind: str, kernel: Any, h: Tensor, weight: Tensor, shape: Tiling, squares: Tensor | None, *own: Any, **more: Any
    ) -> None:
        """A product of rows h; the kernel's own arguments follow those that all have."""
        n, (size, outputs) = len(h), weight.shape
        meta = self._meta(kind, shape, n, size, squares)
        tensors, strides = (h, weight, n, size), (weight.stride(1), weight.stride(0))
        grid = (-(-outputs // shape.block),)
        self._launch(kind, kernel, grid, *tensors, *strides, squares, *own, **more, META=meta, num_warps=shape.groups)

    def _meta(self, kind: str, shape: Tiling, n: int, size: int, squares: Tensor | None) -> Meta:
        num_tiles = 0 if squares is None else len(squares)
        return Meta(
            *shape,
            rows=_padded(n),
            num_tiles=num_tiles,
            tile_block=1 << (num_tiles - 1).bit_length() if num_tiles else 0,
            is_even=size % max(1, shape.groups * shape.depth) == 0,
            is_held=shape.stages == 1 or kind in self.early,
            is_early=self.is_new,
        )

    def _row_meta(self, size: int) -> RowMeta:
        return RowMeta(size, self.kernels.block_of(size), self.is_new)

    def _launch(self, kind: str, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        early = {"launch_pdl": True} if self.is_new and kind in self.early else {}
        kernel[grid](*args, **early, **options)


def _padded(n: int) -> int:
    """The rows of a product that has n: a power of two, and what the matrix units take."""
    return max(8, 1 << (n - 1).bit_length())


def fused(backend: LeanModel) -> LeanModel:
    """The weights of a backend for recorded passes: a `FusedModel` where kernels of our own can be had, else a `LeanModel`."""
    body = backend.plain()
    like = body._embedding
    if not (like.is_cuda or _is_interpreted()) or like.dtype not in _DTYPES:
        return body
    if (kernels := _kernels(like.device)) is None:
        return body
    own = object.__new__(FusedModel)
    own.__dict__.update(body.__dict__)
    own.kernels, own.products = kernels
    own.is_new = like.is_cuda and torch.cuda.get_device_capability(like.device) >= (9, 0)
    own.early = EARLY.get(own.hidden_size, {"settle", "attend", "out"}) if own.is_new else set()
    return own


@cache
def _kernels(device: torch.device) -> Any:
    """`kernels` and `products`, if one of them runs here: Triton is not everywhere, and needs a C compiler and bfloat16."""
    try:
        if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < (8, 0):
            raise RuntimeError(f"compute capability {capability[0]}.{capability[1]}, and 8.0 is needed")
        kernels, products = (import_module(f"specdecpp.backends.graphs.kernels.{name}") for name in ("layers", "products"))
        x = torch.ones(1, 16, device=device)
        with torch.cuda.device_of(x):
            y = torch.empty_like(x)
            meta = RowMeta(16, 16, is_early=False)
            kernels.settle[(1,)](None, None, None, x, x, y, 1.0, 0.0, 1.0, 1e-6, 16.0, 0, 0, META=meta)
    except Exception as error:  # of a compiler, a driver, an import: all mean the same here
        why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        warnings.warn(
            f"Triton does not work here ({why}). Passes on the GPU are up to a third slower without it.", stacklevel=2
        )
        return None
    return kernels, products


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
