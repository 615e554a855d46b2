"""A draft for a target that has none. Each phase leaves its result on disk, so that a run which is killed at any moment ends
with the same draft when the same command is given again.

    out/plan.json                 decisions made at the beginning: shape, number of shards
    out/text/                     the target's own text, with what the draft learns of it (`text`)
    out/training.pt               the own layers in training (`start`, `training`)
    out/draft/, draft.gguf        the draft: a checkpoint, and beside a GGUF file one like it (`saving`)
    out/card.json                 data, steps, acceptance, verdict
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from specdecpp import cache_dir
from specdecpp.backends import NativeModel
from specdecpp.distillation import measuring, network, saving, shapes, start, text, trials
from specdecpp.distillation.network import Shape
from specdecpp.distillation.target import Begun, Target
from specdecpp.distillation.text import TextPiece
from specdecpp.distillation.training import LR, LR_SMALL, STATE, Course, Length, Trainer, lengths_of
from specdecpp.errors import BackendError, DataError
from specdecpp.loading import vocabulary
from specdecpp.loading.pair import Pair, short_name
from specdecpp.sampling import Sampling
from specdecpp.training.collect import questions, versions
from specdecpp.training.folders import claimed, writing
from specdecpp.training.prompts import Source, gather

PLAN, TEXT, CARD = "plan.json", "text", "card.json"
SHARD = 64
"""Prompts of a shard."""
HELD = 24
"""Prompts that the draft is measured on, and not trained on."""
FITTED = 2
"""Shards that the start is fitted on: some ten thousand tokens are enough (`start`)."""
WRITING = 0.55
"""The share of a budget in minutes that the target writes for; the rest is for training."""
GREEDY = Sampling(temperature=0.0)
"""Sampling of every second group of shards: people use greedy answers and drawn ones."""
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class DistilPlan:
    """A draft for a target, from prompts. Raises ValueError for what cannot be done."""

    target: str
    sources: tuple[Source, ...]
    out: Path
    minutes: float | None = None
    """The budget but for trials of layers and the check; either this or `tokens`."""
    tokens: int | None = None
    """The budget in tokens that the target writes."""
    sampling: Sampling = field(default_factory=Sampling)
    """Sampling of the target's text: as it will be served. Half of the text is greedy."""
    shape: Shape | None = None
    """None: chosen by predicted tokens/s (`shapes`)."""
    start: str | None = None
    """A small model with the target's tokenizer, or a draft of this target, to train instead of layers of the target."""
    layers: int | None = None
    """Layers of a small model `start` that are kept (`trials`); None: all of them."""
    course: Course = field(default_factory=Course)
    max_tokens: int = 256
    """The most tokens of an answer."""
    seed: int = 0
    device: str | None = None
    licence: str | None = None
    """Licence of the prompts and the target, for the card."""
    ends: bool = False
    """Make the draft of what has been trained, and train no further; the same without it goes on."""

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.tokens is None):
            given = "both" if self.tokens is not None else "neither"
            raise ValueError(f"give either minutes (--minutes N) or tokens that the target writes (--tokens N), got {given}.")
        if not (budget := self.tokens if self.minutes is None else self.minutes) or budget < 0:
            raise ValueError(f"the budget must be positive, got {budget:g}")
        if self.max_tokens < 2 or self.seed < 0:
            raise ValueError(f"max_tokens must be at least 2 and seed at least 0, got {self.max_tokens} and {self.seed}")
        if self.start is not None and self.shape is not None:
            raise ValueError(f"{self.start} has layers of its own, so no shape can be asked for. Leave one of them out.")
        if self.layers is not None and (self.start is None or self.layers < 1):
            raise ValueError(f"{self.layers} layers are kept of a small model: name it as the start, and keep one at least.")


def distil(plan: DistilPlan, *, tell: Tell = lambda line: None, say: Tell = lambda line: None) -> dict[str, Any]:
    """Make what is missing of a draft in `plan.out`; its card. The verdict is `finish`'s. `tell` gets the
    progress, `say` the lines of a table of what was predicted.

    Raises `DataError` for prompts that cannot be read or are too few, for a folder that holds another distillation or that
    another run works in, and for damaged files in it; `PairError` and `BackendError` for a target that cannot be loaded or cut.
    """
    with claimed(plan.out):
        return _Run(plan, tell, say).card()


