"""Llama and its relatives on a CPU, a pass as one call of compiled code (`native.cpp`).

The code is compiled when it is first needed, by the C++ compiler of the machine and for its processor, and kept in
`machine.folder()`; without a compiler it is that of the wheel (`library`). Threads meet at barriers within the call, and every
weight is read once for all rows of a pass. What it computes is what `families` describes.

Weights stay as they lie in their file: bfloat16, float16, float32 or GGML's quantised blocks, each turned into numbers on the
way into the sums, so that no weight is rounded that the file did not round. Sums are in float32; but where the processor has
products of whole numbers, what is multiplied with quantised blocks is rounded to 16 bits first, which is as good (the largest
difference of a logit is 1e-4 of its size, as between two orders of summing) and takes a half to two thirds of the instructions.
The bits of a row do not depend on how many rows a pass has. float32 weights that bfloat16 has too are kept in that form: half
as much to read, and the same bits in every sum.
"""

import ctypes
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from specdecpp.errors import RunnerError
from specdecpp.runners import families, trimmed
from specdecpp.runners import probe as probing
from specdecpp.runners.eager import max_length
from specdecpp.runners.native import library
from specdecpp.runners.native.library import Drafting, Part, Verifying
from specdecpp.runners.native.weights import DTYPES, TABLES, Weights, values_of
from specdecpp.runners.protocol import check_rollback
from specdecpp.sampling import inverted

_LOCK = threading.Lock()
_LANES = 16  # what widths of heads must be multiples of
_ROOM = 256  # positions a cache grows by
_WIDEST = 256  # rows of one pass
_ROUNDED = 0.1
"""How far logits may be from transformers' where activations are rounded to bytes; relative (`probe.gap`)."""

Activations = Literal["float32", "int16", "int8"]
_BYTES: dict[Activations, int] = {"float32": 0, "int16": 2, "int8": 1}


