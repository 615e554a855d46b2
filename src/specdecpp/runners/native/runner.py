"""Models of the Llama family on a CPU, a pass as one call of compiled code (`native.cpp`).

The code is compiled when it is first needed, by the C++ compiler of the machine and for its processor, and kept in
`machine.folder()`. Threads meet at barriers within the call, and every weight is read once for all rows, so that a pass over
five positions takes little longer than one over a single position. What it computes is what `LeanRunner` computes; the weights
are copied into the layout it reads, and the model of transformers is let go.

All sums are in float32. Weights that bfloat16 has too, as those of most checkpoints, are kept in that form, which is half as
much to read: with the same bits in every sum if the model was loaded in float32, more exactly than transformers if in bfloat16.
"""

import ctypes
import threading
import weakref
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from specdecpp.errors import RunnerError
from specdecpp.runners import probe as probing
from specdecpp.runners.lean import LeanRunner, _Angles
from specdecpp.runners.native.library import Drafting, Verifying, compiler
from specdecpp.runners.native.weights import Weights
from specdecpp.sampling import inverted

_LOCK = threading.Lock()
_LANES = 16  # what widths of heads must be multiples of
_ROOM = 256  # positions a cache grows by
_WIDEST = 256  # rows of one pass
_DTYPES = (torch.float32, torch.bfloat16)


class NativeRunner:
    """A model of the Llama family and one sequence in its cache. See `runners.Runner` for the contract.

    `num_threads` are those of every pass (None: as many as torch has). A pass waits for those of other runners to end.

    Raises `RunnerError` for a model that it cannot compute, without a compiler, and where its logits are not those of
    transformers; `probe=False` leaves that check out.

    >>> runner = NativeRunner(model, num_threads=2)                  # doctest: +SKIP
    """

    def __init__(self, model: Any, *, vocab_size: int | None = None, num_threads: int | None = None, probe: bool = True):
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
        self._weights = Weights(model, vocab_size=self.vocab_size)
        self._angles = _Angles(model.model.rotary_emb, dtype=torch.float32)
        self._reset()
        if probe:
            probing.check(self, model, manner="by compiled code")

    @staticmethod
    def refusal(model: Any) -> str | None:
        """Why this model cannot be run so here; None where it can."""
        if reason := LeanRunner.refusal(model):
            return reason
        if model.dtype not in _DTYPES or model.device.type != "cpu":
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
