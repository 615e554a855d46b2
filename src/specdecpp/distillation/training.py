"""Training of a draft's own layers on the target's text, over several epochs; nothing of the target is run.

    pieces -> batches of states -> own layers -> logits of the tokens it can say -> loss -> AdamW, cosine

The loss is forward KL over the target's top tokens and one bucket for all others, or total variation over them, which is
1 - the chance of acceptance. Beside a GGUF file the layers are trained through the rounding to its types: forward they are
rounded, backward it is as if they were not (the straight-through estimator, Bengio et al. 2013), so that four bits, which make
a draft's step cheaper by what it need not read, cost little of its acceptance.

Shapes: A rows (tokens of answers), S tokens that the draft can say.
"""

import math
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
from specdecpp.distillation.network import is_fast_at_half, tail
from specdecpp.distillation.text import TextPiece
from specdecpp.errors import DataError
from specdecpp.loading.gguf_writing import Precision
from specdecpp.training.folders import writing
from specdecpp.training.labels import padded
from specdecpp.training.train import rate, saved

Loss = Literal["kl", "tv"]
Length = tuple[int, int]
"""Lengths of a piece in tokens: its prompt, and prompt and answer."""
STATE = "training.pt"
LR, LR_SMALL = 1e-3, 2e-5
SAVED_S = 60.0
"""Seconds between two writes of the state."""
BLOCK = 32
"""Weights of a row that have a scale of their own in a file."""
_TOGETHER = 8
"""Pieces that are measured together."""
_RECENT = 50
"""Steps over which the acceptance is averaged."""
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
    return torch.minimum(p, _log_q(logits, row).exp()).sum(-1)


def _log_q(logits: Float[Tensor, "A S"], row: Int[Tensor, "A TOP"]) -> Float[Tensor, "A TOP"]:
    return logits.gather(-1, row) - logits.logsumexp(-1, keepdim=True)


def served(
    logits: Float[Tensor, "A S"], p: Float[Tensor, "A TOP"], row: Int[Tensor, "A TOP"], temperature: float
) -> Float[Tensor, " 2A"]:
    """The acceptance in each place as people will draw: greedily, and (but for temperature 0) at a temperature."""
    greedy = ((logits.argmax(-1) == row[:, 0]) & (p[:, 0] > 0)).float()
    if temperature == 0:
        return greedy
    flat = p ** (1 / temperature)
    return torch.cat([greedy, overlap(logits / temperature, flat / flat.sum(-1, keepdim=True).clamp(min=_LEAST), row)])


def divergence(logits: Float[Tensor, "A S"], p: Float[Tensor, "A TOP"], row: Int[Tensor, "A TOP"]) -> Float[Tensor, " A"]:
    """KL(p || q) over the top tokens that the draft can say and one bucket for all others."""
    log_q = _log_q(logits, row)
    rest_p = (1 - p.sum(-1)).clamp(min=_LEAST)
    rest_q = (1 - torch.where(p > 0, log_q.exp(), 0.0).sum(-1)).clamp(min=_LEAST)
    own = torch.where(p > 0, p * (p.clamp(min=_LEAST).log() - log_q), 0.0).sum(-1)
    return own + rest_p * (rest_p.log() - rest_q.log())