class NativeRunner:
    """A model that `families` describes and one sequence in its cache. See `runners.Runner` for the contract.

    `stored` are weights as they lie in a file (`loading.gguf_reading.Stored`), by the names of the model's parameters, which
    may then be on the meta device; without `probe` a `families.Sketch` will do for the model. `num_threads` are those of every
    pass (None: as many as torch has). A pass waits for those of other runners to end.

    `activations` say how what is multiplied with quantised weights is rounded: "int16" to 32,639 steps of the largest of each
    group of 16 or 32, "float32" not at all. None takes the first where the processor has products of whole numbers, else the
    second. "int8" rounds to bytes, 127 steps, as llama.cpp does: quicker still with many rows, and the model is another one by
    so much (`probe.gap` of some per cent). What is decoded follows that model's distribution exactly, with and without
    drafting; it is never chosen unasked.

    Raises `RunnerError` for a model that it cannot compute, where there is no compiled code, and where its logits are not
    those of transformers (`probe.check`, unless `probe` is False).

    >>> runner = NativeRunner(model, num_threads=2)                  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any,
        *,
        stored: Mapping[str, Any] | None = None,
        vocab_size: int | None = None,
        num_threads: int | None = None,
        activations: Activations | None = None,
        probe: bool = True,
    ):
        if reason := self.refusal(model, is_stored=stored is not None):
            raise RunnerError(f"{type(model).__name__} cannot be run by compiled code: {reason}. Use EagerRunner.")
        family = families.described(model)
        is_sketch = isinstance(model, families.Sketch)
        rows = model.num_rows if is_sketch else int(model.get_output_embeddings().weight.shape[0])
        self.vocab_size = rows if vocab_size is None else vocab_size
        if self.vocab_size > rows:
            raise RunnerError(
                f"vocab_size={self.vocab_size} asked of {type(model).__name__}, whose output layer has {rows} rows."
            )
        self.output_ids = trimmed.of(model.config, vocab_size=self.vocab_size)
        self.hidden_size = family.width
        self.max_length = max_length(model.config)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.num_threads = num_threads or torch.get_num_threads()
        has_dots = library.library().native_has_dots()
        self.activations: Activations = activations or ("int16" if has_dots else "float32")
        if self.activations != "float32" and not has_dots:
            raise RunnerError("this processor has no products of whole numbers (AVX2 or wider). Use activations='float32'.")
        self._weights = Weights(
            model,
            family,
            vocab_size=self.vocab_size,
            output_ids=self.output_ids,
            stored=stored,
            rounds_to=_BYTES[self.activations],
        )
        self._reset()
        if probe:
            value_of = None if stored is None else lambda name: values_of(stored[name])
            limit = _ROUNDED if self.activations == "int8" else probing.TOLERANCE
            probing.check(self, model, manner="by compiled code", value_of=value_of, limit=limit)

    @staticmethod
    def refusal(model: Any, *, is_stored: bool = False) -> str | None:
        """Why this model cannot be run so here; None where it can. `is_stored`: its weights come from a file."""
        if reason := families.refusal(model) or (None if is_stored else _refusal_of_weights(model)):
            return reason
        family = families.described(model)
        if family.head_size % _LANES:
            return f"its heads are {family.head_size} wide, not a multiple of {_LANES}"
        if len(family.views) > TABLES:
            return f"its layers see in {len(family.views)} ways, not in {TABLES} at most"
        return library.refusal()

    def _reset(self) -> None:
        self._length = self._capacity = self._num_skipped = 0
        self._sequence: int | None = None

    def fresh(self, *, num_threads: int | None = None) -> "NativeRunner":
        """An empty runner over the same weights; with another number of threads where one is given."""
        other = object.__new__(NativeRunner)
        other.__dict__.update(self.__dict__)
        other.num_threads = num_threads or self.num_threads
        other._reset()
        return other

    def fork(self, length: int) -> "NativeRunner":
        """Another runner over the same weights, with a copy of this one's cache up to `length`."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot copy {length} tokens: the cache holds {self.length}")
        other = self.fresh()
        other._num_skipped = min(length, self._num_skipped)
        if self._sequence is not None and (num := length - other._num_skipped):
            with _LOCK:
                other._room_for(0)
                other._copied(self._sequence, max(num, _ROOM), num)
                other._length = num
        return other

    @property
    def length(self) -> int:
        return self._num_skipped + self._length

    @property
    def num_skipped(self) -> int:
        """Tokens at the beginning of the text that were not read (`skip`)."""
        return self._num_skipped

    def skip(self, length: int) -> None:
        """Leave out the first tokens of a text: the cache, which must be empty, begins behind them (`runners.Skips`)."""
        if self._length:
            raise ValueError(f"the cache holds {self._length} tokens, and only an empty one can begin elsewhere in the text")
        self._num_skipped = length

    @property
    def num_bytes(self) -> int:
        """Of the cache in memory."""
        return self._weights.bytes_per_position * self._capacity

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
        self.check_ids(tokens)
        with _LOCK:
            self._weights.see_to(end)
            self._weights.lib.native_extend(
                self._weights.handle,
                self.num_threads,
                self._room_for(end),
                (ctypes.c_int64 * num)(*tokens),
                num,
                self._length,
                rows,
                logits.data_ptr(),
                states.data_ptr(),
            )
        self._length = end
        return logits, states

    def share_of(self, draft: Any) -> float:
        """Of a draft's layers, those that are this model's first, so that they need not be computed again where both read."""
        if not isinstance(draft, NativeRunner) or draft._weights is self._weights:
            return 0.0
        return self._common(draft) / len(draft._weights.family.layers)

    def _common(self, draft: "NativeRunner") -> int:
        """How many first layers are a draft's too."""
        with _LOCK:
            return self._weights.common(draft._weights)

    def extend_both(self, draft: "NativeRunner", tokens: list[int]) -> None:
        """Append tokens to this cache and to a draft's of the same length (`share_of` it above 0), with the bits that `extend`
        of each gives."""
        if draft.length != self.length or draft.num_skipped or self.num_skipped:
            raise ValueError(f"both caches must hold the same text, and they hold {self._length} and {draft._length} tokens")
        self.check_ids(tokens)
        draft.check_ids(tokens)
        common = self._common(draft)
        for i in range(0, len(tokens), _WIDEST):
            num = len(piece := tokens[i : i + _WIDEST])
            start, end = self._length, self._length + num
            with _LOCK:
                both = []
                for runner in (self, draft):
                    runner._weights.see_to(end)
                    both += [runner._weights.handle, runner.num_threads, runner._room_for(end)]
                self._weights.lib.native_extend_both(*both, (ctypes.c_int64 * num)(*piece), num, start, common)
            self._length = draft._length = end

    @staticmethod
    def extend_all(
        runners: Sequence["NativeRunner"], tokens: Sequence[list[int]], *, seen: int | None = None
    ) -> tuple[Float[Tensor, "B V"], Float[Tensor, "B D"], list[Float[Tensor, "n D"]]]:
        """Append tokens to several sequences over the same weights, in one pass.

        Logits [B, V] and hidden states [B, D] of the last token of each, and with `seen` what that layer reads, [n, D] for the
        n tokens of each. The bits of a sequence do not depend on the others. Raises ValueError for runners of several models.
        """
        first, nums = runners[0], [len(new) for new in tokens]
        weights, ends = first._weights, [r._length + num for r, num in zip(runners, nums, strict=True)]
        if any(r._weights is not weights for r in runners) or len({id(r) for r in runners}) < len(runners) or not min(nums):
            raise ValueError("a pass over several sequences needs a runner for each, all of one model, and a token for each")
        logits, states = torch.empty(len(runners), first.vocab_size), torch.empty(len(runners), first.hidden_size)
        inputs = torch.empty(sum(nums) if seen is not None else 0, first.hidden_size)
        flat = [token for new in tokens for token in new]
        first.check_ids(flat)
        with _LOCK:
            weights.see_to(max(ends))
            of = zip(runners, nums, ends, strict=True)
            parts = (Part * len(runners))(*(Part(r._room_for(end), r._length, num, 1, 0) for r, num, end in of))
            given, layer = (ctypes.c_int64 * len(flat))(*flat), -1 if seen is None else seen
            out = logits.data_ptr(), states.data_ptr(), layer, inputs.data_ptr()
            weights.lib.native_pass(weights.handle, first.num_threads, parts, len(runners), given, *out)
        for runner, end in zip(runners, ends, strict=True):
            runner._length = end
        return logits, states, list(inputs.split(nums)) if seen is not None else []

    @staticmethod
    def propose(runners: Sequence["NativeRunner"], tasks: Sequence[Drafting]) -> list[int]:
        """Candidates of rounds of several requests over the same weights (`rounds.native`), at least one each but where a task
        only reads: a cache holds all but the last of its own then. How many each has."""
        for runner, task in zip(runners, tasks, strict=True):
            task.start = runner._length
        ends = [task.start + task.num_unread + task.limit for task in tasks]
        nums = (ctypes.c_int32 * len(tasks))()
        NativeRunner._told(runners, tasks, ends, "native_propose", nums)
        for runner, task, num in zip(runners, tasks, nums, strict=True):
            runner._length = task.start + task.num_unread + max(0, num - 1)
        return list(nums)

    @staticmethod
    def verify(runners: Sequence["NativeRunner"], tasks: Sequence[Verifying]) -> None:
        """One pass over tokens and candidates of several requests, and their tests (`rounds.native`): a cache holds all of
        its own then."""
        for runner, task in zip(runners, tasks, strict=True):
            task.start = runner._length
        ends = [task.start + task.num_tokens for task in tasks]
        NativeRunner._told(runners, tasks, ends, "native_verify")
        for runner, end in zip(runners, ends, strict=True):
            runner._length = end

    @staticmethod
    def _told(runners: Sequence["NativeRunner"], tasks: Sequence[Any], ends: Sequence[int], name: str, *more: Any) -> None:
        first, num = runners[0], len(tasks)
        weights = first._weights
        with _LOCK:
            weights.see_to(max(ends))
            sequences = [runner._room_for(end) for runner, end in zip(runners, ends, strict=True)]
            given = (ctypes.c_void_p * num)(*sequences), (ctypes.c_void_p * num)(*map(ctypes.addressof, tasks))
            getattr(weights.lib, name)(weights.handle, first.num_threads, *given, num, *more)

    @property
    def batch_key(self) -> tuple[int, int]:
        """Equal for runners whose sequences one pass can read: those over the same weights, with as many threads."""
        return id(self._weights), self.num_threads

    def check_ids(self, tokens: list[int]) -> None:
        """Raise ValueError for ids that the embedding does not have."""
        if tokens and not 0 <= min(tokens) <= max(tokens) < self._weights.num_ids:
            raise ValueError(f"ids from {min(tokens)} to {max(tokens)}, but the embedding has {self._weights.num_ids} rows")

    def rollback(self, length: int) -> None:
        """Forget everything after the first `length` tokens: what is written there next replaces it."""
        check_rollback(length, self.length)
        self._num_skipped = min(length, self._num_skipped)
        self._length = length - self._num_skipped

    def draw(self, p: Float[Tensor, " V"], u: float) -> int:
        """`sampling.inverted` in one call of compiled code."""
        if p.dtype != torch.float32 or not p.is_contiguous():
            return inverted(p, u)
        return self._weights.lib.native_draw(p.data_ptr(), len(p), u)

    def _room_for(self, length: int) -> int:
        """The cache, with room for so many positions; what there is keeps its text."""
        lib, sequence = self._weights.lib, self._sequence
        if sequence is None:
            idle = self._weights.idle
            sequence = self._sequence = idle.pop() if idle else int(lib.native_sequence())
            self._capacity = lib.native_capacity(sequence)
            weakref.finalize(self, self._weights.let_go, sequence)
        if length > self._capacity:
            room = max(length, 2 * self._capacity, _ROOM)
            self._copied(sequence, room, self._length)
        return sequence

    def _copied(self, source: int, room: int, length: int) -> None:
        """Make this the cache: room for so many positions, the first `length` of them another's or its own."""
        lib = self._weights.lib
        if not lib.native_copy(self._weights.handle, source, self._sequence, room, length):
            raise MemoryError(f"there is no memory for a cache of {room} positions")
        self._capacity = lib.native_capacity(self._sequence)


def _refusal_of_weights(model: Any) -> str | None:
    found = {(parameter.dtype, parameter.device.type) for parameter in model.parameters()}
    if len(found) > 1 or any(hasattr(module, "_hf_hook") for module in model.modules()):
        return "its weights are of several types or spread over devices"
    if {type(m) for m in model.modules() if isinstance(m, torch.nn.Linear)} != {torch.nn.Linear}:
        return "its weights are quantised by torch"
    (dtype, device) = found.pop()
    if dtype not in DTYPES or device != "cpu":
        return f"its weights are {str(dtype).removeprefix('torch.')} on {device}, not float32, bfloat16 or float16 on a CPU"
    return None
