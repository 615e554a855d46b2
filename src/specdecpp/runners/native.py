"""Models of the Llama family on a CPU, a pass as one call of compiled code (`native.cpp`).

The code is compiled when it is first needed, by the C++ compiler of the machine and for its processor, and kept in
`machine.folder()`. Threads meet at barriers within the call, and every weight is read once for all rows, so that a pass over
five positions takes little longer than one over a single position. What it computes is what `LeanRunner` computes; the weights
are copied into the layout it reads, and the model of transformers is let go.

All sums are in float32. Weights that bfloat16 has too, as those of most checkpoints, are kept in that form, which is half as
much to read: with the same bits in every sum if the model was loaded in float32, more exactly than transformers if in bfloat16.
"""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import threading
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from specdecpp import machine
from specdecpp.errors import RunnerError
from specdecpp.runners.lean import LeanRunner, _Angles
from specdecpp.sampling import inverted

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC")
_RUNTIME = re.compile(r"/lib(gomp|iomp5|omp)[-.]")
_LANES = 16  # what widths of heads must be multiples of
_ROOM = 256  # positions a cache grows by
_WIDEST = 256  # rows of one pass
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""How far logits may be from those of transformers, which rounds its sums to bfloat16; relative to the largest."""


class _Shape(ctypes.Structure):
    _names = ("layers", "width", "heads", "kv_heads", "size", "hidden", "vocab", "is_half")
    _fields_ = [(name, ctypes.c_int32) for name in _names]
    _fields_ += [("eps", ctypes.c_float)]


class Head(ctypes.Structure):
    """The acceptance head, as `native.cpp` reads it."""

    _fields_ = [(name, ctypes.c_int32) for name in ("input", "scalars", "width", "blocks")]
    _fields_ += [("kinds", ctypes.c_int32 * 4)]
    _fields_ += [(name, ctypes.c_void_p) for name in ("weight", "table", "block", "block_bias", "output")]
    _fields_ += [(name, ctypes.c_double) for name in ("shift", "slope", "bias")]


class Drafting(ctypes.Structure):
    """What `native_propose` is told and says: see there."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("unread", "ends", "uniforms", "least", "head", "cos", "sin")]
    _fields_ += [(name, ctypes.c_void_p) for name in ("tokens", "rows", "confidence", "accept")]
    _fields_ += [(name, ctypes.c_double) for name in ("forward_s", "head_s")]
    _fields_ += [(name, ctypes.c_int32) for name in ("why", "num_unread", "num_ends", "start", "limit", "evidence")]
    _fields_ += [("temperature", ctypes.c_float)]


