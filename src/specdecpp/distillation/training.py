"""Training a draft's own layers on the target's text: sparse distributions, several epochs, nothing of the target is run.

    pieces -> batches of states -> own layers -> logits of the tokens it can say -> loss -> AdamW, cosine

Forward KL over the likeliest tokens and one bucket for all others, or total variation over them, which is 1 - the chance
of acceptance.

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
_LEAST = 1e-9


@dataclass(frozen=True, kw_only=True)
class Said:
    """The target's distribution in A places, over the draft's rows: probabilities [A, TOP], where a token is one that the
    draft can say its row, else -1."""

    p: Float[Tensor, "A TOP"]
    row: Int[Tensor, "A TOP"]


def said(pieces: Sequence[TextPiece], rows: Int[Tensor, " V"]) -> Said:
    """On the device of `rows`."""
    top, log_p = (torch.cat(column).to(rows.device) for column in zip(*((p.top, p.log_p) for p in pieces), strict=True))
    return Said(p=log_p.exp(), row=rows[top])


def overlap(logits: Float[Tensor, "A S"], of: Said) -> Float[Tensor, " A"]:
    """sum min(p, q) over the target's likeliest tokens: 1 - TV but for the tail, and at most that."""
    q = _at(logits.log_softmax(-1), of.row).exp()
    return torch.where(of.row < 0, 0.0, torch.minimum(of.p, q)).sum(-1)


def divergence(logits: Float[Tensor, "A S"], of: Said) -> Float[Tensor, " A"]:
    """KL(p || q) over the likeliest tokens that the draft can say and one bucket for all others."""
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
    """Inputs of the draft's output layer for every token of the answers, from the kept states; `is_whole`: from the tokens.
    Its layers compute with their weights as they are stored in `precision`."""
    device = next(tail.model.layers.parameters()).device
    ids, mask = batched([piece.ids[:-1].tolist() for piece in pieces], device=device)
    given = {"input_ids": ids} if is_whole else {"inputs_embeds": _states(pieces, device)}
    weights = layers(tail.model, precision)
    found = functional_call(tail.model, weights, kwargs=given | {"attention_mask": mask, "use_cache": False}).last_hidden_state
    return torch.cat([found[i, piece.num_prompt - 1 : len(piece.ids) - 1] for i, piece in enumerate(pieces)])


def _states(pieces: Sequence[TextPiece], device: torch.device) -> Float[Tensor, "B T D"]:
    longest = max(len(piece.state) for piece in pieces)
    states = torch.zeros(len(pieces), longest, pieces[0].state.shape[-1], device=device)
    for i, piece in enumerate(pieces):
        states[i, : len(piece.state)] = piece.state.to(device)
    return states


@dataclass(frozen=True, kw_only=True)
class Course:
    """How a draft is trained. `rows` are the tokens of answers in a batch; the learning rate is reached after a share `warmup`
    of the steps and falls as a cosine. Raises ValueError for what cannot be trained."""

    epochs: int = 3
    loss: Loss = "kl"
    rows: int = 512
    lr: float = 1e-3
    warmup: float = 0.03
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
    """Where a training stands after a step. `overlap` is the acceptance on the batch, before the step."""

    step: int
    steps: int
    loss: float
    overlap: float
    elapsed_s: float


