"""Answers sampled from a target in batches: left-padded prompts, one cache; rows that have ended leave the batch or make room.

The distribution of each answer is that of decoding with the target alone under the same `Sampling`; what differs from one
request at a time is the rounding, since padding changes the order of sums. Works for every causal LM that `EagerModel` takes.
"""

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from specdecpp.backends import EagerModel
from specdecpp.sampling import Sampling, probabilities

_STILL_FULL = 0.75


class RoomyLayer(DynamicLayer):
    """A cache layer that writes into room it made before; a plain one copies everything it holds at every token."""

    ROOM = 128
    keys: Tensor
    values: Tensor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = self._keys = key_states[:, :, :0]
        self.values = self._values = value_states[:, :, :0]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held = self.keys.shape[2]
        end = held + key_states.shape[2]
        if end > self._keys.shape[2]:
            self._keys, self._values = (self._with_room(states, end) for states in (self.keys, self.values))
        self._keys[:, :, held:end], self._values[:, :, held:end] = key_states, value_states
        self.keys, self.values = self._keys[:, :, :end], self._values[:, :, :end]
        return self.keys, self.values

    def _with_room(self, held: Tensor, end: int) -> Tensor:
        room = held.new_empty((*held.shape[:2], end + self.ROOM, held.shape[3]))
        room[:, :, : held.shape[2]] = held
        return room

    def batch_select_indices(self, indices: Tensor) -> None:
        held = self.keys.shape[2]
        self._keys, self._values = self._keys[indices], self._values[indices]
        self.keys, self.values = self._keys[:, :, :held], self._values[:, :, :held]

    def join(self, other: "RoomyLayer", width: int) -> None:
        """Rows of another layer below its own, the last `width` positions of each, with zeros before where there are fewer."""
        self._keys, self._values = (
            self._with_room(torch.cat([F.pad(states, (0, 0, width - states.shape[2], 0)) for states in both]), width)
            for both in ((self.keys, other.keys), (self.values, other.values))
        )
        self.keys, self.values = self._keys[:, :, :width], self._values[:, :, :width]


def roomy_cache() -> Cache:
    """An empty cache of roomy layers, which keeps every position as the cache of `EagerModel` does."""
    return Cache(layer_class_to_replicate=RoomyLayer)


def draw(p: Float[Tensor, "M V"], num: int, generator: torch.Generator) -> Int[Tensor, "M num"]:
    """`num` independent tokens from each row, by inverting its running sum; a token of probability 0 is never drawn."""
    wide = torch.float32 if p.device.type == "mps" else torch.float64  # MPS has no float64
    cdf = p.cumsum(-1, dtype=wide)
    u = torch.rand(len(p), num, generator=generator, device=p.device, dtype=wide) * cdf[:, -1:]
    return torch.searchsorted(cdf, u, right=True).clamp(max=p.shape[-1] - 1)


def seen_by(prompts: Sequence[Sequence[int]], *, vocab_size: int, device: torch.device) -> Bool[Tensor, "B V"]:
    """Which tokens each prompt contains, for the repetition penalty."""
    seen = torch.zeros(len(prompts), vocab_size, dtype=torch.bool, device=device)
    for row, prompt in zip(seen, prompts, strict=True):
        row[list(prompt)] = True
    return seen


