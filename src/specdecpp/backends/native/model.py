"""Known families on a CPU: a pass is one call of compiled code, which reads every weight once for all rows.

Weights stay as they lie in their file: bfloat16, float16, float32 or GGML's quantised blocks. Sums are float32. The bits of a
row do not depend on the other rows.
"""

import ctypes
import threading
import weakref
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from specdecpp.backends import families, trimmed
from specdecpp.backends import probe as probing
from specdecpp.backends.base import Cache, check_rollback, scored_rows
from specdecpp.backends.eager import max_length
from specdecpp.backends.native import library
from specdecpp.backends.native.library import Drafting, PassPart, Verifying
from specdecpp.backends.native.weights import DTYPES, TABLES, Subset, Values, Weights, values_of
from specdecpp.errors import BackendError
from specdecpp.sampling import inverted

_LOCK = threading.Lock()
_LANES = 16  # what widths of heads must be multiples of
_ROOM = 256  # positions a cache grows by
_WIDEST = 256  # rows of one pass
_ROUNDED = 0.1
"""How far logits may be from transformers' where activations are rounded to bytes; relative (`probe.gap`)."""

Activations = Literal["float32", "int16", "int8"]
_BYTES: dict[Activations, int] = {"float32": 0, "int16": 2, "int8": 1}