class Student:
    """A draft's own layers between two steps; `keep` writes all that it takes to go on, and `opened` reads it."""

    def __init__(
        self,
        tail: Any,
        output: Float[Tensor, "S D"],
        rows: Int[Tensor, " V"],
        course: Course,
        steps: int,
        *,
        is_whole: bool = False,
        precision: Precision | None = None,
    ):
        """`output` are the rows of the output layer that the draft has, `rows` says which is a token's (-1: none). `is_whole`:
        it reads tokens, as none of its layers is the target's. `precision`: what its layers are stored in (`rounding`)."""
        self.is_whole, self.precision = is_whole, precision
        self.tail, self.output, self.course, self.steps, self.step = tail, output, course, steps, 0
        self.rows = rows.to(output.device)
        self.own = own_weights(tail)
        for parameter in self.own:
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)
        self.optimiser = torch.optim.AdamW(self.own, lr=course.lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.is_half = is_fast_at_half(self.own[0].device)
        self.half_output = output.bfloat16() if self.is_half else output

    def learn(self, pieces: Sequence[TextPiece]) -> tuple[float, float]:
        """One step; the loss and the acceptance before it."""
        for group in self.optimiser.param_groups:
            group["lr"] = self.course.lr * rate(self.step, steps=self.steps, warmup=self.course.warmup, least=0.1)
        logits, of = self.logits(pieces), said(pieces, self.rows)
        with torch.no_grad():
            accepted = float(overlap(logits, of).mean())
        loss = divergence(logits, of).mean() if self.course.loss == "kl" else 1 - overlap(logits, of).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.own, 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.step += 1
        return float(loss.detach()), accepted

    def logits(self, pieces: Sequence[TextPiece]) -> Float[Tensor, "A S"]:
        """Probabilities of the tokens that the draft can say, for every token of the answers."""
        with torch.autocast(self.output.device.type, torch.bfloat16, enabled=self.is_half):
            found = hidden(self.tail, pieces, is_whole=self.is_whole, precision=self.precision)
            return (found.to(self.half_output.dtype) @ self.half_output.T).float()

    def keep(self, path: Path, origin: Mapping[str, Any]) -> None:
        state = {"origin": dict(origin), "step": self.step, "optimiser": self.optimiser.state_dict()}
        with cache_dir.whole(path) as part:
            torch.save(state | {"own": [p.detach() for p in self.own]}, part)

    def go_on(self, path: Path, origin: Mapping[str, Any]) -> None:
        """From a state that `keep` wrote; nothing where there is none. Raises `DataError` for that of another training."""
        if not path.exists():
            return
        try:
            state = saved(path)
            if state["origin"] != dict(origin):
                raise DataError(
                    f"{path} is of another training: {state['origin']} and not {dict(origin)}. Distil into another folder."
                )
            put(self.tail, state["own"])
            self.optimiser.load_state_dict(state["optimiser"])
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


def trained_layers(path: Path) -> list[Tensor]:
    """The weights in a state that `Student.keep` wrote."""
    return saved(path)["own"]


def put(tail: Any, values: Sequence[Tensor]) -> None:
    for parameter, value in zip(own_weights(tail), values, strict=True):
        parameter.data.copy_(value)


def batches(lengths: Sequence[Length], rows: int, generator: torch.Generator) -> list[list[int]]:
    """Places in a random order, each batch of about so many tokens of answers; of like lengths, since shorter ones are filled
    up."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i][1])
    found: list[list[int]] = [[]]
    for i in order:
        if sum(whole - prompt for prompt, whole in (lengths[j] for j in found[-1])) >= rows:
            found.append([])
        found[-1].append(i)
    return [found[i] for i in torch.randperm(len(found), generator=generator).tolist()]


def timetable(lengths: Sequence[Sequence[Length]], course: Course) -> Iterator[tuple[list[int], list[list[int]]]]:
    """All of a course, from the lengths of each shard's pieces: which shards are held at once, and batches of their pieces."""
    for epoch in range(course.epochs):
        generator = torch.Generator().manual_seed(course.seed * 1_000_003 + epoch)
        order = torch.randperm(len(lengths), generator=generator).tolist()
        for start in range(0, len(order), _MIXED):
            chosen = order[start : start + _MIXED]
            yield chosen, batches([length for i in chosen for length in lengths[i]], course.rows, generator)


def lessons(
    paths: Sequence[Path], lengths: Sequence[Sequence[Length]], course: Course, *, done: int = 0
) -> Iterator[list[TextPiece]]:
    """All batches of all epochs but the first `done`; shards that only those had are not read."""
    for chosen, found in timetable(lengths, course):
        if done < len(found):
            held = [piece for i in chosen for piece in text.pieces(paths[i])]
            yield from ([held[i] for i in batch] for batch in found[done:])
        done = max(0, done - len(found))


_MIXED = 8  # shards


def train(
    student: Student,
    paths: Sequence[Path],
    lengths: Sequence[Sequence[Length]],
    folder: Path,
    origin: Mapping[str, Any],
    *,
    tell: Callable[[Lesson], None] = lambda lesson: None,
) -> list[Lesson]:
    """Train to the end, from where a run before left off; what it left is in `folder / STATE`. `lengths` are those of the
    pieces of each shard. The lessons of this run."""
    student.go_on(folder / STATE, origin)
    began = saved_at = perf_counter()
    done: list[Lesson] = []
    for batch in lessons(paths, lengths, student.course, done=student.step):
        loss, accepted = student.learn(batch)
        now = perf_counter()
        done.append(Lesson(step=student.step, steps=student.steps, loss=loss, overlap=accepted, elapsed_s=now - began))
        if now - saved_at > SAVED_S:
            student.keep(folder / STATE, origin)
            saved_at = now
        tell(done[-1])
    student.keep(folder / STATE, origin)
    return done
