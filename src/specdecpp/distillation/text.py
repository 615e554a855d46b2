"""The target's own text: the pieces that a draft learns from, computed once, and a file for each shard of them.

A file holds, for every position of prompt and answer, the state that the draft's own layers read; and for every token of an
answer the top `TOP` tokens in its place with their log probabilities at temperature 1. A shard is made from its number and the
seed alone, so that it does not matter when.

Shapes: T tokens of prompt and answer, A tokens of the answer, D hidden.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from specdecpp import cache_dir
from specdecpp.distillation.network import caught
from specdecpp.errors import DataError, first_line
from specdecpp.training.labels import padded

TOP = 64
_CRC = "crc32"


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
