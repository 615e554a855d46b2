"""The layers of a small model that may go: those without which least acceptance is lost.

    a first text of the target -> acceptance without each layer -> the cheapest layer goes -> again without the next cheapest

Each choice tries the few layers that were cheapest by themselves. What is lost comes back by training.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specdecpp.distillation import network, training
from specdecpp.distillation.text import TextPiece

TOKENS, TRIED, ROWS = 1000, 4, 256
"""Tokens of answers that count, layers that a choice tries, and rows of logits at once."""
Tell = Callable[[str], None]


@torch.inference_mode()
def kept(
    model: Any, pieces: Sequence[TextPiece], least: int, *, tell: Tell = lambda line: None
) -> dict[int, tuple[list[int], float]]:
    """For each number of layers, from all of them down to `least`: indices of the layers to keep, and the acceptance with these
    alone, along the target's text and before training."""
    some, count = list[TextPiece](), 0
    for piece in pieces:
        if count < TOKENS:
            some.append(piece)
            count += piece.num_answer
    left = list(range(len(model.model.layers)))
    by_number = {len(left): ([*left], accepted_with(model, left, some))}
    alone = dict[int, float]()
    while len(left) > least:
        tried = sorted(left, key=lambda i: -alone[i])[:TRIED] if alone else left
        found = {i: accepted_with(model, [j for j in left if j != i], some) for i in tried}
        alone = alone or found
        gone = max(found, key=found.__getitem__)
        left.remove(gone)
        by_number[len(left)] = [*left], found[gone]
        tell(f"choosing layers: {len(left)} left, acceptance {found[gone]:.2f} before training")
    return by_number


def accepted_with(model: Any, layers: Sequence[int], pieces: Sequence[TextPiece]) -> float:
    """Mean of sum min(p, q) over the target's top tokens, of the model with these of its layers."""
    part, weight = network.of_layers(model, layers, shares=True), model.lm_head.weight
    rows = torch.arange(len(weight), device=weight.device)
    found = list[Tensor]()
    for piece in pieces:
        states, (p, row) = training.hidden(part, [piece], is_whole=True), training.targets([piece], rows)
        for at in range(0, len(states), ROWS):
            logits = (states[at : at + ROWS].to(weight.dtype) @ weight.T).float()
            found.append(training.overlap(logits, p[at : at + ROWS], row[at : at + ROWS]))
    return float(torch.cat(found).mean())
