"""Training of a draft's own layers on the target's text, over several epochs; nothing of the target is run.

    pieces -> batches of states -> own layers -> logits of the tokens it can say -> loss -> AdamW, cosine

The loss is forward KL over the target's top tokens and one bucket for all others, or total variation over them, which is
1 - the chance of acceptance. Beside a GGUF file the layers are trained through the rounding to its types: forward they are
rounded, backward it is as if they were not (the straight-through estimator, Bengio et al. 2013), so that four bits, which make
a draft's step cheaper by what it need not read, cost little of its acceptance.

Shapes: A rows (tokens of answers), S tokens that the draft can say.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence

from specdecpp import cache_dir
from specdecpp.distillation import text
from specdecpp.distillation.network import is_fast_at_half
from specdecpp.distillation.text import TextPiece
from specdecpp.errors import DataError, first_line
from specdecpp.loading.gguf_writing import Precision
from specdecpp.training.labels import padded
from specdecpp.training.train import rate, saved

Loss = Literal["kl", "tv"]
Length = tuple[int, int]
"""Lengths of a piece in tokens: its prompt, and prompt and answer."""
STATE = "training.pt"
SAVED_S = 60.0
"""Seconds between two writes of the state."""
BLOCK = 32
"""Weights of a row that have a scale of their own in a file."""
_MIXED = 8
"""Shards whose pieces are mixed in an epoch."""
_LEAST = 1e-9


def targets(pieces: Sequence[TextPiece], rows: Int[Tensor, " V"]) -> tuple[Float[Tensor, "A TOP"], Int[Tensor, "A TOP"]]:
    """Probabilities of the target's top tokens, 0 for those that the draft lacks, and their rows of its output layer."""
    row = rows[torch.cat([piece.top for piece in pieces]).to(rows.device)]
    p = torch.cat([piece.log_p for piece in pieces]).to(rows.device).exp()
    return torch.where(row < 0, 0.0, p), row.clamp(min=0)


def overlap(logits: Float[Tensor, "A S"], p: Float[Tensor, "A TOP"], row: Int[Tensor, "A TOP"]) -> Float[Tensor, " A"]:
    """sum min(p, q) over the target's top tokens: 1 - TV but for the tail, and at most that."""
    return torch.minimum(p, logits.log_softmax(-1).gather(-1, row).exp()).sum(-1)


def divergence(logits: Float[Tensor, "A S"], p: Float[Tensor, "A TOP"], row: Int[Tensor, "A TOP"]) -> Float[Tensor, " A"]:
    """KL(p || q) over the top tokens that the draft can say and one bucket for all others."""
    log_q = logits.log_softmax(-1).gather(-1, row)
    rest_p = (1 - p.sum(-1)).clamp(min=_LEAST)
    rest_q = (1 - torch.where(p > 0, log_q.exp(), 0.0).sum(-1)).clamp(min=_LEAST)
    own = torch.where(p > 0, p * (p.clamp(min=_LEAST).log() - log_q), 0.0).sum(-1)
    return own + rest_p * (rest_p.log() - rest_q.log())


def rounded(weight: Float[Tensor, "R C"], precision: Precision | None) -> Float[Tensor, "R C"]:
    """The values that a file of this precision will have, to the bit; gradients pass as if they were the weight itself. Rows
    that are not of whole blocks are stored in 16 bits and stay unchanged."""
    if precision is None or weight.shape[-1] % BLOCK:
        return weight
    with torch.no_grad():
        blocks = weight.reshape(-1, BLOCK)
        low = blocks.amin(-1, keepdim=True)
        is_q4 = precision is Precision.q4_1
        step = (blocks.amax(-1, keepdim=True) - low) / 15 if is_q4 else blocks.abs().amax(-1, keepdim=True) / 127
        inverse = torch.where(step == 0, 0.0, 1 / step)
        scale = step.half().float()  # a file has it in two bytes
        if is_q4:
            code = (blocks - low).mul_(inverse).add_(0.5).floor_().clamp_(0, 15)
            found = code.mul_(scale).add_(low.half().float())
        else:
            code = blocks * inverse
            found = (code.sign() * (code.abs() + 0.5).floor()).mul_(scale)  # halves away from zero
    return found.reshape(weight.shape) + (weight - weight.detach())


