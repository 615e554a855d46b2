"""Models of the Llama family without what transformers does around the arithmetic.

A small model's step is bound by the number of operations that are dispatched, not by their size: transformers makes some
hundred per layer and token. This runner computes the same function on the same weights with about thirty: projections joined
(q, k, v; gate, up), residuals added within the product, angles from a table, keys and values written in place.

It takes what it can compute exactly: Llama, Mistral, Qwen2 and Qwen3 with full attention, plain rotary angles (also with
Llama 3's scaling), SiLU, on one device and with unquantised weights. `LeanRunner.refusal` names what stands against it; such
a model is run by `EagerRunner`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from specdecpp.errors import RunnerError
from specdecpp.runners import probe as probing
from specdecpp.runners.eager import EagerRunner

_FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ANGLES = ("default", "linear", "llama3")
_ROOM = 256  # positions a cache grows by
_WIDEST = 512  # rows of one pass: scores of longer prompts would not fit a CPU's cache

_Put = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(layer, new keys, new values) -> all keys and values that the layer may see, each [kv heads, positions, head size]."""


@dataclass(frozen=True)
class _Layer:
    """The weights of one layer, joined, as [in, out]. Norms of single heads are None where the family has none."""

    norm: "_Norm | _FusedNorm"
    qkv: Tensor
    qkv_bias: Tensor | None
    head_norms: "tuple[_Norm | _FusedNorm, _Norm | _FusedNorm] | None"
    out: Tensor
    mlp_norm: "_Norm | _FusedNorm"
    gate_up: Tensor
    down: Tensor


