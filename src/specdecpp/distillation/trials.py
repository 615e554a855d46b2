"""The layers of a small model to keep: for each number those that acceptance needs most, the number by predicted tokens/s.

    a first text of the target -> acceptance without each layer -> the cheapest layer goes -> again without the next cheapest
    a few shards of the text -> each number of layers: trained on all of them but one, measured along that one
    -> written as it will be, a draft step timed -> acceptance after the whole training, expected -> tokens/s -> the best

What a doubling of the text adds shrinks as training goes on: from the gain of the trial's last doubling on, each is expected to
bring `DECAY` of the one before it. That is an assumption, the same for all numbers of layers.
"""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdecpp.backends import Model, Reduces
from specdecpp.costs import Costs
from specdecpp.distillation import network, shapes, text, training
from specdecpp.distillation.target import Target
from specdecpp.distillation.text import TextPiece
from specdecpp.distillation.training import Course, Trainer
from specdecpp.loading import gguf_writing, vocabulary

SHARDS = 3
"""Shards of text that a trial reads, the last of them to measure."""
DECAY = 0.75
DEPTHS = (1.0, 0.84, 0.67, 0.5)
"""Numbers of layers that are tried, as shares of all of them."""
TOKENS, TRIED, ROWS = 1000, 4, 256
"""Tokens of answers that count where a layer is chosen, layers that a choice tries (those that were cheapest by themselves),
and rows of logits at once."""
Tell = Callable[[str], None]


def depths(num: int) -> list[int]:
    """Numbers of layers to try of a model of so many, the most first."""
    return sorted({max(1, round(share * num)) for share in DEPTHS}, reverse=True)


@torch.inference_mode()
def kept(model: Any, pieces: Sequence[TextPiece], least: int, *, tell: Tell = lambda line: None) -> dict[int, list[int]]:
    """Indices of the layers to keep, for each number of them from all down to `least`: those without which least acceptance
    along the target's text is lost before training."""
    some, count = list[TextPiece](), 0
    for piece in pieces:
        if count < TOKENS:
            some.append(piece)
            count += piece.num_answer
    left = list(range(len(model.model.layers)))
    by_number, alone = {len(left): [*left]}, dict[int, float]()
    while len(left) > least:
        tried = sorted(left, key=lambda i: -alone[i])[:TRIED] if alone else left
        found = {i: accepted_with(model, [j for j in left if j != i], some) for i in tried}
        alone = alone or found
        gone = max(found, key=found.__getitem__)
        left.remove(gone)
        by_number[len(left)] = [*left]
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


@dataclass(frozen=True, kw_only=True)
class Trials:
    """Trials of numbers of a small model's layers. `paths` are the shards that they read, the last of them to measure; `rows`
    the places of tokens among those that are trained (`Trainer`); `passes` seconds of the target's by their rows; `num_tokens`
    those of the whole training, epochs included."""

    target: Target
    small: Target
    paths: Sequence[Path]
    course: Course
    rows: torch.Tensor
    passes: Mapping[int, float]
    num_tokens: int
    temperature: float
    tell: Tell

    def run(self, candidates: Sequence[list[int]]) -> list[dict[str, Any]]:
        """Predictions for drafts of these layers, the best first.

        Facts of each: `layers`; `accepted` without training, `trained` after the trial, `expected` after all of it; `step_s`,
        seconds of a draft token; `speed_up` over the target alone at the best `length`.
        """
        return sorted(map(self._of, candidates), key=lambda each: -each["speed_up"])

    def _of(self, layers: list[int]) -> dict[str, Any]:
        """Train a draft of these layers, and time it."""
        shards = [list(text.pieces(path)) for path in self.paths]
        held = shards.pop() if len(shards) > 1 else shards[0]
        draft = network.of_layers(self.small.model, layers)
        trainer = Trainer(
            draft,
            0,
            self.rows,
            [training.lengths_of(shard) for shard in shards],
            replace(self.course, epochs=1),
            precision=precision(self.target, draft),
            temperature=self.temperature,
        )
        before, marks, tokens = trainer.accepted(held), list[tuple[int, float]](), 0
        for pieces in trainer.batches(self.paths):
            trainer.learn(pieces)
            tokens += sum(piece.num_answer for piece in pieces)
            if trainer.step in (trainer.steps // 2, trainer.steps):
                marks.append((tokens, trainer.accepted(held)))
            self.tell(f"trying {len(layers)} layers: step {trainer.step} of {trainer.steps}")
        expected, step_s = _expected(marks, self.num_tokens), self._step_s(draft.requires_grad_(False))
        facts = {"layers": layers, "accepted": before, "trained": marks[-1][1], "expected": expected, "step_s": step_s}
        return facts | {"step_over_pass": step_s / self.passes[1]} | shapes.predicted(expected, step_s, self.passes)

    def _step_s(self, draft: Any) -> float:
        """Seconds of a draft token as it would be served, from a file where it will be one."""
        if (stored := precision(self.target, draft)) is None:
            return self._timed(self.target.backend(draft, None))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "draft.gguf"
            gguf_writing.write(draft, self.target.tokenizer, path, precision=stored)
            served = Target(str(path), self.target.device).writer
            if isinstance(served, Reduces) and vocabulary.is_large(served.vocab_size):
                served = served.reduced(vocabulary.listed(self.target.tokenizer, vocabulary.LISTED))
            return self._timed(served)

    def _timed(self, served: Model) -> float:
        """Seconds of a draft token while passes take what `passes` say: a machine has quick minutes and slow ones."""
        (times,) = vocabulary.step_seconds(self.target.writer, served)
        draft_s, pass_s = map(min, zip(*times, strict=True))
        return draft_s / pass_s * Costs(draft_s=0.0, passes=self.passes).pass_s(vocabulary.NUM + 1)


def precision(target: Target, draft: Any) -> gguf_writing.Precision | None:
    """The type that a draft from a small model is stored in beside this target; None where it has no file."""
    return None if gguf_writing.refusal(draft) else target.precision


def _expected(marks: Sequence[tuple[int, float]], num_tokens: int) -> float:
    """Acceptance after so many tokens, from that after some: (tokens, acceptance) in rising order."""
    (few, first), (tokens, last) = marks[0], marks[-1]
    doublings = max(0.0, math.log2(max(1.0, num_tokens / tokens)))
    gain = max(0.0, last - first) / max(1.0, math.log2(tokens / few)) if len(marks) > 1 else 0.0
    return max(last, min(shapes.MOST, last + gain * DECAY * (1 - DECAY**doublings) / (1 - DECAY)))


def table(tried: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of a table of what was predicted."""
    head = f"{'layers':>8}{'accepted':>10}{'trained':>9}{'expected':>10}{'step':>7}{'speed-up':>10}{'at':>4}"
    lines = [
        f"{len(one['layers']):>8}{one['accepted']:>10.3f}{one['trained']:>9.3f}{one['expected']:>10.3f}"
        f"{one['step_over_pass']:>7.3f}{one['speed_up']:>10.2f}{one['length']:>4}"
        for one in tried
    ]
    return [head, *lines]
