"""Answers of the target to prompts, drawn as it will be served, with what a draft learns of each token.

    prompts -> slots of a batch, one pass a step -> a token for each, the state at the cut, the top tokens -> pieces

On a CPU the compiled backend reads many sequences in a pass (`NativeModel.forward_seen`), and a slot takes the next prompt as
soon as its answer has ended; each answer has uniforms of its own and the bits of a row do not depend on the others, so an
answer is the same in whatever company it was written. Elsewhere transformers writes (`training.responses`) and reads again what
it wrote (`text.read`); there several shards are written together, always the same ones, since the bits of a row depend on
the others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from specdecpp.backends import NativeModel
from specdecpp.backends.native import NativeCache
from specdecpp.distillation.target import Target
from specdecpp.distillation.text import TOP, TextPiece, read
from specdecpp.sampling import Sampling, probabilities
from specdecpp.training.responses import sample_responses

SLOTS = 16
"""Answers that are written at once: wider passes of the compiled code are no cheaper by the row."""
WIDE, READ, TOGETHER = 256, 64, 8
"""Numbers for transformers on a GPU: answers that are written at once (a pass of 256 rows takes about as long as one of 64),
answers that are read at once, and shards of a group."""


def answered(
    target: Target,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    max_tokens: int,
    layer: int,
    seed: tuple[int, ...],
) -> list[TextPiece]:
    """One piece for each prompt (ids), with an answer of at most `max_tokens`. `layer` is the one whose input is the state.
    Answers depend on the prompts, the seed and each prompt's place."""
    backend, context = target.writer, target.writer.max_length
    if isinstance(backend, NativeModel):
        room = [max_tokens if context is None else min(max_tokens, context - len(prompt)) for prompt in prompts]
        slots = (_Slot(i, [*prompt], backend.new_cache(), _uniforms(seed, i), room[i]) for i, prompt in enumerate(prompts))
        return [piece for _, piece in sorted(_pieces(backend, slots, target.ends, sampling, layer), key=itemgetter(0))]
    generator = torch.Generator(device=backend.device).manual_seed(int(_uniforms(seed, 0).integers(2**62)))
    answers = sample_responses(
        backend,
        prompts,
        sampling=sampling,
        max_tokens=max_tokens,
        ends=target.ends,
        generator=generator,
        max_length=context,
        slots=WIDE,
    )
    parts = [slice(i, i + READ) for i in range(0, len(prompts), READ)]
    return [piece for at in parts for piece in read(backend.model, prompts[at], answers[at], layer=layer)]


@dataclass
class _Slot:
    """An answer that is being written: of each token the states of its pass, and the top tokens with their log p."""

    place: int
    ids: list[int]
    cache: NativeCache
    uniforms: np.random.Generator
    limit: int
    states: list[Tensor] = field(default_factory=list)
    top: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def piece(self) -> TextPiece:
        top, log_p = (torch.stack(column) for column in zip(*self.top, strict=True))
        num_prompt = len(self.ids) - len(self.top)
        return TextPiece(ids=torch.tensor(self.ids), num_prompt=num_prompt, state=torch.cat(self.states), top=top, log_p=log_p)


def _pieces(
    backend: NativeModel, waiting: Iterator[_Slot], ends: Sequence[int], sampling: Sampling, layer: int
) -> Iterator[tuple[int, TextPiece]]:
    """(place, piece) of each prompt, as the answers end."""
    slots = list[_Slot]()
    while slots := [*slots, *islice(waiting, SLOTS - len(slots))]:
        logits, states = backend.forward_seen([(slot.cache, slot.ids[slot.cache.length :]) for slot in slots], layer=layer)
        p = probabilities(logits, sampling)
        best = logits.topk(min(TOP, logits.shape[-1]), -1)
        log_p = best.values - logits.logsumexp(-1, keepdim=True)
        going = []
        for row, slot in enumerate(slots):
            slot.states.append(states[row].bfloat16())
            slot.top.append((best.indices[row], log_p[row]))
            slot.ids.append(backend.draw(p[row], slot.uniforms.random()))
            if slot.ids[-1] in ends or len(slot.top) == slot.limit:
                yield slot.place, slot.piece()
            else:
                going.append(slot)
        slots = going


def _uniforms(seed: tuple[int, ...], place: int) -> np.random.Generator:
    return np.random.default_rng([*seed, place])
