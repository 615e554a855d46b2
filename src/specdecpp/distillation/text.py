"""The target's own text: answers that it writes as it will be served, with what a draft learns of each token, in shards.

    prompts -> slots of a batch, one pass a step -> a token for each, the state at the cut, the top tokens -> pieces

On a CPU the compiled backend reads many sequences in a pass (`NativeModel.forward_seen`), and a slot takes the next prompt as
soon as its answer has ended; each answer has uniforms of its own and the bits of a row do not depend on the others, so an
answer is the same in whatever company it was written. Elsewhere transformers writes (`training.responses`) and reads again what
it wrote (`read`); several shards are written together then, always the same, since the bits of a row depend on the others.

A shard's file holds, for every position of prompt and answer, the state that the draft's own layers read; and for every token
of an answer the top `TOP` tokens in its place with their log probabilities at temperature 1.

Shapes: T tokens of prompt and answer, A tokens of the answer, D hidden.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from specdecpp import cache_dir
from specdecpp.backends import NativeModel
from specdecpp.backends.native import NativeCache
from specdecpp.distillation.network import caught
from specdecpp.distillation.target import Target
from specdecpp.errors import DataError, first_line
from specdecpp.sampling import Sampling, probabilities
from specdecpp.training.labels import padded
from specdecpp.training.responses import sample_responses

TOP = 64
_CRC = "crc32"
SLOTS = 16
"""Answers that are written at once: wider passes of the compiled code are no cheaper by the row."""
WIDE, READ, TOGETHER = 256, 64, 8
"""Numbers for transformers on a GPU: answers that are written at once (a pass of 256 rows takes about as long as one of 64),
answers that are read at once, and shards of a group."""


@dataclass(frozen=True, kw_only=True)
class TextPiece:
    """One prompt with its answer."""

    ids: Int[Tensor, " T"]
    num_prompt: int
    state: Float[Tensor, "T-1 D"]
    """Input of the first own layer; nothing is learned from that of the last token."""
    top: Int[Tensor, "A TOP"]
    """The target's top tokens in the place of each token of the answer."""
    log_p: Float[Tensor, "A TOP"]

    @property
    def num_answer(self) -> int:
        return len(self.ids) - self.num_prompt


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


@torch.inference_mode()
def read(model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], *, layer: int) -> list[TextPiece]:
    """Pieces of some answers, by one pass of the target over all of them. `layer` is the one whose input is the state."""
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    with caught(model.model.layers[layer]) as states:
        hidden = model.model(**padded(texts, model.device), use_cache=False).last_hidden_state
    pieces = []
    for row, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        state = states[0][row, : len(text) - 1].bfloat16().cpu()
        log_p = model.lm_head(hidden[row, len(prompt) - 1 : len(text) - 1]).float().log_softmax(-1)
        log_p, top = log_p.topk(min(TOP, log_p.shape[-1]), -1)
        pieces.append(TextPiece(ids=torch.tensor(text), num_prompt=len(prompt), state=state, top=top.cpu(), log_p=log_p.cpu()))
    return pieces


def write(path: Path, pieces: Sequence[TextPiece]) -> None:
    """Write the file of a shard, whole or not at all."""
    tensors = {
        "ids": torch.cat([p.ids for p in pieces]).int(),
        "lengths": torch.tensor([[p.num_prompt, len(p.ids)] for p in pieces], dtype=torch.int32),
        "state": torch.cat([p.state for p in pieces]).bfloat16(),
        "top": torch.cat([p.top for p in pieces]).int(),
        "log_p": torch.cat([p.log_p for p in pieces]).half(),
    }
    cache_dir.write(path, save(tensors, {_CRC: str(_checksum(tensors))}))


def pieces(path: Path) -> Iterator[TextPiece]:
    """Pieces of one shard. Raises `DataError` for a damaged file."""
    try:
        with safe_open(path, "pt") as file:
            whole = {name: file.get_tensor(name) for name in ("ids", "lengths", "state", "top", "log_p")}
            if (file.metadata() or {}).get(_CRC) != str(_checksum(whole)):
                raise ValueError("its values are not those that were written")
    except (SafetensorError, OSError, ValueError) as error:
        raise DataError(
            f"{path} is damaged ({first_line(error)}). Delete it and run the same command again: it makes this shard "
            "anew and keeps the others."
        ) from error
    prompts, lengths = whole["lengths"].T.tolist()
    answers = [length - prompt for prompt, length in zip(prompts, lengths, strict=True)]
    parts = (
        whole["ids"].long().split(lengths),
        whole["state"].split([length - 1 for length in lengths]),
        whole["top"].long().split(answers),
        whole["log_p"].float().split(answers),
    )
    for num_prompt, ids, state, top, log_p in zip(prompts, *parts, strict=True):
        yield TextPiece(ids=ids, num_prompt=num_prompt, state=state, top=top, log_p=log_p)


def _checksum(tensors: Mapping[str, Tensor]) -> int:
    found = 0
    for name in sorted(tensors):
        found = zlib.crc32(tensors[name].contiguous().view(torch.uint8).numpy().data, found)
    return found
