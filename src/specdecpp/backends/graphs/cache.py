"""One sequence at fixed addresses: keys and values of every layer, and the work that was recorded over them.

A CUDA graph repeats what was launched once, on the same addresses and shapes. A pass reads `span` positions of the cache, a
power of two, and hides those past its own; it has `WIDTHS` rows, of which the last are padding: real rows do not see them, and
the next pass overwrites what they write. Without a GPU the same work is called instead of replayed.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from specdecpp.backends.graphs.layers import FusedModel, Nodes
from specdecpp.backends.lean import Attend, LeanModel
from specdecpp.errors import BackendError

WIDTHS = (1, 2, 3, 5, 9, 17, 33)
"""Rows of a recorded pass; wider ones are not recorded."""
_ROOM = 256  # the shortest span
_WARM_UPS = 2  # libraries choose kernels and take memory in the first runs, which cannot be recorded
_MOST_PROGRAMS = 96


Program = Callable[[], None]


def bucket(num_rows: int) -> int:
    """The width that so many rows are padded to."""
    return next(width for width in WIDTHS if width >= num_rows)


def span_of(length: int) -> int:
    """Positions that a pass reads which ends at `length`: room for padding stays free at their end."""
    span = _ROOM
    while span < length + WIDTHS[-1]:
        span *= 2
    return span


def free_bytes(device: torch.device) -> int:
    """Memory of a GPU that nobody holds; none is counted elsewhere, where caches grow with their texts."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def sent(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """Numbers on their way to a device: nobody waits for what was queued there."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


class Cuda:
    """CUDA graphs of one device."""

    def __init__(self, device: torch.device):
        self._device = device

    def settle(self) -> None:
        """Wait for all that was queued."""
        torch.cuda.synchronize(self._device)

    def recorded(self, work: Program, reset: Callable[[], object], pool: object) -> tuple[Program, object]:
        """A graph's replay, and the memory that it shares with others: this pool or, for None, one of its own. Rehearsed on a
        stream of its own, as recording asks for, then recorded. Raises `BackendError`."""
        with torch.cuda.device(self._device):
            now, aside = torch.cuda.current_stream(), torch.cuda.Stream()
            aside.wait_stream(now)
            with torch.cuda.stream(aside):
                _rehearse(work, reset)
            now.wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # pyright: ignore[reportArgumentType]
                    work()
            except RuntimeError as error:
                raise BackendError(f"a pass cannot be recorded as a CUDA graph ({error}). Use LeanModel.") from error
            return graph.replay, graph.pool()


def graphs_of(device: torch.device) -> Cuda | None:
    """Who records on this device; None where work is called instead."""
    return Cuda(device) if device.type == "cuda" else None


def _rehearse(work: Program, reset: Callable[[], object]) -> None:
    for _ in range(_WARM_UPS):
        reset()
        work()
    reset()


class RecordedPasses:
    """Programs that were recorded over the inputs and outputs of a model's passes, of `num` sequences at most."""

    def __init__(self, body: LeanModel, num: int = 1):
        self.body, self.device = body, body.device
        self.record: Any = None  # `steps.DeviceRecord`, or its `Records`, made by the first step
        self.launches: dict[int, Any] = {}  # `launches.RowKernels`, likewise
        self.recording_s = 0.0  # seconds of recording so far
        like = body._embedding
        self.hidden = like.new_zeros(num * WIDTHS[-1], body.hidden_size)
        self.logits = like.new_zeros(num * WIDTHS[-1], body.vocab_size)
        self.ends: dict[tuple[int, ...], Tensor] = {}  # ids that end a text, where recorded work reads them
        self._tables: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._programs: dict[Hashable, Program] = {}
        self._pool: object = None  # the memory that their graphs share
        self.graphs = graphs_of(self.device)  # None where programs are called

    def tables(self, span: int) -> list[tuple[Tensor, Tensor]]:
        """The angles of a span. They are kept: what was recorded reads them where they are."""
        if span not in self._tables:
            self._tables[span] = [angles.at(0, span) for angles in self.body._angles]
        return self._tables[span]

    def attending(self, x: Float[Tensor, "n D"], start: Int[Tensor, " slots"], span: int, nodes: Nodes | None = None) -> Attend:
        """Attention of rows from `start`, whose keys and values it puts into the cache, by operations of torch."""
        raise NotImplementedError

    def _read(self, tokens: Tensor, start: Tensor, span: int, *where: Any, nodes: Nodes | None = None) -> None:
        """Put tokens through all layers at start, start + 1, ... of each slot, and through the output layer. `where` are keys,
        values and places, as in `FusedModel.read_static`."""
        body, hidden, logits = self.body, self.hidden[: len(tokens)], self.logits[: len(tokens)]
        if isinstance(body, FusedModel):
            body.read_static(tokens, start, span, self.tables(span), hidden, *where, nodes=nodes)
            if body.output_ids is None:
                body.logits(hidden, logits)
                return
        else:
            x = F.embedding(tokens, body._embedding)
            hidden.copy_(body._norm(body._through(x, self.attending(x, start, span, nodes))))
        logits.copy_(body._score(hidden))

    def program(self, key: Hashable, work: Program, *, reset: Callable[[], object]) -> Program:
        """The program of this key, made now if it is new: work on fixed tensors, recorded once and replayed on a GPU, called as
        it is elsewhere. `reset` puts its inputs where a rehearsal leaves no trace. The one used longest ago makes room."""
        program = self._programs.pop(key, None)
        if program is None:
            if len(self._programs) >= _MOST_PROGRAMS:
                self._settle()
                del self._programs[next(iter(self._programs))]
            began = perf_counter()
            if self.graphs is None:
                _rehearse(work, reset)
                program = work
            else:
                pool = self._pool if self._programs else None  # it dies with its last graph
                program, self._pool = self.graphs.recorded(work, reset, pool)
            self._settle()
            self.recording_s += perf_counter() - began
        self._programs[key] = program
        return program

    def forget(self) -> None:
        """Drop what was recorded: its addresses are no longer those of the cache."""
        self._settle()
        self._programs.clear()

    def _settle(self) -> None:
        """A graph must not go while it runs, and its rehearsals are over when recording is."""
        if self.graphs is not None:
            self.graphs.settle()