class _Rounded(torch.autograd.Function):
    """Weights rounded to the values of a file, in another type; gradients pass as if they were the weights themselves."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, precision: Precision, dtype: torch.dtype) -> Tensor:
        return rounded(weight, precision).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].float(), None, None


def rounded(weight: Float[Tensor, "R C"], precision: Precision) -> Float[Tensor, "R C"]:
    """The values that a file of this precision will have, to the bit; rows that are not of whole blocks stay unchanged."""
    if weight.shape[-1] % BLOCK:
        return weight
    blocks = weight.reshape(-1, BLOCK)
    if precision is Precision.q4_1:
        low, high = blocks.aminmax(dim=-1, keepdim=True)
        step = (high - low) / 15
    else:
        low, step = None, blocks.abs().amax(-1, keepdim=True) / 127
    inverse = torch.where(step == 0, 0.0, 1 / step)
    scale = step.half().float()  # a file has it in two bytes
    if low is not None:
        code = (blocks - low).mul_(inverse).add_(0.5).floor_().clamp_(0, 15)
        found = code.mul_(scale).add_(low.half().float())
    else:
        code = blocks * inverse
        found = (code.sign() * (code.abs() + 0.5).floor()).mul_(scale)  # halves away from zero
    return found.reshape(weight.shape)


def lengths_of(pieces: Sequence[TextPiece]) -> list[Length]:
    return [(piece.num_prompt, len(piece.ids)) for piece in pieces]


def hidden(
    layers: Any,
    pieces: Sequence[TextPiece],
    *,
    is_whole: bool = False,
    precision: Precision | None = None,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "A D"]:
    """Inputs of the draft's output layer for every token of the answers, from the states; `is_whole`: from the tokens.
    Its layers compute with their weights as they are stored in `precision`, in this type (None: in that of the weights)."""
    model = layers.model
    own = ((name, p) for name, p in model.named_parameters() if name.startswith(("layers.", "norm.")))
    weights = {name: _weight(p, precision, dtype) for name, p in own}
    device = model.norm.weight.device
    given = padded([piece.ids[:-1].tolist() for piece in pieces], device)
    ids = given.pop("input_ids")
    if is_whole:
        states = model.embed_tokens(ids)
    else:
        states = pad_sequence([piece.state.to(device, torch.float32) for piece in pieces], batch_first=True)
    given["inputs_embeds"] = states if dtype is None else states.to(dtype)
    found = functional_call(model, weights, kwargs={**given, "use_cache": False}).last_hidden_state
    return torch.cat([found[i, piece.num_prompt - 1 : len(piece.ids) - 1] for i, piece in enumerate(pieces)])


def _weight(weight: Tensor, precision: Precision | None, dtype: torch.dtype | None) -> Tensor:
    if precision is not None and weight.ndim == 2:
        return _Rounded.apply(weight, precision, dtype or weight.dtype)
    return weight if dtype is None else weight.to(dtype)


@dataclass(frozen=True, kw_only=True)
class Course:
    """Hyperparameters of a training. Raises ValueError for what cannot be trained."""

    epochs: int = 3
    loss: Loss = "kl"
    rows: int = 512
    """Tokens of answers in a batch."""
    lr: float | None = None
    """The highest learning rate; None: `LR`, and `LR_SMALL` where the layers are those of a small model, which knows a lot."""
    warmup: float = 0.03
    """Share of the steps in which the learning rate rises; a cosine follows."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.loss not in ("kl", "tv"):
            raise ValueError(f"loss is kl or tv, got {self.loss!r}")
        if min(self.epochs, self.rows) < 1 or not (self.lr is None or self.lr > 0) or not 0 <= self.warmup < 1 or self.seed < 0:
            raise ValueError(
                f"epochs and rows must be at least 1, lr positive, warmup in [0, 1) and seed not negative, got {self}"
            )


