"""The weights of a model in the layout that the compiled code reads."""

import ctypes
import weakref
from typing import Any

import torch
from torch import Tensor

from specdecpp.runners.native.library import library


class _Shape(ctypes.Structure):
    _names = ("layers", "width", "heads", "kv_heads", "size", "hidden", "vocab", "is_half")
    _fields_ = [(name, ctypes.c_int32) for name in _names]
    _fields_ += [("eps", ctypes.c_float)]


class Weights:
    """The weights of a model as the compiled code reads them."""

    def __init__(self, model: Any, *, vocab_size: int):
        self.lib = library()
        config, body, output = model.config, model.model, model.get_output_embeddings().weight
        size = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        shape = _Shape(
            layers=len(body.layers),
            width=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            size=size,
            hidden=config.intermediate_size,
            vocab=vocab_size,
            is_half=fits_half(model),
            eps=body.norm.variance_epsilon,
        )
        self.handle = self.lib.native_new(ctypes.byref(shape))
        if not self.handle:
            raise MemoryError(f"there is no memory for the weights of {type(model).__name__}")
        weakref.finalize(self, self.lib.native_free, self.handle)
        for i, layer in enumerate(body.layers):
            self._add_layer(i, layer)
        embedding = body.embed_tokens.weight
        is_tied = embedding.data_ptr() == output.data_ptr() and vocab_size == len(output)
        given = _Pointers()
        own = None if is_tied else given(embedding)
        if not self.lib.native_ends(self.handle, own, given(body.norm.weight), given(output), len(embedding)):
            raise MemoryError(f"there is no memory for the embeddings of {type(model).__name__}")

    def _add_layer(self, i: int, layer: Any) -> None:
        attention, mlp, given = layer.self_attn, layer.mlp, _Pointers()
        parts = attention.q_proj, attention.k_proj, attention.v_proj
        has_norms = hasattr(attention, "q_norm")
        self.lib.native_layer(
            self.handle,
            i,
            given(layer.input_layernorm.weight),
            given(torch.cat([part.weight for part in parts])),
            None if parts[0].bias is None else given(torch.cat([part.bias for part in parts])),
            given(attention.q_norm.weight) if has_norms else None,
            given(attention.k_norm.weight) if has_norms else None,
            given(attention.o_proj.weight),
            given(layer.post_attention_layernorm.weight),
            given(mlp.gate_proj.weight),
            given(mlp.up_proj.weight),
            given(mlp.down_proj.weight),
        )


def fits_half(model: Any) -> bool:
    """Whether bfloat16 has every weight of the matrices: kept so they are half as much to read, and sums have the same bits."""
    matrices = (m.weight for m in model.modules() if isinstance(m, torch.nn.Linear | torch.nn.Embedding))
    return all(w.dtype == torch.bfloat16 or not (w.detach().contiguous().view(torch.int32) & 0xFFFF).any() for w in matrices)


class _Pointers:
    """Addresses of tensors in plain rows, which stay alive as long as this does."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def __call__(self, tensor: Tensor) -> int:
        self._kept.append(tensor.detach().float().contiguous())
        return self._kept[-1].data_ptr()