class LeanRunner(EagerRunner):
    """A model of the Llama family and one sequence in its cache. See `runners.Runner` for the contract.

    The model keeps its values and goes on working, but the storage of its weights is laid out anew: save it before, not after.

    Raises `RunnerError` for a model outside the family, and where its logits are not those of transformers; `probe=False`
    leaves that check out.

    >>> runner = LeanRunner(model)                                   # doctest: +SKIP
    """

    manner: ClassVar[str] = "lean"

    def __init__(self, model: Any, *, vocab_size: int | None = None, probe: bool = True):
        if reason := self.refusal(model):
            raise RunnerError(f"{type(model).__name__} cannot be run {self.manner}: {reason}. Use EagerRunner.")
        super().__init__(model, vocab_size=vocab_size, probe=False)
        config, body = model.config, model.model
        self._heads, self._kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
        self._head_size = int(getattr(config, "head_dim", None) or config.hidden_size // self._heads)
        self._norm = _norm_of(body.norm)
        self._output = _share(model.get_output_embeddings())[:, : self.vocab_size]
        self._embedding = body.embed_tokens.weight.detach()  # the same storage where the two are tied
        self._is_wide = self._embedding.dtype.itemsize >= 4
        self._layers = [_joined(layer) for layer in body.layers]
        self._angles = _Angles(body.rotary_emb, dtype=self._embedding.dtype)
        if probe:
            probing.check(self, model, manner=self.manner, is_rough=not self._is_wide)

    @staticmethod
    def refusal(model: Any) -> str | None:
        """Why this model must be run by transformers; None when it need not."""
        config = model.config
        if type(model).__name__ not in _FAMILY:
            return f"it is not one of {', '.join(_FAMILY)}"
        if getattr(config, "sliding_window", None) and _only(getattr(config, "layer_types", None)) != "full_attention":
            return f"its attention slides over a window of {config.sliding_window}"
        if (angles := model.model.rotary_emb.rope_type) not in _ANGLES:
            return f"its rotary angles are {angles}"
        if config.hidden_act != "silu" or getattr(config, "mlp_bias", False):
            return "its feed-forward layers are not plain SiLU gates"
        linear = {type(m) for m in model.modules() if isinstance(m, nn.Linear)}
        if linear != {nn.Linear} or len({p.dtype for p in model.parameters()}) > 1:
            return "its weights are quantised or of several types"
        if len({p.device for p in model.parameters()}) > 1 or any(hasattr(m, "_hf_hook") for m in model.modules()):
            return "it is spread over devices"
        if any(layer.self_attn.o_proj.bias is not None for layer in model.model.layers):
            return "its attention has an output bias"
        return None

    def _reset(self) -> None:
        super()._reset()
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def fresh(self) -> "LeanRunner":
        """An empty runner over the same weights."""
        other = object.__new__(LeanRunner)
        other.__dict__.update(self.__dict__)
        other._reset()
        return other

    @torch.inference_mode()
    def extend(self, tokens: list[int], *, rows: int) -> tuple[Float[Tensor, "rows V"], Float[Tensor, "rows D"]]:
        """Append tokens to the cache; logits [rows, V] and hidden states [rows, D] of the last `rows` of them."""
        while len(tokens) > _WIDEST and len(tokens) > rows:
            unseen = min(_WIDEST, len(tokens) - rows)
            self._read(tokens[:unseen])
            tokens = tokens[unseen:]
        hidden = self._norm(self._read(tokens)[-rows:])
        return torch.mm(hidden, self._output), hidden

    def rollback(self, length: int) -> None:
        """Forget everything after the first `length` tokens: what is written there next replaces it."""
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot roll back to {length} tokens: the cache holds {self._length}")
        self._length = length

    def _read(self, tokens: list[int]) -> Float[Tensor, "n D"]:
        """Put tokens through all layers, into the cache."""
        start, n = self._length, len(tokens)
        end = start + n
        self._make_room(end)

        def put(i: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            self._keys[i][:, start:end] = k
            self._values[i][:, start:end] = v
            return self._keys[i][:, :end], self._values[i][:, :end]

        x = self._embedding[tokens[0], None] if n == 1 else self._embedding[torch.tensor(tokens, device=self.device)]
        x = self._through(x, *self._angles.at(start, end), _causal(n, end, self._embedding), put)
        self._length = end
        return x

    def _through(self, x: Float[Tensor, "n D"], cos: Tensor, sin: Tensor, mask: Tensor, put: _Put) -> Float[Tensor, "n D"]:
        """All layers. `mask` [n, positions] is added to the scores of what `put` returns."""
        n, kv, size, groups = len(x), self._kv_heads, self._head_size, self._heads // self._kv_heads
        mask = mask.repeat(groups, 1)
        for i, layer in enumerate(self._layers):
            h = layer.norm(x)
            qkv = torch.mm(h, layer.qkv) if layer.qkv_bias is None else torch.addmm(layer.qkv_bias, h, layer.qkv)
            qkv = qkv.view(n, -1, size)
            qk, v = qkv[:, :-kv], qkv[:, -kv:]
            if layer.head_norms:
                qk = self._head_normed(qk, layer.head_norms)
            first, second = qk.chunk(2, -1)
            qk = torch.addcmul(qk * cos, torch.cat((second, first), -1), sin)
            keys, values = put(i, qk[:, -kv:].transpose(0, 1), v.transpose(0, 1))
            q = qk[:, :-kv].view(n, kv, groups, size).permute(1, 2, 0, 3).reshape(kv, groups * n, size)
            scores = torch.baddbmm(mask, q, keys.transpose(1, 2), alpha=size**-0.5)
            weights = scores.softmax(-1) if self._is_wide else scores.softmax(-1, dtype=torch.float32).to(x.dtype)
            mixed = torch.bmm(weights, values)
            mixed = mixed.view(kv, groups, n, size).permute(2, 0, 1, 3).reshape(n, -1)
            x = torch.addmm(x, mixed, layer.out)
            gate, up = torch.mm(layer.mlp_norm(x), layer.gate_up).chunk(2, -1)
            x = torch.addmm(x, F.silu(gate) * up, layer.down)
        return x

    def _head_normed(self, qk: Tensor, norms: "tuple[_Norm | _FusedNorm, _Norm | _FusedNorm]") -> Tensor:
        parts = qk.split((self._heads, self._kv_heads), 1)
        return torch.cat([norm(part) for part, norm in zip(parts, norms, strict=True)], 1)

    def _make_room(self, length: int) -> None:
        """Caches [kv heads, positions, head size] that hold at least `length` positions."""
        held = self._keys[0].shape[1] if self._keys else 0
        if length <= held:
            return
        shape = (self._kv_heads, max(length, 2 * held, _ROOM), self._head_size)
        for caches in (self._keys, self._values):
            roomy = [self._embedding.new_zeros(shape) for _ in self._layers]
            for old, new in zip(caches, roomy, strict=False):
                new[:, : self._length] = old[:, : self._length]
            caches[:] = roomy


class _Norm:
    """x / sqrt(mean(x^2) + eps) * w as sqrt(D) w x / sqrt(sum(x^2) + D eps): six operations. torch's own takes a dozen here."""

    def __init__(self, norm: Any):
        weight = norm.weight.detach()
        self._is_wide = weight.dtype.itemsize >= 4
        self._weight = (weight if self._is_wide else weight.float()) * len(weight) ** 0.5
        self._eps = len(weight) * float(norm.variance_epsilon)

    def __call__(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        wide = x if self._is_wide else x.float()
        scale = (wide * wide).sum(-1, keepdim=True).add_(self._eps).rsqrt_()
        out = wide * scale * self._weight
        return out if self._is_wide else out.to(x.dtype)


class _FusedNorm:
    """The same by the one operation that a GPU has for it."""

    def __init__(self, norm: Any):
        self._weight, self._eps = norm.weight.detach(), float(norm.variance_epsilon)

    def __call__(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        return F.rms_norm(x, self._weight.shape, self._weight, self._eps)


def _norm_of(norm: Any) -> _Norm | _FusedNorm:
    return _FusedNorm(norm) if norm.weight.is_cuda else _Norm(norm)


class _Angles:
    """Cosines and sines of the rotary embedding, [n, 1, head size], from a table that grows.

    A half turn takes (first, second) to (-second, first); here the sign is with the sines.
    """

    def __init__(self, rotary: Any, *, dtype: torch.dtype):
        self._rotary, self._dtype = rotary, dtype
        self._cos = self._sin = torch.empty(0)

    def at(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        cos, sin = self.to(end)
        return cos[start:end], sin[start:end]

    def to(self, end: int) -> tuple[Tensor, Tensor]:
        """The whole table, which goes to `end` or further."""
        if end > len(self._cos):
            like = torch.empty(0, dtype=self._dtype, device=self._rotary.inv_freq.device)
            positions = torch.arange(max(end, 2 * len(self._cos), _ROOM), device=like.device)
            self._cos, self._sin = (t[0].unsqueeze(1) for t in self._rotary(like, positions.unsqueeze(0)))
            self._sin[..., : self._sin.shape[-1] // 2] *= -1
        return self._cos, self._sin


def _causal(n: int, end: int, like: Tensor) -> Tensor:
    """[n, end]: row i sees positions up to end - n + i."""
    if n == 1:
        return like.new_zeros(1, 1)
    return torch.full((n, end), -torch.inf, dtype=like.dtype, device=like.device).triu(end - n + 1)


def _joined(layer: Any) -> _Layer:
    """The weights of a layer of transformers, which become views of the joined ones."""
    attention, mlp = layer.self_attn, layer.mlp
    biases = [p.bias for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
    has_norms = hasattr(attention, "q_norm")
    return _Layer(
        norm=_norm_of(layer.input_layernorm),
        qkv=_share(attention.q_proj, attention.k_proj, attention.v_proj),
        qkv_bias=None if biases[0] is None else torch.cat([b.detach() for b in biases]),
        head_norms=(_norm_of(attention.q_norm), _norm_of(attention.k_norm)) if has_norms else None,
        out=_share(attention.o_proj),
        mlp_norm=_norm_of(layer.post_attention_layernorm),
        gate_up=_share(mlp.gate_proj, mlp.up_proj),
        down=_share(mlp.down_proj),
    )


def _share(*parts: Any) -> Tensor:
    """Weights side by side [in, out] in one storage, which the parts then share: nothing is held twice.

    On a CPU in float32 the rows of the storage are inputs: the product of a few rows is then 1.2 times that of one, and
    1.4 to 2 times the other way round (LOG.md).
    """
    joined = torch.cat([p.weight.detach() for p in parts])
    if joined.device.type == "cpu" and joined.dtype == torch.float32:
        joined = joined.T.contiguous().T
    for part, rows in zip(parts, joined.split([len(p.weight) for p in parts]), strict=True):
        part.weight.data = rows
    return joined.T


def _only(values: Any) -> Any:
    """The one value of a list, None if it has several."""
    return values[0] if values and len(set(values)) == 1 else None
