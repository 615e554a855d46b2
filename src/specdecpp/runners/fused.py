"""The layers of `LeanRunner` with all that stands between their products in kernels of our own, for passes that are recorded.

Launched one by one they would be slower than torch's operations: starting a kernel of Triton takes Python longer.
"""

import os
import warnings
from functools import cache
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdecpp.runners.lean import LeanRunner, Norm

_PROGRAMS = 512
"""Of `kernels.attend` at once: four for each multiprocessor of a large GPU."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_Tables = list[tuple[Tensor, Tensor]]


class FusedRunner(LeanRunner):
    """See `fused`, which makes one. It keeps its sequence where its `StaticCache` does."""

    kernels: Any

    def attend_static(
        self,
        start: Int[Tensor, " 1"],
        span: int,
        tables: _Tables,
        keys: list[Tensor],
        values: list[Tensor],
        i: int,
        qkv: Float[Tensor, "n heads size"],
    ) -> Float[Tensor, "n E"]:
        """Attention of n rows, the first at `start`, to the text before them, in caches [kv heads, capacity, size] of each
        layer. Their own keys and values are put there. The text ends within `span`."""
        n, size, kv, groups = len(qkv), self._head_size, self._kv_heads, self._heads // self._kv_heads
        layer, k, v = self._layers[i], keys[i], values[i]
        block, capacity = self.kernels.block_of(size), k.shape[1]
        cos, sin = tables[layer.view]
        q_norm, k_norm = layer.head_norms or (layer.norm, layer.norm)
        queries = qkv.new_empty(n, self._heads, size)
        self.kernels.rotate[n, self._heads + 2 * kv](
            *(qkv, cos, sin, q_norm.weight, k_norm.weight, start, queries, k, v, q_norm.eps, q_norm.divisor),
            *(self._heads, kv, capacity, self._turned[0], size, block, layer.head_norms is not None),
            num_warps=1,
        )
        rows = self.kernels.ROWS
        blocks, most = -(-n * groups // rows), span // self.kernels.POSITIONS
        parts = max(1, min(most, _PROGRAMS // (kv * blocks), self.kernels.PARTS))
        portion = -(-most // parts) * self.kernels.POSITIONS
        tops, sums = qkv.new_empty(2, kv, parts, n * groups, dtype=torch.float32)
        mixtures = qkv.new_empty(kv, parts, n * groups, size, dtype=torch.float32)
        window, scale = self.family.views[layer.view].window or 0, self.family.score_scale
        self.kernels.attend[kv, parts, blocks](
            *(queries, k, v, start, tops, sums, mixtures, n, kv, groups, capacity, window, portion, scale),
            *(size, block, rows, self.kernels.POSITIONS),
        )
        out = torch.empty_like(queries)
        self.kernels.combine[kv, n * groups](
            *(tops, sums, mixtures, out, n, groups, parts, size, block, self.kernels.PARTS), num_warps=1
        )
        return out.view(n, -1)

    def _normed(self, x: Float[Tensor, "n D"], norm: Norm) -> Float[Tensor, "n D"]:
        out, size = torch.empty_like(x), x.shape[1]
        self.kernels.norm[(len(x),)](
            x, norm.weight, out, norm.eps, norm.divisor, size, self.kernels.block_of(size), num_warps=8
        )
        return out

    def _gated(self, h: Float[Tensor, "n F2"]) -> Float[Tensor, "n F"]:
        size, block = h.shape[1] // 2, 512
        out = h.new_empty(len(h), size)
        grid = (-(-out.numel() // block),)
        self.kernels.gate[grid](h, out, size, out.numel(), self.family.activation == "silu", block)
        return out

    def _added(self, x: Tensor, h: Tensor, weight: Tensor, norm: Norm | None) -> Tensor:
        """In place: what comes in is a pass's own."""
        return x.addmm_(h, weight) if norm is None else x.add_(self._normed(torch.mm(h, weight), norm))


def fused(runner: LeanRunner) -> LeanRunner:
    """The weights of a runner for recorded passes: a `FusedRunner` where kernels of our own can be had, else a `LeanRunner`."""
    body = LeanRunner.fresh(runner)
    like = body._embedding
    if not (like.is_cuda or _is_interpreted()) or like.dtype not in _DTYPES:
        return body
    if (kernels := _kernels(like.device)) is None:
        return body
    own = object.__new__(FusedRunner)
    own.__dict__.update(body.__dict__)
    own.kernels = kernels
    return own


@cache
def _kernels(device: torch.device) -> Any:
    """`kernels`, if the first of them runs here: Triton is not everywhere, and needs a C compiler and bfloat16."""
    try:
        if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < (8, 0):
            raise RuntimeError(f"compute capability {capability[0]}.{capability[1]}, and 8.0 is needed")
        kernels: Any = import_module("specdecpp.runners.kernels")
        x = torch.ones(1, 16, device=device)
        with torch.cuda.device_of(x):
            kernels.norm[(1,)](x, x[0], torch.empty_like(x), 1e-6, 16.0, 16, 16)
    except Exception as error:  # of a compiler, a driver, an import: all mean the same here
        why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        warnings.warn(
            f"Triton does not work here ({why}). Passes on the GPU are up to a third slower without it.", stacklevel=2
        )
        return None
    return kernels


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
