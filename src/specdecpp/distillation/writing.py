"""The target writes: answers to prompts as it will be asked for them, with what a draft learns of each token, as they come.

    prompts -> slots of a batch, one pass a step -> a token for each, the state at the cut, the likeliest tokens -> pieces

On a CPU the compiled backend reads many sequences in a pass (`NativeModel.forward_seen`), and a slot takes the next prompt as
soon as its answer has ended; each answer has uniforms of its own and the bits of a row do not depend on the others, so an
answer is the same in whatever company it was written. Elsewhere transformers writes (`training.responses`) and reads again what
it wrote (`text.read`); there several shards are written together, always the same ones, since the bits of a row depend on
the others. `WrittenTexts` makes whole shards, here or on a worker of Ray (`training.workers`).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdecpp.backends import EagerModel, NativeModel
from specdecpp.backends.native import NativeCache
from specdecpp.distillation.plan import SHARD, DistilPlan
from specdecpp.distillation.target import Target
from specdecpp.distillation.text import TOP, TextPiece, encoded, read
from specdecpp.errors import PairError
from specdecpp.sampling import Sampling, probabilities
from specdecpp.training.responses import sample_responses

SLOTS = 16
"""Answers that are written at once: wider passes of the compiled code are no cheaper by the row."""
WIDE, TOGETHER = 256, 8
"""The same for transformers on a GPU, where a pass of 256 rows takes about as long as one of 64; and shards of a group."""


@dataclass(frozen=True, kw_only=True)
class Writer:
    """Who writes and how. `layer` is the one whose input is the state that is kept; `context` the most tokens of a text."""

    backend: NativeModel | EagerModel
    sampling: Sampling
    max_tokens: int
    ends: Collection[int]
    layer: int
    context: int | None = None

    def pieces(self, prompts: Sequence[Sequence[int]], *, seed: tuple[int, ...]) -> list[TextPiece]:
        """One for each prompt (ids). The answers depend on the prompts, the seed and each prompt's place."""
        if isinstance(self.backend, NativeModel) and not self.sampling.needs_seen:
            found = dict(self._written(self.backend, prompts, seed))
            return [found[i] for i in range(len(prompts))]
        backend: Any = self.backend
        generator = torch.Generator(device=backend.device).manual_seed(int(_uniforms(seed, 0).integers(2**62)))
        answers = sample_responses(
            backend,
            prompts,
            sampling=self.sampling,
            max_tokens=self.max_tokens,
            ends=self.ends,
            generator=generator,
            max_length=self.context,
            slots=WIDE,
        )
        parts = [slice(i, i + SHARD) for i in range(0, len(prompts), SHARD)]
        return [piece for at in parts for piece in read(backend.model, prompts[at], answers[at], layer=self.layer)]

    def _written(
        self, backend: NativeModel, prompts: Sequence[Sequence[int]], seed: tuple[int, ...]
    ) -> Iterator[tuple[int, TextPiece]]:
        waiting = iter(range(len(prompts)))
        slots: list[_Slot] = []
        while True:
            more = islice(waiting, SLOTS - len(slots))
            slots += [
                _Slot(i, list(prompts[i]), backend.new_cache(), _uniforms(seed, i), self._limit(prompts[i])) for i in more
            ]
            if not slots:
                return
            unread = [(slot.cache, slot.ids[slot.cache.length :]) for slot in slots]
            logits, states = backend.forward_seen(unread, layer=self.layer)
            p = probabilities(logits, self.sampling)
            best = logits.topk(min(TOP, logits.shape[-1]), -1)
            log_p = best.values - logits.logsumexp(-1, keepdim=True)
            for row, slot in enumerate(slots):
                slot.states.append(states[row].bfloat16())
                slot.said.append((best.indices[row], log_p[row]))
                slot.ids.append(backend.draw(p[row], slot.uniforms.random()))
            for slot in slots:
                if slot.ids[-1] in self.ends or slot.num_answer == slot.limit:
                    yield slot.place, slot.piece()
            slots = [slot for slot in slots if not (slot.ids[-1] in self.ends or slot.num_answer == slot.limit)]

    def _limit(self, prompt: Sequence[int]) -> int:
        return self.max_tokens if self.context is None else min(self.max_tokens, self.context - len(prompt))


@dataclass
class _Slot:
    """An answer that is being written."""

    place: int
    ids: list[int]
    cache: NativeCache
    uniforms: np.random.Generator
    limit: int
    states: list[Tensor] = field(default_factory=list)
    said: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def num_answer(self) -> int:
        return len(self.said)

    def piece(self) -> TextPiece:
        top, log_p = (torch.stack(column) for column in zip(*self.said, strict=True))
        state = torch.cat(self.states)
        return TextPiece(
            ids=torch.tensor(self.ids), num_prompt=len(self.ids) - self.num_answer, state=state, top=top, log_p=log_p
        )


def _uniforms(seed: tuple[int, ...], place: int) -> np.random.Generator:
    return np.random.default_rng([*seed, place])


def writer_of(plan: DistilPlan, target: Target, layer: int) -> Writer:
    return Writer(
        backend=target.writer,
        sampling=plan.sampling,
        max_tokens=plan.max_tokens,
        ends=target.ends,
        layer=layer,
        context=target.context,
    )


@dataclass(frozen=True, kw_only=True)
class WrittenTexts:
    """Makes the shards of a distillation's text. Raises `PairError` where the target is not the one that it was begun with."""

    plan: DistilPlan
    layer: int
    fingerprint: str | None

    @classmethod
    def of(cls, plan: DistilPlan, target: Target, layer: int) -> "WrittenTexts":
        path = Path(plan.target)  # a worker may be in another folder
        plan = replace(plan, target=str(path.resolve()) if path.exists() else plan.target)
        return cls(plan=plan, layer=layer, fingerprint=target.source.fingerprint)

    @property
    def device(self) -> str | None:
        return self.plan.device

    @staticmethod
    def together(target: Target) -> int:
        """Shards of a group."""
        return 1 if isinstance(target.writer, NativeModel) else TOGETHER

    def __call__(self, index: int, items: Sequence[Sequence[Sequence[int]]]) -> tuple[list[bytes], int]:
        """In a worker: (the files of a group of shards, how many tokens were written), from the prompts (ids) of each."""
        target = _target(self.plan.target, self.plan.device)
        if target.source.fingerprint != self.fingerprint:
            raise PairError(
                f"a worker loaded {self.plan.target} and it is another model than the one this distillation was begun with. "
                "Give the workers the same files."
            )
        return self.made(target, index, items)

    def made(self, target: Target, index: int, shards: Sequence[Sequence[Sequence[int]]]) -> tuple[list[bytes], int]:
        """Write the shards with a target that is loaded."""
        prompts = [prompt for shard in shards for prompt in sorted(shard, key=len)]
        pieces = iter(writer_of(self.plan, target, self.layer).pieces(prompts, seed=(self.plan.seed, 1, index)))
        made = [list(islice(pieces, len(shard))) for shard in shards]
        return [encoded(shard) for shard in made], sum(piece.num_answer for shard in made for piece in shard)


@cache
def _target(name: str, device: str | None) -> Target:
    """The target of this process."""
    return Target(name, device)