def hidden(
    tail: Any, pieces: Sequence[TextPiece], *, is_whole: bool = False, precision: Precision | None = None
) -> Float[Tensor, "A D"]:
    """Inputs of the draft's output layer for every token of the answers, from the states; `is_whole`: from the tokens.
    Its layers compute with their weights as they are stored in `precision`."""
    model = tail.model
    named = ((name, p) for name, p in model.named_parameters() if name.startswith("layers.") and p.ndim == 2)
    weights = {name: rounded(p, precision) for name, p in named}
    device = model.norm.weight.device
    given = padded([piece.ids[:-1].tolist() for piece in pieces], device)
    if not is_whole:
        del given["input_ids"]
        given["inputs_embeds"] = pad_sequence([piece.state.to(device, torch.float32) for piece in pieces], batch_first=True)
    found = functional_call(model, weights, kwargs={**given, "use_cache": False}).last_hidden_state
    return torch.cat([found[i, piece.num_prompt - 1 : len(piece.ids) - 1] for i, piece in enumerate(pieces)])


@dataclass(frozen=True, kw_only=True)
class Course:
    """Hyperparameters of a training. Raises ValueError for what cannot be trained."""

    epochs: int = 3
    loss: Loss = "kl"
    rows: int = 512
    """Tokens of answers in a batch."""
    lr: float = 1e-3
    """The highest learning rate."""
    warmup: float = 0.03
    """Share of the steps in which the learning rate rises; a cosine follows."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.loss not in ("kl", "tv"):
            raise ValueError(f"loss is kl or tv, got {self.loss!r}")
        if min(self.epochs, self.rows) < 1 or not self.lr > 0 or not 0 <= self.warmup < 1 or self.seed < 0:
            raise ValueError(
                f"epochs and rows must be at least 1, lr positive, warmup in [0, 1) and seed not negative, got {self}"
            )


class Trainer:
    """A draft's own layers in training."""

    def __init__(
        self,
        tail: Any,
        output: Float[Tensor, "S D"],
        rows: Int[Tensor, " V"],
        lengths: Sequence[Sequence[Length]],
        course: Course,
        *,
        is_whole: bool = False,
        precision: Precision | None = None,
    ):
        """`output` are the rows of the output layer that the draft has, `rows` their numbers by token (-1: none); `lengths` are
        those of each shard's pieces. `is_whole`: the draft reads tokens, as none of its layers is the target's. `precision`:
        the type its layers are stored in."""
        self._tail, self._course, self._rows = tail, course, rows.to(output.device)
        self._is_whole, self._precision = is_whole, precision
        self._is_half = is_fast_at_half(output.device)
        self._output = output.bfloat16() if self._is_half else output
        self._timetable = list(timetable(lengths, course))
        self.step, self.steps = 0, sum(len(batches) for _, batches in self._timetable)
        self.own = own_weights(tail)
        for parameter in self.own:
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)
        self._optimiser = torch.optim.AdamW(self.own, lr=course.lr, betas=(0.9, 0.95), weight_decay=0.0)

    def run(self, paths: Sequence[Path], folder: Path, asked: str, tell: Callable[[str], None]) -> None:
        """Train to the end, from where a run before left off; its state is in `folder / STATE`."""
        origin = {"asked": asked, "steps": self.steps, "precision": self._precision and self._precision.value}
        self._restore(folder / STATE, origin)
        began = saved_at = perf_counter()
        done, recent = 0, list[float]()
        for chosen, batches in self._timetable:
            left = batches[max(0, self.step - done) :]
            done += len(batches)
            held = [piece for i in chosen for piece in text.pieces(paths[i])] if left else []
            for batch in left:
                recent.append(self.learn([held[i] for i in batch]))
                now = perf_counter()
                if now - saved_at > SAVED_S:
                    self._save(folder / STATE, origin)
                    saved_at = now
                minutes = (now - began) / len(recent) * (self.steps - self.step) / 60
                mean = sum(recent[-50:]) / len(recent[-50:])
                at = f"training {self.step / self.steps:.0%}: step {self.step:,} of {self.steps:,}"
                tell(f"{at}, acceptance at least {mean:.3f}, {minutes:,.0f} min left")
        self._save(folder / STATE, origin)

    def learn(self, pieces: Sequence[TextPiece]) -> float:
        """One step; the acceptance before it."""
        course = self._course
        for group in self._optimiser.param_groups:
            group["lr"] = course.lr * rate(self.step, steps=self.steps, warmup=course.warmup, least=0.1)
        logits, of = self._logits(pieces), targets(pieces, self._rows)
        with torch.set_grad_enabled(course.loss == "tv"):
            accepted = overlap(logits, *of).mean()
        loss = divergence(logits, *of).mean() if course.loss == "kl" else 1 - accepted
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.own, 1.0)
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        self.step += 1
        return float(accepted.detach())

    def _logits(self, pieces: Sequence[TextPiece]) -> Float[Tensor, "A S"]:
        """Logits of the tokens that the draft can say, in the place of every token of the answers."""
        with torch.autocast(self._output.device.type, torch.bfloat16, enabled=self._is_half):
            found = hidden(self._tail, pieces, is_whole=self._is_whole, precision=self._precision)
            return (found.to(self._output.dtype) @ self._output.T).float()

    def _save(self, path: Path, origin: Mapping[str, Any]) -> None:
        own = [p.detach() for p in self.own]
        state = {"origin": dict(origin), "step": self.step, "optimiser": self._optimiser.state_dict(), "own": own}
        with cache_dir.whole(path) as part:
            torch.save(state, part)

    def _restore(self, path: Path, origin: Mapping[str, Any]) -> None:
        """Read what `_save` wrote, if anything. Raises `DataError` for the state of another training."""
        if not path.exists():
            return
        try:
            state = saved(path)
            if (found := state["origin"]) == dict(origin):
                for parameter, value in zip(self.own, state["own"], strict=True):
                    parameter.data.copy_(value)
                self._optimiser.load_state_dict(state["optimiser"])
                self.step = int(state["step"])
        except Exception as error:  # zip, pickle and torch each have errors of their own
            raise DataError(
                f"{path} is damaged ({first_line(error)}), so this training cannot go on from it. Delete that file "
                "and run the same command again: the draft is trained from its beginning, on the same text."
            ) from error
        if found != dict(origin):
            raise DataError(f"{path} is of another training: {found} and not {dict(origin)}. Distil into another folder.")