class NativeCache(Cache):
    """One sequence of a `NativeModel`. Its text may begin in the middle (`skip`): `held` counts what the memory holds, `length`
    what stands before it too. Idle memory is taken first, and goes back when this is gone."""

    def __init__(self, model: "NativeModel"):
        super().__init__(model)
        self.held = self.num_skipped = self._capacity = 0
        self._memory: int | None = None
        self.text = None if model.listed is None else trimmed.TextTokens(model.listed)
        self._own: tuple[list[int], Subset] | None = None

    @property
    def length(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.num_skipped + self.held

    @property
    def num_bytes(self) -> int:
        """Bytes of the cache in memory."""
        return self.model.weights.bytes_per_position * self._capacity

    def rollback(self, length: int) -> None:
        """Forget everything after the first `length` tokens: what is written there next replaces it."""
        check_rollback(length, self.length)
        self.num_skipped = min(length, self.num_skipped)
        self.held = length - self.num_skipped
        if self.text is not None:
            self.text.rollback(length)

    def settle(self, unread: list[int]) -> None:
        """Decide which tokens q of the coming step may have."""
        self.note(unread)
        if self.text is not None:
            self.text.settle()

    def note(self, tokens: list[int]) -> None:
        """Take in the tokens that are being appended."""
        if self.text is not None:
            self.text.read(tokens, self.length)

    @property
    def is_reduced(self) -> bool:
        """True where q has some of the tokens only."""
        return self.text is not None and not self.text.is_foreign

    def own_rows(self) -> int | None:
        """Output rows of the text's own tokens, for compiled code; None without any."""
        ids = self.text.ids if self.text is not None and self.is_reduced else []
        if ids and (self._own is None or self._own[0] != ids):
            self._own = ids, Subset(self.model.weights, ids)
        return self._own[1].handle if ids and self._own else None

    def skip(self, length: int) -> None:
        """Leave out the first tokens of a text: the cache, which must be empty, begins behind them (`backends.Skips`)."""
        if self.held:
            raise ValueError(f"the cache holds {self.held} tokens, and only an empty one can begin elsewhere in the text")
        self.num_skipped = length

    def fork(self, length: int) -> "NativeCache":
        """A copy of the first `length` tokens."""
        check_rollback(length, self.length)
        other = NativeCache(self.model)
        other.num_skipped = min(length, self.num_skipped)
        other.text = self.text and self.text.fork(length)
        if self._memory is not None and (num := length - other.num_skipped):
            with _LOCK:
                other.room_for(0)
                other._take(self._memory, max(num, _ROOM), num)
                other.held = num
        return other

    def room_for(self, length: int) -> int:
        """The memory, with room for so many positions."""
        weights, memory = self.model.weights, self._memory
        if memory is None:
            memory = self._memory = weights.idle.pop() if weights.idle else int(weights.lib.native_sequence())
            self._capacity = weights.lib.native_capacity(memory)
            weakref.finalize(self, weights.let_go, memory)
        if length > self._capacity:
            self._take(memory, max(length, 2 * self._capacity, _ROOM), self.held)
        return memory

    def _take(self, source: int, room: int, length: int) -> None:
        """Have room for so many positions, the first `length` of them those of another memory, or of this one."""
        weights = self.model.weights
        if not weights.lib.native_copy(weights.handle, source, self._memory, room, length):
            raise MemoryError(f"there is no memory for a cache of {room} positions")
        self._capacity = weights.lib.native_capacity(self._memory)


class NativeModel:
    """A model that `families` describes. `num_threads` are those of every pass (None: as many as torch has).

    `stored` are weights as they lie in a file (`loading.gguf_reading.Stored`), by the names of the model's parameters, which
    may then be on the meta device; without `probe` a `families.Sketch` will do for the model.

    `activations` say how what is multiplied with quantised weights is rounded: "int16" (the default where the processor has
    products of whole numbers) changes a logit by 1e-4 of its size, as another order of summing does; "float32" not at all;
    "int8" rounds to bytes as llama.cpp does: quicker with many rows, and as far from float32 as bfloat16 is
    (docs/how-it-works.md). Whichever it is, its distribution is then decoded exactly.

    Raises `BackendError` for a model that it cannot compute, without compiled code, and for logits unlike transformers'.
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
            raise BackendError(f"{type(model).__name__} cannot be run by compiled code: {reason}. Use EagerModel.")
        sketch = model if isinstance(model, families.Sketch) else families.Sketch.of(model)
        self.vocab_size = scored_rows(vocab_size, sketch.num_rows, type(model).__name__)
        self.output_ids = trimmed.of(sketch.config, vocab_size=self.vocab_size)
        self.listed: bytes | None = None
        self.subset: Subset | None = None
        self.hidden_size = sketch.family.width
        self.max_length = max_length(sketch.config)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.num_threads = num_threads or torch.get_num_threads()
        has_dots = library.library().native_has_dots()
        self.activations: Activations = activations or ("int16" if has_dots else "float32")
        if self.activations != "float32" and not has_dots:
            raise BackendError("this processor has no products of whole numbers (AVX2 or wider). Use activations='float32'.")
        self.weights = Weights(
            sketch,
            Values(model, stored),
            vocab_size=self.vocab_size,
            output_ids=self.output_ids,
            rounds_to=_BYTES[self.activations],
        )
        if probe:
            value_of = None if stored is None else lambda name: values_of(stored[name])
            limit = _ROUNDED if self.activations == "int8" else probing.TOLERANCE
            probing.check(self, model, manner="by compiled code", value_of=value_of, limit=limit)

    @staticmethod
    def refusal(model: Any, *, is_stored: bool = False) -> str | None:
        """Reason why this model cannot be run so here; None where it can. `is_stored`: its weights come from a file."""
        if reason := families.refusal(model) or (None if is_stored else _refusal_of_weights(model)):
            return reason
        family = families.described(model)
        if family.head_size % _LANES:
            return f"its heads are {family.head_size} wide, not a multiple of {_LANES}"
        if len(family.views) > TABLES:
            return f"its layers see in {len(family.views)} ways, not in {TABLES} at most"
        return library.refusal()

    def new_cache(self) -> NativeCache:
        """An empty cache."""
        return NativeCache(self)

    def with_threads(self, num_threads: int) -> "NativeModel":
        """A model over the same weights whose passes have so many threads."""
        other = copy(self)
        other.num_threads = num_threads
        return other

    def reduced(self, ids: list[int]) -> "NativeModel":
        """A draft over the same weights that scores these tokens and those of its text (`backends.Reduces`), all others having
        probability 0. Raises `BackendError` for ids that it lacks, and where its output layer is a reduced one already."""
        if self.output_ids is not None or self.subset is not None:
            raise BackendError("this draft has a reduced vocabulary already. Load it without draft_vocabulary.")
        found = trimmed.checked(ids, vocab_size=self.vocab_size)
        other = copy(self)
        if found is not None:
            listed = bytearray(self.weights.num_ids)
            for token in found.tolist():
                listed[token] = 1
            other.listed, other.subset = bytes(listed), Subset(self.weights, found.tolist())
        return other

    def forward(
        self, parts: Sequence[tuple[NativeCache, list[int]]], *, rows: int
    ) -> tuple[Float[Tensor, "rows V"], Float[Tensor, "rows D"]]:
        """`Model.forward` in one pass: the bits of a sequence do not depend on the others, nor on where its text is cut."""
        if len(parts) == 1:  # in pieces that bound the memory of a pass
            ((cache, tokens),) = parts
            while len(tokens) > _WIDEST and len(tokens) > rows:
                unseen = min(_WIDEST, len(tokens) - rows)
                self._pass([(cache, tokens[:unseen])], 1)
                tokens = tokens[unseen:]
            parts = [(cache, tokens)]
        logits, hidden, _ = self._pass(parts, rows)
        for (cache, _), own in zip(parts, logits.split(rows), strict=True) if self.subset else ():
            if cache.text is not None and cache.is_reduced:
                for row, length in zip(own, range(cache.length - rows + 1, cache.length + 1), strict=True):
                    scored = torch.frombuffer(bytearray(self.listed or b""), dtype=torch.bool)[: self.vocab_size]
                    scored[cache.text.fork(length).ids] = True  # of the text up to there
                    row[~scored] = -torch.inf
        return logits, hidden

    def forward_seen(
        self, parts: Sequence[tuple[NativeCache, list[int]]], *, layer: int
    ) -> tuple[Float[Tensor, "B V"], list[Float[Tensor, "n D"]]]:
        """`forward` with rows=1: logits, and what a layer reads, for all n tokens of each cache."""
        logits, _, inputs = self._pass(parts, 1, layer)
        return logits, list(inputs.split([len(tokens) for _, tokens in parts]))

    def _pass(self, parts: Sequence[tuple[NativeCache, list[int]]], rows: int, seen: int = -1) -> tuple[Tensor, Tensor, Tensor]:
        weights, flat = self.weights, [token for _, tokens in parts for token in tokens]
        is_mixed = any(cache.model.weights is not weights or not tokens for cache, tokens in parts)
        if len(parts) > 1 and (is_mixed or len({id(cache) for cache, _ in parts}) < len(parts)):
            raise ValueError("a pass over several sequences needs a cache for each, all of one model, and a token for each")
        self.check_ids(flat)
        for cache, tokens in parts:
            cache.note(tokens)
        num = rows * len(parts)
        logits, states = torch.empty(num, self.vocab_size), torch.empty(num, self.hidden_size)
        inputs = torch.empty(len(flat) if seen >= 0 else 0, self.hidden_size)
        ends = [cache.held + len(tokens) for cache, tokens in parts]
        with _LOCK:
            weights.see_to(max(ends))
            given = [
                PassPart(cache.room_for(end), cache.held, len(tokens), rows, 0)
                for (cache, tokens), end in zip(parts, ends, strict=True)
            ]
            out = logits.data_ptr(), states.data_ptr(), seen, inputs.data_ptr()
            ids = (ctypes.c_int64 * len(flat))(*flat)
            weights.lib.native_pass(weights.handle, self.num_threads, (PassPart * len(given))(*given), len(given), ids, *out)
        for (cache, _), end in zip(parts, ends, strict=True):
            cache.held = end
        return logits, states, inputs

    def share_of(self, draft: Any) -> float:
        """Share of a draft's layers that are this model's first, which need not be computed again where both read."""
        if not isinstance(draft, NativeModel) or draft.weights is self.weights:
            return 0.0
        return self._common(draft) / len(draft.weights.family.layers)

    def _common(self, draft: "NativeModel") -> int:
        """How many first layers are a draft's too."""
        with _LOCK:
            return self.weights.common(draft.weights)

    def forward_both(self, cache: NativeCache, draft: NativeCache, tokens: list[int]) -> None:
        """Append tokens to a cache and to a draft's of the same length, with the bits that `forward` of each gives."""
        if draft.length != cache.length or draft.num_skipped or cache.num_skipped:
            raise ValueError(f"both caches must hold the same text, and they hold {cache.held} and {draft.held} tokens")
        both = (cache, draft)
        for one in both:
            one.model.check_ids(tokens)
        common = self._common(draft.model)
        for i in range(0, len(tokens), _WIDEST):
            num = len(piece := tokens[i : i + _WIDEST])
            draft.note(piece)
            start, end = cache.held, cache.held + num
            with _LOCK:
                given = []
                for one in both:
                    one.model.weights.see_to(end)
                    given += [one.model.weights.handle, one.model.num_threads, one.room_for(end)]
                self.weights.lib.native_extend_both(*given, (ctypes.c_int64 * num)(*piece), num, start, common)
            cache.held = draft.held = end

    def propose(self, caches: Sequence[NativeCache], tasks: Sequence[Drafting]) -> None:
        """Draw draft tokens of several requests. A cache then holds those that it has read: all but the last ones."""
        if self.subset is None:
            self._propose(caches, tasks, None)
            return
        for cache, task in zip(caches, tasks, strict=True):
            task.more = cache.own_rows() if task.limit else None
        for subset in (self.subset, None):
            some = [one for one in zip(caches, tasks, strict=True) if one[0].is_reduced == (subset is not None)]
            if some:
                self._propose([cache for cache, _ in some], [task for _, task in some], subset)

    def _propose(self, caches: Sequence[NativeCache], tasks: Sequence[Drafting], subset: Subset | None) -> None:
        """`propose` for requests that all have q over a subset and their own tokens, or (None) over all tokens."""
        nums = [task.num_unread + max(task.limit, task.most) for task in tasks]
        given = [task.num for task in tasks]
        self._run("native_propose", caches, tasks, nums, subset and subset.handle)
        for cache, task, num in zip(caches, tasks, given, strict=True):
            cache.held = task.start + min(task.read, task.num_unread)
            if cache.text is not None and (more := task.read - task.num_unread) > 0:
                cache.note((ctypes.c_int64 * (num + more)).from_address(task.tokens)[num:])
            cache.held = task.start + task.read

    def verify(self, caches: Sequence[NativeCache], tasks: Sequence[Verifying]) -> None:
        """Read tokens and draft tokens of several requests in one pass, and test them. A cache then holds all of its own."""
        self._run("native_verify", caches, tasks, [task.num_tokens for task in tasks])
        for cache, task in zip(caches, tasks, strict=True):
            cache.held = task.start + task.num_tokens

    def _run(self, name: str, caches: Sequence[NativeCache], tasks: Sequence[Any], nums: Sequence[int], *more: Any) -> None:
        """Call compiled code for tasks that read up to so many tokens of each cache."""
        weights = self.weights
        with _LOCK:
            for cache, task, num in zip(caches, tasks, nums, strict=True):
                task.seq, task.start = cache.room_for(cache.held + num), cache.held
                weights.see_to(cache.held + num)
            pointers = (ctypes.c_void_p * len(tasks))(*map(ctypes.addressof, tasks))
            getattr(weights.lib, name)(weights.handle, self.num_threads, pointers, len(tasks), *more)

    def check_ids(self, tokens: list[int]) -> None:
        """Raise ValueError for ids that the embedding does not have."""
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.weights.num_ids:
            raise ValueError(f"ids from {min(tokens)} to {max(tokens)}, but the embedding has {self.weights.num_ids} rows")

    def draw(self, p: Float[Tensor, " V"], u: float) -> int:
        """`sampling.inverted` in one call of compiled code."""
        if p.dtype != torch.float32 or not p.is_contiguous():
            return inverted(p, u)
        return self.weights.lib.native_draw(p.data_ptr(), len(p), u)


def _refusal_of_weights(model: Any) -> str | None:
    if reason := families.refusal_of_weights(model):
        return reason
    weight = next(model.parameters())
    dtype, device = weight.dtype, weight.device.type
    if dtype not in DTYPES or device != "cpu":
        return f"its weights are {str(dtype).removeprefix('torch.')} on {device}, not float32, bfloat16 or float16 on a CPU"
    return None