class _Run:
    """Phases of one distillation, in their order: settled, write, trained, card."""

    def __init__(self, plan: DistilPlan, tell: Tell, say: Tell):
        taken = [name for name in (saving.DRAFT, saving.FILE) if (plan.out / name).exists()]
        if taken and not (plan.out / PLAN).is_file():
            raise DataError(f"{plan.out} has a {taken[0]} and no {PLAN}. Distil into another folder with --out.")
        texts = gather(plan.sources, seed=plan.seed)  # before a model is loaded: a missing file is refused at once
        self._plan, self._tell, self._say = plan, tell, say
        target = self._target = Target(plan.target, plan.device)
        if plan.shape is not None:
            network.check_smaller(target.model, plan.shape)
        self._begun = None if plan.start is None else Begun.named(plan.start, target)
        self._small = self._begun.model if self._begun and self._begun.is_small else None
        self._check_layers()
        saving.check(target, self._small)
        pair = Pair(target=target.writer, draft=target.writer, tokenizer=target.tokenizer)
        prompts = questions(pair, texts, room=plan.max_tokens)
        if len(prompts) < 2 * HELD:
            raise DataError(
                f"{len(prompts)} prompts leave room for an answer of {plan.max_tokens} tokens, and a draft needs {2 * HELD}: "
                f"{HELD} to measure it, the others to train it. Give more prompts, or shorter ones."
            )
        self._sources = sorted({q.source for q in prompts})
        self._held, self._prompts = prompts[:HELD], [q.prompt for q in prompts[HELD:]]
        self._course = replace(plan.course, lr=plan.course.lr or (LR_SMALL if self._small else LR))
        self._group = 1 if isinstance(target.writer, NativeModel) else text.TOGETHER
        """Shards that are written together."""

    def _check_layers(self) -> None:
        if (num := self._plan.layers) is None or self._begun is None:
            return
        of = len(self._begun.model.model.model.layers)
        if self._small is None or num > of:
            reason = f"it has {of}. Ask for fewer." if self._small else "it is a draft of this target. Leave the number out."
            raise BackendError(f"{num} layers cannot be kept of {self._plan.start}: {reason}")

    def card(self) -> dict[str, Any]:
        """Make the draft and measure it; all that is known of it."""
        plan, target, begun = self._plan, self._target, self._begun
        if plan.ends and not (plan.out / STATE).exists():
            raise DataError(f"nothing has been trained in {plan.out} yet, so there is no draft to make of it. Leave --end out.")
        asked = self._asked()
        settled = self._settled(asked)
        shape, paths = settled["shape"], self._paths(settled["num_shards"])
        self._write(paths, shape.kept)
        lengths, shares = _survey(paths, target.vocab_size)
        draft, trainer = self._trained(settled, paths, lengths, shares, asked)
        self._tell("measuring")
        with writing(plan.out, safe="What was written and trained"):
            files = saving.save(draft, target, plan.out, kept=None if self._small else shape.kept)
        answers = self._answered([q.prompt for q in self._held], plan.sampling, layer=shape.kept, seed=(plan.seed, 2))
        written = Target(str(plan.out / files[0]), plan.device).writer
        found = measuring.by_source(target.writer, written, [q.source for q in self._held], answers)
        card = {
            "target": {"name": short_name(plan.target), "fingerprint": target.source.fingerprint},
            "draft": {"files": files, "shape": asdict(shape), "parameters": sum(p.numel() for p in trainer.own)}
            | ({"layers": settled["layers"]} if settled["layers"] else {}),
            "tried": settled["tried"],
            "start": begun and {"name": short_name(begun.model.name), "fingerprint": begun.model.source.fingerprint},
            "data": {
                "sources": self._sources,
                "licence": plan.licence,
                "sampling": asdict(plan.sampling),
                "tokens": sum(whole - prompt for shard in lengths for prompt, whole in shard),
            },
            "training": {"steps": trainer.step, **asdict(self._course)},
            "acceptance": {source: {k: round(v, 4) for k, v in by.items()} for source, by in found.items()},
            "versions": versions("torch"),
        }
        cache_dir.write(plan.out / CARD, json.dumps(card, indent=1) + "\n")
        return card

    def _answered(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, layer: int, seed: tuple[int, ...]
    ) -> list[TextPiece]:
        found = text.answered(self._target, prompts, sampling, max_tokens=self._plan.max_tokens, layer=layer, seed=seed)
        return [replace(piece, state=piece.state[:, :0]) for piece in found] if self._small else found  # it reads tokens

    def _paths(self, num: int) -> list[Path]:
        return [self._plan.out / TEXT / f"text-{i:05d}.safetensors" for i in range(num)]

    def _asked(self) -> str:
        """Digest of what the draft depends on."""
        options = asdict(self._plan)
        parts = [options[name] for name in ("sampling", "shape", "start", "course", "max_tokens", "seed", "minutes", "tokens")]
        parts += [self._plan.layers] if self._plan.layers else []
        models = [self._target.source.fingerprint, self._begun and self._begun.model.source.fingerprint]
        found = json.dumps([parts, models, self._prompts], sort_keys=True, default=str)
        return hashlib.sha256(found.encode()).hexdigest()[:16]

    def _settled(self, asked: str) -> dict[str, Any]:
        """Contents of `plan.json`, as an earlier run decided or decided now: `shape`, `num_shards`, the `layers` that a small
        model keeps, and what was measured, `passes` and `tried`."""
        path = self._plan.out / PLAN
        if not path.is_file():
            cache_dir.write(path, json.dumps({"asked": asked, **self._decided()}, indent=1) + "\n")
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            settled = {
                "shape": Shape(**found["shape"]),
                "num_shards": int(found["num_shards"]),
                "layers": found.get("layers"),
                "passes": {int(rows): seconds for rows, seconds in found["passes"].items()},
                "tried": list(found["tried"]),
            }
            is_other = found["asked"] != asked
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(f"{path} is damaged ({error}). Put it back as it was, or distil into another folder.") from error
        if is_other:
            raise DataError(
                f"{self._plan.out} holds a distillation of another kind (target, prompts or options differ). Distil into "
                "another folder with --out, or put back what was changed; nothing is lost."
            )
        return settled

    def _decided(self) -> dict[str, Any]:
        """Decide by a first text, and by the time that it takes."""
        plan = self._plan
        self._tell("choosing a shape")
        began = time.perf_counter()
        num_prompts = SHARD * (1 if plan.minutes is None else self._group)  # the rate is that of a group
        asked = [self._prompts[i % len(self._prompts)] for i in range(num_prompts)]
        first = self._answered(asked, plan.sampling, layer=0, seed=(plan.seed, 0))
        rate = sum(piece.num_answer for piece in first) / (time.perf_counter() - began)
        self._tell(f"choosing a shape: the target writes {rate:,.0f} tokens/s")
        num_tokens = plan.tokens or round(60 * (plan.minutes or 0) * WRITING * rate)
        num_shards = max(1, round(num_tokens / sum(piece.num_answer for piece in first[:SHARD])))
        passes = shapes.pass_seconds(self._target) if plan.shape is None else {}
        found: dict[str, Any] = {"shape": plan.shape, "num_shards": num_shards, "passes": passes, "tried": []}
        if self._small:
            found["tried"] = self._tried(self._small, first[:SHARD], passes, num_shards, num_tokens * plan.course.epochs)
            found["layers"] = found["tried"][0]["layers"]
            found["shape"] = Shape(kept=0, own=len(found["layers"]))
        elif self._begun:
            found["shape"] = self._begun.shape
        elif plan.shape is None:
            found["tried"] = shapes.choose(self._target, first[:SHARD], passes=passes, num_tokens=num_tokens)
            found["shape"] = Shape(**found["tried"][0]["shape"])
        return found | {"shape": asdict(found["shape"])}

    def _tried(
        self, small: Target, pieces: Sequence[TextPiece], passes: dict[int, float], num_shards: int, num_tokens: int
    ) -> list[dict[str, Any]]:
        """Predictions for numbers of a small model's layers, the best first: for the one that was asked for, or for several."""
        plan = self._plan
        wanted = [plan.layers] if plan.layers else trials.depths(len(small.model.model.layers))
        kept = trials.kept(small.quick, pieces, min(wanted), tell=self._tell)
        paths = self._paths(min(trials.SHARDS, num_shards))
        self._write(paths, 0)
        asked = trials.Trials(
            target=self._target,
            small=small,
            paths=paths,
            course=self._course,
            rows=self._rows(small.model),
            passes=passes,
            num_tokens=num_tokens,
            temperature=plan.sampling.temperature,
            tell=self._tell,
        )
        found = asked.run([kept[n] for n in wanted])
        for line in trials.table(found):
            self._say(line)
        return found

    def _rows(self, small: Any) -> torch.Tensor:
        """Places of the tokens that a small model is trained on [V], -1 for others: most of a large vocabulary never occurs."""
        num = min(self._target.vocab_size, int(small.config.vocab_size))  # it may have other padding
        ids = vocabulary.listed(self._target.tokenizer, vocabulary.LISTED) if vocabulary.is_large(num) else range(num)
        return _rows(self._target.vocab_size, torch.tensor([*ids]))

    def _write(self, paths: Sequence[Path], layer: int) -> None:
        """The shards that are missing. Prompts that are too few for them are answered again with other uniforms."""
        size, prompts = self._group, self._prompts
        groups = [paths[first : first + size] for first in range(0, len(paths), size)]
        missing = [number for number, group in enumerate(groups) if not all(path.is_file() for path in group)]
        tokens, began = 0, time.perf_counter()
        for left, number in zip(reversed(range(len(missing))), missing, strict=True):
            asked = []
            for place in range(number * size, number * size + len(groups[number])):
                asked += sorted((prompts[(place * SHARD + j) % len(prompts)] for j in range(SHARD)), key=len)
            sampling = GREEDY if number % 2 else self._plan.sampling
            made = self._answered(asked, sampling, layer=layer, seed=(self._plan.seed, 1, number))
            for place, path in enumerate(groups[number]):
                if not path.is_file():
                    text.write(path, made[place * SHARD : (place + 1) * SHARD])
            tokens += sum(piece.num_answer for piece in made)
            elapsed = time.perf_counter() - began
            minutes = elapsed / (len(missing) - left) * left / 60
            done = 1 - left / len(groups)
            self._tell(f"the target writes {done:.0%}: {tokens / elapsed:,.0f} tokens a second, {minutes:,.0f} min left")

    def _trained(
        self,
        settled: Mapping[str, Any],
        paths: Sequence[Path],
        lengths: list[list[Length]],
        shares: torch.Tensor,
        asked: str,
    ) -> tuple[Any, Trainer]:
        plan, target, shape = self._plan, self._target, settled["shape"]
        draft = network.draft(target.model, shape) if self._begun is None else self._begun.model.model
        if self._small:
            draft = network.of_layers(draft, settled["layers"])
            precision, rows = trials.precision(target, draft), self._rows(draft)
        else:
            precision, ids = target.precision, None
            if shape.tokens is not None:
                ids = shares.topk(shape.tokens).indices.sort().values
            rows = _rows(len(shares), ids)
            draft.config.output_ids = None if ids is None else ids.tolist()
        if self._begun is None and not (plan.out / STATE).exists():
            self._tell("fitting the start")
            first = [piece.ids.tolist() for path in paths[:FITTED] for piece in text.pieces(path)]
            start.fit(draft, target.quick, first, shape)
        temperature = plan.sampling.temperature
        trainer = Trainer(draft, shape.kept, rows, lengths, self._course, precision=precision, temperature=temperature)

        def worth(accepted: float) -> float:
            return shapes.predicted(accepted, settled["tried"][0]["step_s"], settled["passes"])["speed_up"]

        is_timed = bool(settled["tried"])
        trainer.run(paths, plan.out, asked, self._tell, worth=worth if is_timed else None, ends=plan.ends)
        return draft.requires_grad_(False), trainer


def _rows(size: int, ids: torch.Tensor | None) -> torch.Tensor:
    """Places of some tokens, or of all, among themselves [V]; -1 for others."""
    if ids is None:
        return torch.arange(size)
    found = torch.full((size,), -1)
    found[ids] = torch.arange(len(ids))
    return found


def _survey(paths: Sequence[Path], vocab_size: int) -> tuple[list[list[Length]], torch.Tensor]:
    """Lengths of each shard's pieces, and the target's share of each token [V], over all the text."""
    lengths, sums = [], torch.zeros(vocab_size, dtype=torch.float64)
    for path in paths:
        pieces = list(text.pieces(path))
        lengths.append(lengths_of(pieces))
        sums += measuring.sums(pieces, vocab_size)
    return lengths, sums / sums.sum()
