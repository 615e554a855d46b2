"""Training of a draft's own layers on the target's text, over several epochs; nothing of the target is run.

    pieces -> batches of states -> own layers -> logits of the tokens it can say -> loss -> AdamW, cosine

The loss is forward KL over the target's top tokens and one bucket for all others, or total variation over them, which is
1 - the chance of acceptance.

Shapes: B pieces, T positions, A rows (tokens of answers), S tokens that the draft can say.
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
from specdecpp.distillation.network import batched, is_fast_at_half
from specdecpp.distillation.rounding import layers
from specdecpp.distillation.text import TextPiece
from specdecpp.errors import DataError, first_line
from specdecpp.loading.gguf_writing import Precision
from specdecpp.training.checkpoints import rate, saved

Loss = Literal["kl", "tv"]
Length = tuple[int, int]
"""Lengths of a piece in tokens: its prompt, and prompt and answer."""
STATE = "training.pt"
SAVED_S = 60.0
"""Seconds between two writes of the state."""
_MIXED = 8
"""Shards whose pieces are mixed in an epoch."""
_LEAST = 1e-9


@dataclass(frozen=True, kw_only=True)
class TopTokens:
    """The target's top tokens in A places: their probabilities, and their rows of the draft's output layer (-1: none)."""

    p: Float[Tensor, "A TOP"]
    row: Int[Tensor, "A TOP"]

    @classmethod
    def of(cls, pieces: Sequence[TextPiece], rows: Int[Tensor, " V"]) -> "TopTokens":
        top, log_p = (torch.cat(column).to(rows.device) for column in zip(*((p.top, p.log_p) for p in pieces), strict=True))
        return cls(p=log_p.exp(), row=rows[top])


def overlap(logits: Float[Tensor, "A S"], of: TopTokens) -> Float[Tensor, " A"]:
    """sum min(p, q) over the target's top tokens: 1 - TV but for the tail, and at most that."""
    q = _at(logits.log_softmax(-1), of.row).exp()
    return torch.where(of.row < 0, 0.0, torch.minimum(of.p, q)).sum(-1)


def divergence(logits: Float[Tensor, "A S"], of: TopTokens) -> Float[Tensor, " A"]:
    """KL(p || q) over the top tokens that the draft can say and one bucket for all others."""
    is_known = of.row >= 0
    log_q = _at(logits.log_softmax(-1), of.row)
    p = torch.where(is_known, of.p, 0.0)
    rest_p = (1 - p.sum(-1)).clamp(min=_LEAST)
    rest_q = (1 - torch.where(is_known, log_q.exp(), 0.0).sum(-1)).clamp(min=_LEAST)
    own = torch.where(is_known, p * (p.clamp(min=_LEAST).log() - log_q), 0.0).sum(-1)
    return own + rest_p * (rest_p.log() - rest_q.log())


def _at(log_q: Float[Tensor, "A S"], row: Int[Tensor, "A TOP"]) -> Float[Tensor, "A TOP"]:
    return log_q.gather(-1, row.clamp(min=0))


