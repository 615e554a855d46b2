"""A draft for a target that has none, from prompts to a verdict; each phase keeps what is finished, so that a run which was
killed at any moment is started again with the same command and ends with the same draft.

    out/plan.json                 what was settled when it began: shape, prompts, tokens, steps
    out/text/                     the target's own text, with what the draft learns of it (`writing`, `text`)
    out/start.pt, training.pt     the start in closed form (`start`), and the training (`training`)
    out/draft/, draft.gguf        the draft: a checkpoint, and beside a GGUF file one like it
    out/labels/, heads/           the recipe of its head (`training.pipeline`)
    out/card.json                 all that is known of it: data, steps, acceptance, verdict
"""

import hashlib
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import specdecpp
from specdecpp import cache_dir
from specdecpp.decoder import encode
from specdecpp.distillation import measuring, network, saving, shapes, start, text
from specdecpp.distillation.network import Shape
from specdecpp.distillation.plan import SHARD, DistilPlan
from specdecpp.distillation.rounding import precision_of
from specdecpp.distillation.target import Target
from specdecpp.distillation.training import STATE, Length, Lesson, Student, own_weights, put, timetable, train, trained_layers
from specdecpp.distillation.writing import WrittenTexts, writer_of
from specdecpp.errors import BackendError, DataError
from specdecpp.loading.pair import Pair, common_vocabulary, short_name
from specdecpp.loading.tokenizers import check_same_tokenizer
from specdecpp.policy_spec import as_prompt
from specdecpp.training.checkpoints import saved
from specdecpp.training.folders import claimed
from specdecpp.training.prompts import Prompt, gather
from specdecpp.training.workers import spread

PLAN, TEXT, START, CARD = "plan.json", "text", "start.pt", "card.json"
HELD = 24
"""Prompts that the draft is measured on, and not trained on."""
FITTED = 2
"""Shards that the start is fitted on: some ten thousand tokens are enough (`start`)."""
WRITING = 0.55
"""The share of a budget in minutes that the target writes for; the rest is for training."""