class Trainer:
    """A draft's own layers in training."""

    def __init__(
        self,
        draft: Any,
        kept: int,
        rows: Int[Tensor, " V"],
        lengths: Sequence[Sequence[Length]],
        course: Course,
        *,
        precision: Precision | None = None,
        temperature: float = 1.0,
    ):
        """Train the draft's layers from `kept` on; with 0 it reads tokens, else states. `rows` are the numbers of the tokens
        that it can say among themselves (-1: it cannot); `lengths` are those of each shard's pieces. `precision`: the type its
        layers are stored in. `temperature` is that of the answers that will be asked for, beside greedy ones."""
        output = draft.lm_head.weight.detach()[(rows >= 0).nonzero()[:, 0].to(draft.device)]
        self._tail, self._course, self._rows = tail(draft, kept), course, rows.to(output.device)
        self._is_whole, self._precision, self._temperature = not kept, precision, temperature
        self._is_half = is_fast_at_half(output.device)
        self._output = output.bfloat16() if self._is_half else output
        self._timetable = list(timetable(lengths, course))
        self.step, self.steps = 0, sum(len(batches) for _, batches in self._timetable)
        self.own = own_weights(self._tail)
        for parameter in self.own:
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)
        self._optimiser = torch.optim.AdamW(self.own, lr=course.lr or LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def run(
        self,
        paths: Sequence[Path],
        folder: Path,
        asked: str,
        tell: Callable[[str], None],
        *,
        worth: Callable[[float], float] | None = None,
        ends: bool = False,
    ) -> None:
        """Train to the end, from where a run before left off; its state is in `folder / STATE`. `worth` tells the speed
        that a mean acceptance makes; a training that `ends` is left as it is."""
        origin = {"asked": asked, "steps": self.steps, "precision": self._precision and self._precision.value}
        self._restore(folder / STATE, origin)
        began = saved_at = perf_counter()
        recent = list[float]()
        for pieces in () if ends else self.batches(paths):
            recent.append(self.learn(pieces))
            now = perf_counter()
            if now - saved_at > SAVED_S:
                self._save(folder / STATE, origin)
                saved_at = now
            minutes = (now - began) / len(recent) * (self.steps - self.step) / 60
            at = f"training {self.step / self.steps:.0%}: step {self.step:,} of {self.steps:,}"
            gain = "" if worth is None else _prospects(recent, self.step, 3600 * len(recent) / (now - began), worth)
            tell(f"{at}, acceptance {_mean(recent, len(recent)):.3f}, {minutes:,.0f} min left{gain}")
        self._save(folder / STATE, origin)

    def batches(self, paths: Sequence[Path]) -> Iterator[list[TextPiece]]:
        """Pieces of each step that is left, from the files of the shards."""
        done = 0
        for chosen, batches in self._timetable:
            left = batches[max(0, self.step - done) :]
            done += len(batches)
            held = [piece for i in chosen for piece in text.pieces(paths[i])] if left else []
            for batch in left:
                yield [held[i] for i in batch]

    def learn(self, pieces: Sequence[TextPiece]) -> float:
        """One step; the acceptance before it."""
        course = self._course
        for group in self._optimiser.param_groups:
            group["lr"] = (course.lr or LR) * rate(self.step, steps=self.steps, warmup=course.warmup, least=0.1)
        logits, of = self._logits(pieces), targets(pieces, self._rows)
        with torch.no_grad():
            accepted = float(served(logits, *of, self._temperature).mean())
        loss = divergence(logits, *of).mean() if course.loss == "kl" else 1 - overlap(logits, *of).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.own, 1.0)
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        self.step += 1
        return accepted

    @torch.no_grad()
    def accepted(self, pieces: Sequence[TextPiece]) -> float:
        """Mean acceptance along the target's text (`served`)."""
        some = sorted(pieces, key=lambda piece: len(piece.ids))
        batches = [some[i : i + _TOGETHER] for i in range(0, len(some), _TOGETHER)]
        found = [served(self._logits(batch), *targets(batch, self._rows), self._temperature) for batch in batches]
        return float(torch.cat(found).mean())

    def _logits(self, pieces: Sequence[TextPiece]) -> Float[Tensor, "A S"]:
        """Logits of the tokens that the draft can say, in the place of every token of the answers."""
        with torch.autocast(self._output.device.type, torch.bfloat16, enabled=self._is_half):
            dtype = torch.bfloat16 if self._is_half else None
            found = hidden(self._tail, pieces, is_whole=self._is_whole, precision=self._precision, dtype=dtype)
            return (found.to(self._output.dtype) @ self._output.T).float()

    def _save(self, path: Path, origin: Mapping[str, Any]) -> None:
        own = [p.detach() for p in self.own]
        state = {"origin": dict(origin), "step": self.step, "optimiser": self._optimiser.state_dict(), "own": own}
        with writing(path.parent, safe="The steps before the last save"), cache_dir.whole(path) as part:
            torch.save(state, part)

    def _restore(self, path: Path, origin: Mapping[str, Any]) -> None:
        """Read what `_save` wrote, if anything. Raises `DataError` for the state of another training."""
        if not path.exists():
            return
        with saved(path, otherwise="the draft is trained from its beginning, on the same text") as state:
            if (found := state["origin"]) != dict(origin):
                raise DataError(f"{path} is of another training: {found} and not {dict(origin)}. Distil into another folder.")
            for parameter, value in zip(self.own, state["own"], strict=True):
                parameter.data.copy_(value)
            self._optimiser.load_state_dict(state["optimiser"])
            self.step = int(state["step"])


def _mean(values: Sequence[float], end: int) -> float:
    """The mean of the last `_RECENT` before a place."""
    some = values[max(0, end - _RECENT) : end]
    return sum(some) / len(some)


def _prospects(recent: Sequence[float], step: int, steps_an_hour: float, worth: Callable[[float], float]) -> str:
    """Worth of the draft now, and after another hour if each doubling of the steps adds as much as the last one."""
    now = _mean(recent, len(recent))
    words = f"; stop now: {worth(now):.2f}x"
    half = len(recent) - step // 2
    if half < _RECENT:
        return words
    later = now + (now - _mean(recent, half)) * math.log2(1 + steps_an_hour / step)
    return f"{words}, in one more hour: about {worth(min(1.0, later)):.2f}x"


def own_weights(layers: Any) -> list[Tensor]:
    """Trained parameters: the draft's own layers (`network.tail`) and its last norm."""
    return [*layers.model.layers.parameters(), *layers.model.norm.parameters()]


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
