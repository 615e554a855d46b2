"""Acceptance of a draft along the target's own answers, 1 - TV, by source and sampling; and the tokens that the target says."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specdecpp.backends import trimmed
from specdecpp.distillation.text import TextPiece
from specdecpp.sampling import Sampling, probabilities

SETTINGS: Mapping[str, Sampling] = {
    "greedy": Sampling(temperature=0.0),
    "0.7": Sampling(temperature=0.7),
    "0.7, top_p 0.9": Sampling(temperature=0.7, top_p=0.9),
    "1": Sampling(temperature=1.0),
}


@torch.inference_mode()
def by_source(
    target: Any,
    draft: Any,
    sources: Sequence[str],
    pieces: Sequence[TextPiece],
    *,
    settings: Mapping[str, Sampling] = SETTINGS,
) -> dict[str, dict[str, float]]:
    """Mean acceptance by source, and by how both are sampled. Models are of transformers, or backends."""
    found: dict[str, dict[str, list[torch.Tensor]]] = {}
    for source, piece in zip(sources, pieces, strict=True):
        p, q = _logits(target, piece), _logits(draft, piece)
        num = min(p.shape[-1], q.shape[-1])  # a small model may have other padding
        for name, sampling in settings.items():
            overlap = torch.minimum(probabilities(p[:, :num], sampling), probabilities(q[:, :num], sampling)).sum(-1)
            found.setdefault(source, {}).setdefault(name, []).append(overlap.cpu())
    return {source: {name: float(torch.cat(values).mean()) for name, values in by.items()} for source, by in found.items()}


def _logits(model: Any, piece: TextPiece) -> torch.Tensor:
    """Logits in the places of the answer [A, V]."""
    if hasattr(model, "new_cache"):
        return model.new_cache().extend(piece.ids[:-1].tolist(), rows=piece.num_answer)[0]
    num = int(model.config.vocab_size)
    logits = model(input_ids=piece.ids[None, :-1].to(model.device)).logits[0, piece.num_prompt - 1 :, :num].float()
    ids = trimmed.of(model.config, vocab_size=num, device=model.device)
    return logits if ids is None else trimmed.widened(logits[:, ids], ids, vocab_size=num)


def agreement(target: Any, draft: Any, pieces: Sequence[TextPiece]) -> float:
    """Mean acceptance at temperature 1, over all tokens: of an undecided target most of it is in the tail."""
    return by_source(target, draft, [""] * len(pieces), pieces, settings={"": SETTINGS["1"]})[""][""]


def sums(pieces: Sequence[TextPiece], vocab_size: int) -> torch.Tensor:
    """The target's probability of each token, summed over the tokens of a text [V]."""
    found = torch.zeros(vocab_size, dtype=torch.float64)
    for piece in pieces:
        found.index_add_(0, piece.top.flatten(), piece.log_p.exp().flatten().double())
    return found