def hidden(
    tail: Any, pieces: Sequence[TextPiece], *, is_whole: bool = False, precision: Precision | None = None
) -> Float[Tensor, "A D"]:
    """Inputs of the draft's output layer for every token of the answers, from the states; `is_whole`: from the tokens.
    Its layers compute with their weights as they are stored in `precision`."""
    device = next(tail.model.layers.parameters()).device
    ids, mask = batched([piece.ids[:-1].tolist() for piece in pieces], device=device)
    states = [piece.state.to(device, torch.float32) for piece in pieces]
    given = {"input_ids": ids} if is_whole else {"inputs_embeds": pad_sequence(states, batch_first=True)}
    weights = layers(tail.model, precision)
    found = functional_call(tail.model, weights, kwargs=given | {"attention_mask": mask, "use_cache": False}).last_hidden_state
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


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """One step of a training."""

    step: int
    loss: float
    overlap: float
    """Acceptance on the batch, before the step."""
    elapsed_s: float


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
        the type its layers are stored in (`rounding`)."""
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

    def run(self, paths: Sequence[Path], folder: Path, asked: str, tell: Callable[[Lesson], None]) -> Lesson | None:
        """Train to the end, from where a run before left off; its state is in `folder / STATE`. The last step of this run."""
        origin = {"asked": asked, "steps": self.steps, "precision": self._precision and self._precision.value}
        self._restore(folder / STATE, origin)
        began = saved_at = perf_counter()
        done, lesson = 0, None
        for chosen, batches in self._timetable:
            left = batches[max(0, self.step - done) :]
            done += len(batches)
            held = [piece for i in chosen for piece in text.pieces(paths[i])] if left else []
            for batch in left:
                loss, accepted = self.learn([held[i] for i in batch])
                now = perf_counter()
                lesson = Lesson(step=self.step, loss=loss, overlap=accepted, elapsed_s=now - began)
                if now - saved_at > SAVED_S:
                    self._save(folder / STATE, origin)
                    saved_at = now
                tell(lesson)
        self._save(folder / STATE, origin)
        return lesson

    def learn(self, pieces: Sequence[TextPiece]) -> tuple[float, float]:
        """One step; the loss and the acceptance before it."""
        course = self._course
        for group in self._optimiser.param_groups:
            group["lr"] = course.lr * rate(self.step, steps=self.steps, warmup=course.warmup, least=0.1)
        logits, of = self._logits(pieces), TopTokens.of(pieces, self._rows)
        with torch.set_grad_enabled(course.loss == "tv"):
            accepted = overlap(logits, of).mean()
        loss = divergence(logits, of).mean() if course.loss == "kl" else 1 - accepted
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.own, 1.0)
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        self.step += 1
        return float(loss.detach()), float(accepted.detach())

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
            if state["origin"] != dict(origin):
                raise DataError(
                    f"{path} is of another training: {state['origin']} and not {dict(origin)}. Distil into another folder."
                )
            put(self._tail, state["own"])
            self._optimiser.load_state_dict(state["optimiser"])
            self.step = int(state["step"])
        except DataError:
            raise
        except Exception as error:  # zip, pickle and torch each have errors of their own
            raise DataError(
                f"{path} is damaged ({first_line(error)}), so this training cannot go on from it. Delete that file "
                "and run the same command again: the draft is trained from its beginning, on the same text."
            ) from error


def own_weights(tail: Any) -> list[Tensor]:
    """Trained parameters: the draft's own layers and its last norm."""
    return [*tail.model.layers.parameters(), *tail.model.norm.parameters()]


def put(tail: Any, values: Sequence[Tensor]) -> None:
    for parameter, value in zip(own_weights(tail), values, strict=True):
        parameter.data.copy_(value)


def batched_places(lengths: Sequence[Length], rows: int, generator: torch.Generator) -> list[list[int]]:
    """Places in a random order, in batches of about `rows` tokens of answers; of like lengths, since shorter ones are
    padded."""
    found: list[list[int]] = [[]]
    num = 0
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i][1]):
        if num >= rows:
            found.append([])
            num = 0
        found[-1].append(i)
        num += lengths[i][1] - lengths[i][0]
    return [found[i] for i in torch.randperm(len(found), generator=generator).tolist()]


def timetable(lengths: Sequence[Sequence[Length]], course: Course) -> Iterator[tuple[list[int], list[list[int]]]]:
    """All of a course: shards that are held at once, and batches of their pieces. `lengths` are those of each shard."""
    for epoch in range(course.epochs):
        generator = torch.Generator().manual_seed(course.seed * 1_000_003 + epoch)
        order = torch.randperm(len(lengths), generator=generator).tolist()
        for start in range(0, len(order), _MIXED):
            chosen = order[start : start + _MIXED]
            yield chosen, batched_places([length for i in chosen for length in lengths[i]], course.rows, generator)
