"""How often a target would accept what a draft proposes, along the target's own answers: 1 - TV, by source and temperature."""

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
    """Mean acceptance by source, and by how both are sampled."""
    found: dict[str, dict[str, list[torch.Tensor]]] = {}
    num = min(int(model.config.vocab_size) for model in (target, draft))  # of a small model the padding may be another
    ids = trimmed.of(draft.config, vocab_size=num, device=target.device)
    for source, piece in zip(sources, pieces, strict=True):
        given = piece.ids[None, :-1].to(target.device)
        p, q = (model(input_ids=given).logits[0, piece.num_prompt - 1 :, :num].float() for model in (target, draft))
        if ids is not None:
            q = trimmed.widened(q[:, ids], ids, vocab_size=num)
        for name, sampling in settings.items():
            overlap = torch.minimum(probabilities(p, sampling), probabilities(q, sampling)).sum(-1)
            found.setdefault(source, {}).setdefault(name, []).append(overlap.cpu())
    return {
        source: {name: round(float(torch.cat(values).mean()), 4) for name, values in of.items()} for source, of in found.items()
    }