def own_weights(tail: Any) -> list[Tensor]:
    """Trained parameters: the draft's own layers and its last norm."""
    return [*tail.model.layers.parameters(), *tail.model.norm.parameters()]


def timetable(lengths: Sequence[Sequence[Length]], course: Course) -> Iterator[tuple[list[int], list[list[int]]]]:
    """All of a course: shards that are held at once, and batches of their pieces. `lengths` are those of each shard."""
    for epoch in range(course.epochs):
        generator = torch.Generator().manual_seed(course.seed * 1_000_003 + epoch)
        order = torch.randperm(len(lengths), generator=generator).tolist()
        for start in range(0, len(order), _MIXED):
            chosen = order[start : start + _MIXED]
            yield chosen, _batches([length for i in chosen for length in lengths[i]], course.rows, generator)


def _batches(lengths: Sequence[Length], rows: int, generator: torch.Generator) -> list[list[int]]:
    """Places in a random order, in batches of about `rows` tokens of answers and of like lengths: shorter ones are padded."""
    found: list[list[int]] = [[]]
    num = 0
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i][1]):
        if num >= rows:
            found.append([])
            num = 0
        found[-1].append(i)
        num += lengths[i][1] - lengths[i][0]
    return [found[i] for i in torch.randperm(len(found), generator=generator).tolist()]