class Verifying(ctypes.Structure):
    """What `native_verify` is told and says: see there."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("tokens", "coins", "q", "cos", "sin", "logits", "states")]
    _fields_ += [("next", ctypes.c_int64), ("forward_s", ctypes.c_double)]
    _fields_ += [(name, ctypes.c_int32) for name in ("num_accepted", "num_tokens", "num", "start", "is_block")]
    _fields_ += [("temperature", ctypes.c_float)]


class NativeRunner:
    """A model of the Llama family and one sequence in its cache. See `runners.Runner` for the contract.

    `num_threads` are those of every pass (None: as many as torch has). A pass waits for those of other runners to end.

    Raises `RunnerError` for a model that it cannot compute, without a compiler, and where its logits are not those of
    transformers.

    >>> runner = NativeRunner(model, num_threads=2)                  # doctest: +SKIP
    """

    def __init__(self, model: Any, *, vocab_size: int | None = None, num_threads: int | None = None):
        if reason := self.refusal(model):
            raise RunnerError(f"{type(model).__name__} cannot be run by compiled code: {reason}. Use EagerRunner.")
        rows = int(model.get_output_embeddings().weight.shape[0])
        self.vocab_size = rows if vocab_size is None else vocab_size
        if self.vocab_size > rows:
            raise RunnerError(
                f"vocab_size={self.vocab_size} asked of {type(model).__name__}, whose output layer has {rows} rows."
            )
        self.hidden_size = int(model.config.hidden_size)
        self.max_length: int | None = int(model.config.max_position_embeddings)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.num_threads = num_threads or torch.get_num_threads()
        self._weights = _Weights(model, vocab_size=self.vocab_size)
        self._angles = _Angles(model.model.rotary_emb, dtype=torch.float32)
        self._reset()
        self._check_against_transformers(model)

    @staticmethod
    def refusal(model: Any) -> str | None:
        """Why this model cannot be run so here; None where it can."""
        if reason := LeanRunner.refusal(model):
            return reason
        if model.dtype not in _TOLERANCE or model.device.type != "cpu":
            found = f"{str(model.dtype).removeprefix('torch.')} on {model.device}"
            return f"its weights are {found}, not float32 or bfloat16 on a CPU"
        size = int(getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads)
        if size % _LANES:
            return f"its heads are {size} wide, not a multiple of {_LANES}"
        return None if compiler() else "there is no C++ compiler (set CXX, or install g++ or clang++)"

    def _reset(self) -> None:
        self._length = self._capacity = 0
        self._sequence: int | None = None

    def fresh(self, *, num_threads: int | None = None) -> "NativeRunner":
        """An empty runner over the same weights; with another number of threads where one is given."""
        other = object.__new__(NativeRunner)
        other.__dict__.update(self.__dict__)
        other.num_threads = num_threads or self.num_threads
        other._reset()
        return other

    @property
    def length(self) -> int:
        return self._length

    def extend(self, tokens: list[int], *, rows: int) -> tuple[Float[Tensor, "rows V"], Float[Tensor, "rows D"]]:
        """Append tokens to the cache; logits [rows, V] and hidden states [rows, D] of the last `rows` of them."""
        while len(tokens) > _WIDEST and len(tokens) > rows:
            unseen = min(_WIDEST, len(tokens) - rows)
            self._extend(tokens[:unseen], rows=1)
            tokens = tokens[unseen:]
        return self._extend(tokens, rows=rows)

    def _extend(self, tokens: list[int], *, rows: int) -> tuple[Tensor, Tensor]:
        num, end = len(tokens), self._length + len(tokens)
        logits, states = torch.empty(rows, self.vocab_size), torch.empty(rows, self.hidden_size)
        cos, sin = self._angles.to(end)
        past = self._length * cos.stride(0) * cos.element_size()
        with _LOCK:
            self._weights.lib.native_extend(
                self._weights.handle,
                self.num_threads,
                self._room_for(end),
                (ctypes.c_int64 * num)(*tokens),
                num,
                self._length,
                rows,
                cos.data_ptr() + past,
                sin.data_ptr() + past,
                logits.data_ptr(),
                states.data_ptr(),
            )
        self._length = end
        return logits, states

    def propose(self, task: Drafting) -> int:
        """Candidates of a round, at least one (`compiled_round`): the cache holds all but the last of them then. How many."""
        start = task.start = self._length
        num = self._told(task, start + task.num_unread + task.limit, self._weights.lib.native_propose)
        self._length = start + task.num_unread + num - 1
        return num

    def verify(self, task: Verifying) -> None:
        """A pass over tokens and candidates, and their test (`compiled_round`): the cache holds all of them then."""
        task.start = self._length
        self._told(task, self._length + task.num_tokens, self._weights.lib.native_verify)
        self._length += task.num_tokens

    def _told(self, task: Drafting | Verifying, end: int, do: Any) -> Any:
        cos, sin = self._angles.to(end)
        task.cos, task.sin = cos.data_ptr(), sin.data_ptr()
        with _LOCK:
            return do(self._weights.handle, self.num_threads, self._room_for(end), ctypes.byref(task))

    def rollback(self, length: int) -> None:
        """Forget everything after the first `length` tokens: what is written there next replaces it."""
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot roll back to {length} tokens: the cache holds {self._length}")
        self._length = length

    def draw(self, p: Float[Tensor, " V"], u: float) -> int:
        """`sampling.inverted` in one call of compiled code."""
        if p.dtype != torch.float32 or not p.is_contiguous():
            return inverted(p, u)
        return self._weights.lib.native_draw(p.data_ptr(), len(p), u)

    def _room_for(self, length: int) -> int:
        """The cache, with room for so many positions."""
        lib, sequence = self._weights.lib, self._sequence
        if sequence is None:
            sequence = self._sequence = int(lib.native_sequence())
            weakref.finalize(self, lib.native_sequence_free, sequence)
        if length > self._capacity:
            room = max(length, 2 * self._capacity, _ROOM)
            if not lib.native_grow(self._weights.handle, sequence, room, self._length):
                raise MemoryError(f"there is no memory for a cache of {length} positions")
            self._capacity = lib.native_capacity(sequence)
        return sequence

    def _check_against_transformers(self, model: Any) -> None:
        """Logits of a few tokens, read at once and one by one, against those of the model's own forward pass."""
        tokens = [i % self.vocab_size for i in (1, 2, 3, 5, 8, 2, 1)]
        with torch.inference_mode():
            own = model(input_ids=torch.tensor([tokens])).logits[0, :, : self.vocab_size]
        first, _ = self.extend(tokens[:4], rows=4)
        rest = [self.extend([token], rows=1)[0] for token in tokens[4:]]
        self._reset()
        gap = float((torch.cat([first, *rest]) - own).abs().max() / own.abs().max().clamp(min=1e-6))
        if not gap <= _TOLERANCE[model.dtype]:
            raise RunnerError(
                f"{type(model).__name__} run by compiled code gives other logits than transformers (relative difference "
                f"{gap:.3g}). Use EagerRunner."
            )