class StaticCache(RecordedPasses):
    """Keys and values [kv heads, capacity, head size] of every layer, and the programs that were recorded over them. Where a
    pass starts is an argument on the device; the length of the text is its `GraphCache`'s."""

    def __init__(self, body: LeanModel):
        super().__init__(body)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.offers: dict[Hashable, Any] = {}  # `trees.Offers`
        self._places: tuple[int, Tensor] | None = None
        sheet = self.sheet = torch.zeros(2 + 3 * WIDTHS[-1], dtype=torch.long, device=self.device)
        self.inputs, nodes = sheet[: 1 + WIDTHS[-1]], sheet[1 + WIDTHS[-1] :]  # where it starts, then tokens
        self.nodes = nodes[:1], nodes[1 : 1 + WIDTHS[-1]], nodes[1 + WIDTHS[-1] :]  # see `GraphCache.read_nodes`

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[1] if self.keys else 0

    def attending(self, x: Float[Tensor, "W D"], start: Int[Tensor, " 1"], span: int, nodes: Nodes | None = None) -> Attend:
        cells = torch.arange(span, device=self.device)
        places = positions = start + cells[: len(x)]
        ahead = cells - places.unsqueeze(1)
        is_later = ahead > 0
        if nodes is not None:
            text, positions, masks = nodes
            own = cells - text
            is_later = (own >= 0) & ((masks.unsqueeze(1) >> own.clamp(0, 62)) & 1 == 0)
        seen = []
        for view, tables in zip(self.body.family.views, self.tables(span), strict=True):
            is_hidden = is_later if view.window is None else is_later | (ahead <= -view.window)
            mask = x.new_zeros(is_hidden.shape).masked_fill_(is_hidden, -torch.inf)
            seen.append((*(table.index_select(0, positions) for table in tables), mask))
        return self.body._attending(seen, partial(self._put, places, span))

    def places(self, anchor: Tensor) -> Int[Tensor, "layers 3"]:
        """Where keys and values of each layer lie, counted in elements from another tensor, and the capacity."""
        if self._places is None or self._places[0] != self.capacity:  # a cache moves only when it grows
            both, size = zip(self.keys, self.values, strict=True), anchor.element_size()
            lie = [[*((of.data_ptr() - anchor.data_ptr()) // size for of in layer), self.capacity] for layer in both]
            self._places = self.capacity, torch.tensor(lie, device=self.device)
        return self._places[1]

    def _put(self, positions: Tensor, span: int, i: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Rows into the cache of layer i; the span of it."""
        self.keys[i].index_copy_(1, positions, k)
        self.values[i].index_copy_(1, positions, v)
        return self.keys[i][:, :span], self.values[i][:, :span]

    def pass_over(self, width: int, span: int, *, is_tree: bool = False) -> Program:
        """Reads `inputs`, with `is_tree` also `nodes`; fills `hidden` and `logits`."""
        behind = span - WIDTHS[-1]  # every text that ends in this span
        if not is_tree:
            work = partial(self._pass, width, span)
            return self.program(("pass", width, span), work, reset=lambda: self.inputs[:1].fill_(behind))
        (text, positions, masks), rest = self.nodes, torch.zeros_like(self.sheet)
        rest[:1] = rest[len(self.inputs)] = behind
        work = partial(self._pass, width, span, (text, positions[:width], masks[:width]))
        return self.program(("tree", width, span), work, reset=lambda: self.sheet.copy_(rest))

    def _pass(self, width: int, span: int, nodes: Nodes | None = None) -> None:
        self._read(self.inputs[1 : 1 + width], self.inputs[:1], span, self.keys, self.values, nodes=nodes)
