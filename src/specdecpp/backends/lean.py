"""Models of known families without what transformers does around the arithmetic.

A small model's step is bound by the number of operations that are dispatched, not by their size: transformers makes some
hundred per layer and token. This backend computes the same function on the same weights with about thirty: projections joined
(q, k, v; gate, up), residuals added within the product, angles from a table, keys and values written in place.

It takes what `families` describes, on one device, unquantised. A layer with a sliding window keeps all positions
and reads those of its window, so that a rollback is exact.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from specdecpp.backends import families, trimmed
from specdecpp.backends import probe as probing
from specdecpp.backends.angles import Angles
from specdecpp.backends.base import Cache, check_rollback
from specdecpp.backends.eager import EagerModel
from specdecpp.errors import BackendError

_ROOM = 256  # positions a cache grows by
_WIDEST = 512  # rows of one pass: scores of longer prompts would not fit a CPU's cache

_Put = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(layer, new keys, new values) -> all keys and values that the layer may see, each [kv heads, positions, head size]."""
Attend = Callable[[int, Tensor], Tensor]
"""(layer, queries, keys and values of new rows side by side [n, heads + 2 kv heads, size]) -> [n, heads * size]."""
_Seen = tuple[Tensor, Tensor, Tensor]
"""Tables of one view: cosines and sines of the new positions, and the mask [n, positions], added to the scores."""
_ACTIVATIONS: dict[families.Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


class Norm:
    """x / sqrt(mean(x^2) + eps) * w as sqrt(D) w x / sqrt(sum(x^2) + D eps): six operations. torch's own takes a dozen here."""

    def __init__(self, weight: Tensor, *, eps: float, offset: float = 0.0):
        self._is_wide = weight.dtype.itemsize >= 4
        weight = weight.detach() if self._is_wide else weight.detach().float()
        self.weight = (weight + offset) * len(weight) ** 0.5
        self.eps, self.divisor = len(weight) * eps, 1.0

    def __call__(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        wide = x if self._is_wide else x.float()
        scale = (wide * wide).sum(-1, keepdim=True).add_(self.eps).rsqrt_()
        out = wide * scale * self.weight
        return out if self._is_wide else out.to(x.dtype)


class FusedNorm(Norm):
    """Norm by the one operation that a GPU has for it."""

    def __init__(self, weight: Tensor, *, eps: float):
        self.weight, self.eps, self.divisor = weight.detach(), eps, float(len(weight))

    def __call__(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True)
class _Layer:
    """The weights of one layer, joined, as [in, out]. Norms are None where the family has none."""

    norm: Norm
    qkv: Tensor
    qkv_bias: Tensor | None
    head_norms: tuple[Norm, Norm] | None
    out: Tensor
    out_norm: Norm | None
    mlp_norm: Norm
    gate_up: Tensor
    down: Tensor
    down_norm: Norm | None
    view: int


class LeanCache(Cache):
    """One sequence of a `LeanModel`: keys and values [kv heads, positions, head size] of each layer."""

    def __init__(self, model: "LeanModel"):
        super().__init__(model)
        self.length = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def rollback(self, length: int) -> None:
        """Forget everything after the first `length` tokens: what is written there next replaces it."""
        check_rollback(length, self.length)
        self.length = length

    def make_room(self, length: int) -> int:
        """Hold at least `length` positions; how many it holds."""
        held, used = self.keys[0].shape[1] if self.keys else 0, self.length
        if length <= held:
            return held
        for caches in (self.keys, self.values):
            roomy = self.model.planes(max(length, 2 * held, _ROOM))
            for old, new in zip(caches, roomy, strict=False):
                new[:, :used] = old[:, :used]
            caches[:] = roomy
        return self.keys[0].shape[1]


class LeanModel(EagerModel):
    """A model of a known family. Raises `BackendError` for another, and where its logits are not those of transformers.

    The model keeps its values, but the storage of its weights is laid out anew: save it before, not after.
    """

    manner: ClassVar[str] = "lean"

    def __init__(self, model: Any, *, vocab_size: int | None = None, probe: bool = True):
        if reason := self.refusal(model):
            raise BackendError(f"{type(model).__name__} cannot be run {self.manner}: {reason}. Use EagerModel.")
        super().__init__(model, vocab_size=vocab_size, probe=False)
        family = self.family = families.described(model)
        norm = partial(_norm_of, eps=family.eps, offset=family.norm_offset)
        self._heads, self._kv_heads, self._head_size = family.heads, family.kv_heads, family.head_size
        half, rest = family.rotary_size // 2, family.head_size - family.rotary_size
        self._turned = (half, half, rest) if rest else (half, half)
        self._activation = _ACTIVATIONS[family.activation]
        self._norm = norm(model.get_parameter(family.norm))
        self._output = _share(model.get_parameter(family.output))[:, : self.vocab_size]
        if self.output_ids is not None:
            self._output = self._output.T[self.output_ids].T
        self._embedding = model.get_parameter(family.embedding).detach()  # the same storage where the two are tied
        self._is_wide = self._embedding.dtype.itemsize >= 4
        self._layers = [_joined(layer, model.get_parameter, norm) for layer in family.layers]
        table = partial(Angles, model.model.rotary_emb, dtype=self._embedding.dtype, head_size=family.head_size)
        tables = {kind: table(kind=kind) for kind in {view.angles for view in family.views}}
        self._angles = [tables[view.angles] for view in family.views]
        if probe:
            probing.check(self, model, manner=self.manner, is_rough=not self._is_wide)

    @staticmethod
    def refusal(model: Any) -> str | None:
        """Reason why this model must be run by transformers; None when it need not."""
        if (reason := families.refusal(model)) or isinstance(model, families.Sketch):
            return reason
        return families.refusal_of_weights(model)

    def new_cache(self) -> Any:
        """An empty cache."""
        return LeanCache(self)

    def plain(self) -> "LeanModel":
        """Model over the same weights, with the passes of this class."""
        other = object.__new__(LeanModel)
        other.__dict__.update(self.__dict__)
        return other

    @torch.inference_mode()
    def read(self, cache: Any, tokens: list[int], *, rows: int) -> tuple[Float[Tensor, "rows V"], Float[Tensor, "rows D"]]:
        """Append tokens to one cache."""
        while len(tokens) > _WIDEST and len(tokens) > rows:
            unseen = min(_WIDEST, len(tokens) - rows)
            self._read(cache, tokens[:unseen])
            tokens = tokens[unseen:]
        hidden = self._norm(self._read(cache, tokens)[-rows:])
        return self._score(hidden), hidden

    def _score(self, hidden: Float[Tensor, "n D"]) -> Float[Tensor, "n V"]:
        logits, ids = torch.mm(hidden, self._output), self.output_ids
        return logits if ids is None else trimmed.widened(logits, ids, vocab_size=self.vocab_size)

    def _read(self, cache: LeanCache, tokens: list[int]) -> Float[Tensor, "n D"]:
        """Put tokens through all layers, into the cache."""
        start, n = cache.length, len(tokens)
        end = start + n
        cache.make_room(end)
        firsts = [max(0, start + 1 - view.window) if view.window else 0 for view in self.family.views]
        x = self._embedding[tokens[0], None] if n == 1 else self._embedding[torch.tensor(tokens, device=self.device)]
        seen: list[_Seen] = []
        for first, view, angles in zip(firsts, self.family.views, self._angles, strict=True):
            seen.append((*angles.at(start, end), _mask(n, end - first, view.window, x)))

        def put(i: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            """Rows into the cache of layer i; all of it from where the layer's view begins."""
            cache.keys[i][:, start:end] = k
            cache.values[i][:, start:end] = v
            first = firsts[self._layers[i].view]
            return cache.keys[i][:, first:end], cache.values[i][:, first:end]

        x = self._through(x, self._attending(seen, put))
        cache.length = end
        return x

    def _through(self, x: Float[Tensor, "n D"], attend: Attend) -> Float[Tensor, "n D"]:
        """All layers, over embeddings."""
        if (scale := self.family.embedding_scale) != 1.0:
            x = x * scale
        for i, layer in enumerate(self._layers):
            h = layer.norm(x)
            qkv = torch.mm(h, layer.qkv) if layer.qkv_bias is None else torch.addmm(layer.qkv_bias, h, layer.qkv)
            x = self._added(x, attend(i, qkv.view(len(x), -1, self._head_size)), layer.out, layer.out_norm)
            h = self._gated(torch.mm(layer.mlp_norm(x), layer.gate_up))
            x = self._added(x, h, layer.down, layer.down_norm)
        return x

    def _attending(self, seen: list[_Seen], put: _Put) -> Attend:
        """`put` returns the positions that the masks of `seen` are of."""
        groups = self._heads // self._kv_heads
        return partial(self._attend, [(cos, sin, mask.repeat(groups, 1)) for cos, sin, mask in seen], put)

    def _attend(self, seen: list[_Seen], put: _Put, i: int, qkv: Tensor) -> Tensor:
        n, kv, size, groups = len(qkv), self._kv_heads, self._head_size, self._heads // self._kv_heads
        layer = self._layers[i]
        cos, sin, mask = seen[layer.view]
        qk, v = qkv[:, :-kv], qkv[:, -kv:]
        if layer.head_norms:
            qk = self._head_normed(qk, layer.head_norms)
        first, second, *rest = qk.split(self._turned, -1)
        qk = torch.addcmul(qk * cos, torch.cat((second, first, *rest), -1), sin)
        keys, values = put(i, qk[:, -kv:].transpose(0, 1), v.transpose(0, 1))
        q = qk[:, :-kv].view(n, kv, groups, size).permute(1, 2, 0, 3).reshape(kv, groups * n, size)
        scores = torch.baddbmm(mask, q, keys.transpose(1, 2), alpha=self.family.score_scale)
        weights = scores.softmax(-1) if self._is_wide else scores.softmax(-1, dtype=torch.float32).to(qkv.dtype)
        mixed = torch.bmm(weights, values)
        return mixed.view(kv, groups, n, size).permute(2, 0, 1, 3).reshape(n, -1)

    def _gated(self, h: Float[Tensor, "n F2"]) -> Float[Tensor, "n F"]:
        gate, up = h.chunk(2, -1)
        return self._activation(gate) * up

    def _added(self, x: Tensor, h: Tensor, weight: Tensor, norm: Norm | None) -> Tensor:
        return torch.addmm(x, h, weight) if norm is None else x + norm(torch.mm(h, weight))

    def _head_normed(self, qk: Tensor, norms: tuple[Norm, Norm]) -> Tensor:
        parts = qk.split((self._heads, self._kv_heads), 1)
        return torch.cat([norm(part) for part, norm in zip(parts, norms, strict=True)], 1)

    def planes(self, length: int) -> Float[Tensor, "layers kv length size"]:
        """Zeros for the keys, or the values, of all layers."""
        return self._embedding.new_zeros(len(self._layers), self._kv_heads, length, self._head_size)


def _norm_of(weight: Tensor, *, eps: float, offset: float) -> Norm:
    """1 + w has more digits than half precision keeps, so that a norm with an offset is not fused."""
    return FusedNorm(weight, eps=eps) if weight.is_cuda and not offset else Norm(weight, eps=eps, offset=offset)


def _mask(n: int, num: int, window: int | None, like: Tensor) -> Tensor:
    """[n, num], of the last num positions: row i sees those up to num - n + i, and of them the last `window`."""
    if n == 1:
        return like.new_zeros(1, 1)
    mask = torch.full((n, num), -torch.inf, dtype=like.dtype, device=like.device)
    later = mask.triu(num - n + 1)
    return later if window is None or window >= num else later + mask.tril(num - n - window)


def _joined(layer: families.Layer, weight: Callable[[str], Tensor], norm: Callable[[Tensor], Norm]) -> _Layer:
    """The weights of a layer of transformers, which become views of the joined ones."""
    q_norm, k_norm = layer.head_norms or (None, None)
    return _Layer(
        norm=norm(weight(layer.norm)),
        qkv=_share(*map(weight, layer.qkv)),
        qkv_bias=torch.cat([weight(name).detach() for name in layer.qkv_bias]) if layer.qkv_bias else None,
        head_norms=(norm(weight(q_norm)), norm(weight(k_norm))) if q_norm and k_norm else None,
        out=_share(weight(layer.out)),
        out_norm=norm(weight(layer.out_norm)) if layer.out_norm else None,
        mlp_norm=norm(weight(layer.mlp_norm)),
        gate_up=_share(*map(weight, layer.gate_up)),
        down=_share(weight(layer.down)),
        down_norm=norm(weight(layer.down_norm)) if layer.down_norm else None,
        view=layer.view,
    )


def _share(*parts: Tensor) -> Tensor:
    """Weights side by side [in, out] in one storage, which the parts then share. On a CPU in float32 its rows are inputs, with
    which products of a few rows are quicker (LOG.md)."""
    joined = torch.cat([part.detach() for part in parts])
    if joined.device.type == "cpu" and joined.dtype == torch.float32:
        joined = joined.T.contiguous().T
    for part, rows in zip(parts, joined.split([len(part) for part in parts]), strict=True):
        part.data = rows
    return joined.T