class _Weights:
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
            is_half=_fits_half(model),
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


def _fits_half(model: Any) -> bool:
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


_LOCK = threading.Lock()


def compiler() -> str | None:
    """The C++ compiler: what CXX names, else the first of c++, g++ and clang++ that is there."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else ("c++", "g++", "clang++")
    return next((path for name in names if (path := shutil.which(name))), None)


@cache
def library() -> Any:
    """The compiled code, from `machine.folder()` or compiled now. Raises `RunnerError` with the compiler's words."""
    path = _binary()
    if not path.exists():
        _compile(path)
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise RunnerError(f"{path} cannot be loaded ({error}). Delete it, and it is compiled again.") from error
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    signatures = {
        "native_new": (pointer, [pointer]),
        "native_layer": (None, [pointer, number, *[pointer] * 10]),
        "native_ends": (ctypes.c_bool, [*[pointer] * 4, number]),
        "native_free": (None, [pointer]),
        "native_sequence": (pointer, []),
        "native_sequence_free": (None, [pointer]),
        "native_capacity": (number, [pointer]),
        "native_grow": (ctypes.c_bool, [pointer, pointer, number, number]),
        "native_propose": (number, [pointer, number, pointer, pointer]),
        "native_verify": (None, [pointer, number, pointer, pointer]),
        "native_draw": (ctypes.c_int64, [pointer, ctypes.c_int64, ctypes.c_double]),
        "native_extend": (None, [pointer, number, pointer, pointer, number, number, number, *[pointer] * 4]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def _binary() -> Path:
    """Where the compiled code lies: its name changes with the source, the compiler and the processor."""
    facts = [SOURCE.read_text(encoding="utf-8"), *FLAGS, *_openmp(), str(compiler()), platform.machine(), machine.processor()]
    return machine.folder() / f"native-{hashlib.sha256(chr(0).join(facts).encode()).hexdigest()[:16]}.so"


@cache
def _openmp() -> tuple[str, ...]:
    """How to use the OpenMP runtime that torch has loaded; nothing where there is none to be found: one thread then."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ()
    loaded = sorted({path for line in lines if _RUNTIME.search(path := line.rpartition(" ")[2])})
    of_torch = [path for path in loaded if Path(path).is_relative_to(Path(torch.__file__).parent)]
    return (*(of_torch or loaded)[:1], "-fopenmp") if loaded else ()


def _compile(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    command = [str(compiler()), *FLAGS, "-march=native", str(SOURCE), *_openmp(), "-o", str(part)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunnerError(f"{' '.join(command)} fails: {done.stderr.strip()[:600]}")
    part.replace(path)