class _Batch:
    """Answers that are being written: the rows of one cache, each at its right end, with what was not read yet."""

    def __init__(self, backend: EagerModel, prompts: Sequence[Sequence[int]], sampling: Sampling, *, width: int = 1):
        """`width`: the fewest columns of what is read first."""
        self._backend, self._sampling, self._cache = backend, sampling, roomy_cache()
        device, width = backend.device, max(width, *map(len, prompts))
        self._ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
        self._mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        self._seen = seen_by(prompts, vocab_size=backend.vocab_size, device=device) if sampling.needs_seen else None
        self._takes = inspect.signature(backend.model.forward).parameters

    def read(self, num: int) -> Float[Tensor, "B V"]:
        """Put the first `num` columns of what was not read into the cache; the logits of the last."""
        ids, self._ids = self._ids[:, :num], self._ids[:, num:]
        mask = self._mask[:, : self._mask.shape[1] - self._ids.shape[1]]
        known: dict[str, Any] = {"logits_to_keep": 1, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]}
        more = {name: value for name, value in known.items() if name in self._takes}
        return self._backend.offline_pass(input_ids=ids, attention_mask=mask, cache=self._cache, **more)[0][:, -1]

    def step(self, generator: torch.Generator) -> list[int]:
        """The next token of each row."""
        p = probabilities(self.read(self._ids.shape[1]), self._sampling, self._seen)
        self._ids = p.argmax(-1, keepdim=True) if self._sampling.is_greedy else draw(p, 1, generator)
        self._mask = torch.cat([self._mask, torch.ones_like(self._ids)], -1)
        if self._seen is not None:
            self._seen.scatter_(1, self._ids, True)
        return self._ids[:, 0].tolist()

    def keep(self, rows: list[int]) -> None:
        kept = torch.tensor(rows, device=self._backend.device)
        self._cache.batch_select_indices(kept)
        self._ids, self._mask = self._ids[kept], self._mask[kept]
        self._seen = None if self._seen is None else self._seen[kept]

    def joined(self, other: "_Batch") -> "_Batch":
        """With the rows of another batch, of which one column is left to be read as here; columns of no text go."""
        other.read(other._ids.shape[1] - 1)
        width = max(int(batch._mask.sum(-1).max()) for batch in (self, other))
        for own, more in zip(self._cache.layers, other._cache.layers, strict=True):
            assert isinstance(own, RoomyLayer), "the cache is `roomy_cache`'s"
            assert isinstance(more, RoomyLayer), "and so is the other"
            own.join(more, width - 1)
        self._ids = torch.cat([self._ids, other._ids])
        self._mask = torch.cat([F.pad(batch._mask, (width - batch._mask.shape[1], 0)) for batch in (self, other)])
        if self._seen is not None and other._seen is not None:
            self._seen = torch.cat([self._seen, other._seen])
        return self


@torch.inference_mode()
def sample_responses(
    backend: EagerModel,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Sampling,
    max_tokens: int,
    ends: Collection[int],
    generator: torch.Generator,
    max_length: int | None = None,
    slots: int | None = None,
    tick: Callable[[int], None] = lambda num_tokens: None,
) -> list[list[int]]:
    """One answer (ids, the ending id included) to each prompt (ids, not empty), in one batch.

    An answer ends with an id of `ends`, after `max_tokens`, or where prompt and answer fill `max_length`, by default the
    backend's. At most `slots` are written at once, by default all; as answers end, the next prompts take their places. Which
    answers keep each other company depends on the arguments only. `tick` is told of new tokens as they come. Raises ValueError
    for a prompt that leaves no room for an answer.
    """
    longest, context = max(map(len, prompts)), max_length or backend.max_length
    limits = [max_tokens if context is None else min(max_tokens, context - len(p)) for p in prompts]
    if min(limits) < 1:
        raise ValueError(f"a prompt of {longest} tokens leaves no room for an answer in a context of {context}; leave it out")
    answers: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))[:slots]
    full, waiting = len(rows), list(range(len(rows), len(prompts)))
    batch = _Batch(backend, [prompts[row] for row in rows], sampling)
    while True:
        is_open, before = [], sum(map(len, answers))
        for row, token in zip(rows, batch.step(generator), strict=True):
            if still := not _has_ended(answers[row], limits[row], ends):
                answers[row].append(token)
            is_open.append(still and not _has_ended(answers[row], limits[row], ends))
        tick(sum(map(len, answers)) - before)
        if not any(is_open) and not waiting:
            return answers
        if sum(is_open) >= _STILL_FULL * (full if waiting else len(rows)):  # not at every end: each change copies the cache
            continue
        kept = [i for i, still in enumerate(is_open) if still]
        rows, next_rows = [rows[i] for i in kept], waiting[: full - len(kept)]
        waiting = waiting[len(next_rows) :]
        if rows:
            batch.keep(kept)
        if next_rows:
            following = _Batch(backend, [prompts[row] for row in next_rows], sampling, width=2 if rows else 1)
            batch = batch.joined(following) if rows else following
        rows += next_rows


def _has_ended(answer: Sequence[int], limit: int, ends: Collection[int]) -> bool:
    return len(answer) >= limit or (bool(answer) and answer[-1] in ends)