@dataclass(frozen=True, kw_only=True)
class Settled:
    """Decisions of a run when it began. `num_shards` are of the text, of about `shard_tokens` each."""

    asked: str
    shape: Shape
    num_shards: int
    shard_tokens: int
    tried: tuple[dict[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class DistilStep:
    """Where a run stands: what it is doing, how far it is of 1, and figures in words."""

    doing: str
    done: float
    told: str = ""


Tell = Callable[[DistilStep], None]


def distil(plan: DistilPlan, *, tell: Tell = lambda step: None, ray: str | None = None) -> dict[str, Any]:
    """Make what is missing of a draft in `plan.out`; its card. The head and the verdict are `finish`'s.

    `ray` is "local" or the address of a cluster: the target's text is then written by its workers, which load `plan.target`
    themselves.

    Raises `DataError` for prompts that cannot be read or are too few, for a folder that holds another distillation or that
    another run works in, and for damaged files in it; `PairError` and `BackendError` for a target that cannot be loaded or cut.
    """
    with claimed(plan.out):
        return _distilled(plan, tell, ray)


def _distilled(plan: DistilPlan, tell: Tell, ray: str | None) -> dict[str, Any]:
    texts = gather(plan.sources, seed=plan.seed)  # before a model is loaded: a file that is not there is told at once
    target = Target(plan.target, plan.device)
    network.check(target.model, plan.shape)
    begun = None if plan.start is None else _begun(plan.start, target, plan.shape)
    saving.check(target, begun and begun.whole)
    prompts = _encoded(texts, plan, target)
    held, prompts = prompts[:HELD], prompts[HELD:]
    settled = _settled(plan, target, begun, prompts, tell)
    _write(plan, target, settled, prompts, tell, ray)
    paths = [plan.out / TEXT / text.name_of(i) for i in range(settled.num_shards)]
    survey = _surveyed(paths, target.vocab_size)
    draft, student, done = _trained(plan, target, begun, settled, paths, survey, tell)
    tell(DistilStep(doing="measuring", done=0.0))
    files = saving.save(draft, target, settled.shape, plan.out, is_cut=begun is None or begun.is_cut)
    pieces = writer_of(plan, target, settled.shape.kept).pieces([ids for _, ids in held], seed=(plan.seed, 2))
    written = Target(str(plan.out / files[0]), plan.device).model
    figures = measuring.by_source(target.model, written, [source for source, _ in held], pieces)
    card = {
        "target": {"name": short_name(plan.target), "fingerprint": target.source.fingerprint},
        "draft": {"files": files, "shape": asdict(settled.shape), "parameters": sum(p.numel() for p in student.own)},
        "start": begun and {"name": short_name(begun.of.name), "fingerprint": begun.of.source.fingerprint},
        "data": {
            "sources": sorted({source for source, _ in (*held, *prompts)}),
            "licence": plan.licence,
            "sampling": asdict(plan.sampling),
            "tokens": sum(whole - prompt for of in survey.lengths for prompt, whole in of),
        },
        "training": {"steps": student.steps, **asdict(plan.course), "last": [asdict(lesson) for lesson in done[-1:]]},
        "acceptance": figures,
        "versions": {"specdecpp": specdecpp.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    cache_dir.write(plan.out / CARD, json.dumps(card, indent=1) + "\n")
    tell(DistilStep(doing="measuring", done=1.0))
    return card


def kept(out: Path) -> str:
    """State of an interrupted distillation in its folder, and how to go on."""
    shards = len(text.done(out / TEXT))
    parts = [f"{shards} {'shards' if shards > 1 else 'shard'} of text"] if shards else []
    parts += [words for name, words in ((STATE, "the training so far"), (saving.DRAFT, "a draft")) if (out / name).exists()]
    return f"{out} keeps {', '.join(parts) or 'nothing yet that takes long'}. Run the same command again to go on from there."


@dataclass(frozen=True)
class _Begun:
    """The draft that `plan.start` names: a draft that was cut from this target, of that shape, or a small model that is
    trained whole."""

    of: Target
    shape: Shape | None

    @property
    def is_cut(self) -> bool:
        return self.shape is not None

    @property
    def whole(self) -> Target | None:
        return None if self.is_cut else self.of


def _begun(name: str, target: Target, asked: Shape | None) -> _Begun:
    """Raises `PairError` for a model that could not be the target's draft, `BackendError` for a shape that is not its own."""
    small = Target(name, target.device)
    network.check(small.model)
    check_same_tokenizer(target.tokenizer, small.tokenizer)
    common_vocabulary(target.source, small.source, num_tokens=max(target.tokenizer.get_vocab().values()) + 1)
    shape = network.shape_of(small.model, target.model)
    if asked is None:
        return _Begun(small, shape)
    num = len(small.model.model.layers)
    if shape is None or asked.kept > shape.kept or asked.kept + asked.own != num:
        kept = "none" if shape is None else shape.kept
        raise BackendError(
            f"{name} has {num} layers, {kept} of them from the target, so it cannot go on as {asked.kept}+{asked.own}. Keep as "
            "many of them or fewer, or leave the layers out."
        )
    return _Begun(small, replace(shape, kept=asked.kept, own=asked.own))


def _encoded(texts: Sequence[Prompt], plan: DistilPlan, target: Target) -> list[tuple[str, list[int]]]:
    """(source, ids) of every prompt that leaves room for an answer, in an order of the seed's."""
    pair = Pair(target=target.writer, draft=target.writer, tokenizer=target.tokenizer)
    found = [(p.source, encode(pair, as_prompt(pair, p.text))) for p in texts]
    room = min(n for n in (target.context, 2**31) if n is not None) - plan.max_tokens
    kept = [(source, ids) for source, ids in found if 0 < len(ids) <= room]
    if len(kept) < 2 * HELD:
        raise DataError(
            f"{len(kept)} prompts leave room for an answer of {plan.max_tokens} tokens, and a draft needs {2 * HELD}: {HELD} "
            "to measure it, the others to train it. Give more prompts, or shorter ones."
        )
    return kept


def _settled(
    plan: DistilPlan,
    target: Target,
    begun: _Begun | None,
    prompts: Sequence[tuple[str, list[int]]],
    tell: Tell,
) -> Settled:
    """Read the decisions of an earlier run, else decide now: from a first text, and from the time that it takes."""
    asked = hashlib.sha256(
        json.dumps(
            [plan.asked(), _marks(target, begun and begun.of), [ids for _, ids in prompts]], sort_keys=True, default=str
        ).encode()
    ).hexdigest()[:16]
    path = plan.out / PLAN
    if path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            told = Settled(**found | {"shape": Shape(**found["shape"]), "tried": tuple(found["tried"])})
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{path} is damaged ({error}). Put it back as it was, or distil into another folder.") from error
        if told.asked != asked:
            raise DataError(
                f"{plan.out} holds a distillation of another kind (target, prompts or options differ). Distil into another "
                "folder with --out, or put back what was changed; nothing is lost."
            )
        return _raised(plan, told)
    tell(DistilStep(doing="choosing a shape", done=0.0))
    began = time.perf_counter()
    some = SHARD * (1 if plan.minutes is None else WrittenTexts.together(target))  # the rate is that of a group
    first = writer_of(plan, target, 0).pieces([ids for _, ids in prompts[:some]], seed=(plan.seed, 0))
    num = sum(piece.num_answer for piece in first)
    rate, first = num / (time.perf_counter() - began), first[:SHARD]
    num = sum(piece.num_answer for piece in first)
    wanted = plan.tokens or round(60 * (plan.minutes or 0) * WRITING * rate)
    tell(DistilStep(doing="choosing a shape", done=0.5, told=f"the target writes {rate:,.0f} tokens/s"))
    fixed, whole = (plan.shape, None) if begun is None else (begun.shape, begun.whole)
    best, tried = shapes.choose(target, first, num_tokens=wanted, fixed=fixed, small=whole)
    settled = Settled(
        asked=asked,
        shape=best.shape,
        num_shards=max(1, round(wanted / num)),
        shard_tokens=num,
        tried=tuple(asdict(candidate) for candidate in tried),
    )
    cache_dir.write(path, json.dumps(asdict(settled), indent=1) + "\n")
    return settled


def _marks(*models: Target | None) -> list[str | None]:
    return [model and model.source.fingerprint for model in models]


def _raised(plan: DistilPlan, settled: Settled) -> Settled:
    """With more text where more tokens are asked for than at first; the layers trained so far then start a new training."""
    num_shards = round((plan.tokens or 0) / settled.shard_tokens)
    if num_shards <= settled.num_shards:
        return settled
    if (plan.out / STATE).exists():
        with cache_dir.whole(plan.out / START) as part:
            torch.save(trained_layers(plan.out / STATE), part)
        (plan.out / STATE).unlink()
    more = replace(settled, num_shards=num_shards)
    cache_dir.write(plan.out / PLAN, json.dumps(asdict(more), indent=1) + "\n")
    return more


def _write(
    plan: DistilPlan,
    target: Target,
    settled: Settled,
    prompts: Sequence[tuple[str, list[int]]],
    tell: Tell,
    ray: str | None,
) -> None:
    """The shards that are missing. Where there are fewer prompts than it takes, they are answered again with other
    uniforms."""
    texts, num_shards, folder = WrittenTexts.of(plan, target, settled.shape.kept), settled.num_shards, plan.out / TEXT
    folder.mkdir(exist_ok=True)
    finished, size = set(text.done(folder)), texts.together(target)
    groups = [range(start, min(start + size, num_shards)) for start in range(0, num_shards, size)]
    missing = {
        number: [[prompts[(index * SHARD + i) % len(prompts)][1] for i in range(SHARD)] for index in group]
        for number, group in enumerate(groups)
        if not finished.issuperset(group)
    }
    tokens, began = 0, time.perf_counter()
    if ray is None or not missing:
        made = ((number, *texts.made(target, number, chosen)) for number, chosen in missing.items())
    else:
        made = spread(texts, missing, address=ray, threads=torch.get_num_threads())
    for at, (number, contents, num) in enumerate(made):
        for index, content in zip(groups[number], contents, strict=True):
            if index not in finished:
                text.write(folder, index, content)
        finished.update(groups[number])
        tokens += num
        elapsed = time.perf_counter() - began
        left = elapsed / (at + 1) * (len(missing) - at - 1)
        told = f"{tokens:,} tokens, {tokens / elapsed:,.0f} a second, {left / 60:,.0f} min left"
        tell(DistilStep(doing="the target writes", done=len(finished) / num_shards, told=told))


@dataclass(frozen=True, kw_only=True)
class _Survey:
    """Sums over all the text, read once: the lengths of each shard's pieces, and the target's share of each token [V]."""

    lengths: list[list[Length]]
    shares: torch.Tensor


def _surveyed(paths: Sequence[Path], vocab_size: int) -> _Survey:
    lengths, shares = [], torch.zeros(vocab_size, dtype=torch.float64)
    for path in paths:
        pieces = list(text.pieces(path))
        lengths.append([(piece.num_prompt, len(piece.ids)) for piece in pieces])
        shares += shapes.sums(pieces, vocab_size)
    return _Survey(lengths=lengths, shares=shares / shares.sum())


def _trained(
    plan: DistilPlan,
    target: Target,
    begun: _Begun | None,
    settled: Settled,
    paths: Sequence[Path],
    survey: _Survey,
    tell: Tell,
) -> tuple[Any, Student, list[Lesson]]:
    """The draft, trained."""
    model, shape, vocab_size = target.model, settled.shape, target.vocab_size
    small = begun and begun.whole
    draft = network.draft(model, shape) if small is None else small.model
    num = min(vocab_size, int(draft.config.vocab_size))  # of a small model the padding may be another
    ids = torch.arange(num)
    if shape.tokens is not None and shape.tokens < num:
        ids = survey.shares[:num].topk(shape.tokens).indices.sort().values
    own = network.tail(draft, shape.kept)
    if not (plan.out / START).exists():
        tell(DistilStep(doing="the start", done=0.0))
        if begun is not None and begun.is_cut:
            put(own, own_weights(network.tail(begun.of.model, shape.kept)))
        elif small is None and start.can_fit(model):
            first = [piece.ids.tolist() for path in paths[:FITTED] for piece in text.pieces(path)]
            start.fit(draft, target.quick, first, shape)
        with cache_dir.whole(plan.out / START) as part:
            torch.save(own_weights(own), part)
    put(own, saved(plan.out / START))
    rows = torch.full((vocab_size,), -1)
    rows[ids] = torch.arange(len(ids))
    steps = sum(len(batches) for _, batches in timetable(survey.lengths, plan.course))
    output = draft.lm_head.weight.detach()[ids.to(model.device)]
    precision = precision_of(target) if small is None else None
    student = Student(own, output, rows, plan.course, steps, is_whole=not shape.kept, precision=precision)
    origin = {"asked": settled.asked, "steps": steps, "precision": precision and precision.value}
    recent: list[float] = []

    def heard(lesson: Lesson) -> None:
        recent.append(lesson.overlap)
        left = lesson.elapsed_s / len(recent) * (lesson.steps - lesson.step)
        mean = sum(recent[-50:]) / len(recent[-50:])
        told = f"step {lesson.step:,} of {lesson.steps:,}, acceptance at least {mean:.3f}, {left / 60:,.0f} min left"
        tell(DistilStep(doing="training", done=lesson.step / lesson.steps, told=told))

    done = train(student, paths, survey.lengths, plan.out, origin, tell=heard)
    draft.config.output_ids = None if len(ids) == num else ids.tolist()
    return draft.requires_grad_(False), student, done
