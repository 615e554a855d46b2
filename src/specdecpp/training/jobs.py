"""The work of one shard: a fixed group of prompts, answered and labelled. The same bytes in whichever process it is done."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specdecpp.backends import EagerModel
from specdecpp.decoder import encode
from specdecpp.errors import BackendError
from specdecpp.loading.pair import Pair
from specdecpp.policy_spec import as_prompt
from specdecpp.sampling import Sampling
from specdecpp.training import shards
from specdecpp.training.branches import TARGET_ADVICE, check_tree_mask
from specdecpp.training.labels import Labelling, Record, Sampled, label
from specdecpp.training.prompts import Prompt, Split
from specdecpp.training.recipe import CollectPlan
from specdecpp.training.responses import sample_responses


@dataclass(frozen=True, kw_only=True)
class Question:
    """An encoded prompt."""

    ids: tuple[int, ...]
    source: str
    split: Split


@dataclass(frozen=True, kw_only=True)
class ShardWork:
    """Work on every shard of a collection. `context` is the most tokens that both models hold."""

    plan: CollectPlan
    sampling: Sampling
    ends: tuple[int, ...]
    context: int | None
    provenance: dict[str, Any]

    def labelling(self, *, has_branches: bool) -> Labelling:
        branches = self.plan.branches
        return Labelling(
            sampling=self.sampling,
            ends=self.ends,
            draws=self.plan.draws,
            features=self.plan.features,
            branch_length=branches.length if branches and has_branches else 0,
            branch_odds=branches is not None and branches.odds,
            max_length=self.context,
        )


def backends_of(pair: Pair) -> tuple[EagerModel, EagerModel]:
    """(target, draft). Raises `BackendError` for backends that cannot run a batch."""
    for role, backend in (("target", pair.target), ("draft", pair.draft)):
        if not isinstance(backend, EagerModel):
            raise BackendError(
                f"collection runs whole batches, and the {role} is a {type(backend).__name__}. Use an EagerModel."
            )
    assert isinstance(pair.target, EagerModel), "checked above"
    assert isinstance(pair.draft, EagerModel), "checked above"
    return pair.target, pair.draft


def context_of(pair: Pair) -> int | None:
    """The most tokens that both models hold, None without an end."""
    return min((n for n in (pair.target.max_length, pair.draft.max_length) if n is not None), default=None)


def questions(pair: Pair, prompts: Sequence[Prompt]) -> list[Question]:
    """The prompts as user messages (or as plain text, without a chat template), those that leave no room for an answer left
    out."""
    context = context_of(pair)
    encoded = [Question(ids=tuple(encode(pair, as_prompt(pair, p.text))), source=p.source, split=p.split) for p in prompts]
    return [q for q in encoded if q.ids and (context is None or len(q.ids) < context)]


def groups(items: Sequence[Question], *, size: int) -> list[list[Question]]:
    """The prompts of each shard, sorted by length inside it so that batches waste little."""
    return [sorted(items[i : i + size], key=lambda q: len(q.ids)) for i in range(0, len(items), size)]


def check(pair: Pair, work: ShardWork, items: Sequence[Question]) -> None:
    """Raise `BackendError` if the pair cannot do what the plan asks."""
    target, draft = backends_of(pair)
    plan = work.plan
    has_branches = plan.branches is not None and any(plan.branches.includes(source=q.source, split=q.split) for q in items)
    if has_branches or "leaf" in plan.features:
        longest = max((len(q.ids) for q in items), default=0) + plan.max_tokens + (plan.branches.length if plan.branches else 1)
        longest = longest if work.context is None else min(longest, work.context)
        check_tree_mask(draft, longest=longest)
        if has_branches and plan.branches is not None and plan.branches.odds:
            check_tree_mask(target, longest=longest, advice=TARGET_ADVICE)


def make(
    pair: Pair, work: ShardWork, index: int, items: Sequence[Question], *, tick: Callable[[int], None] = lambda num_tokens: None
) -> tuple[bytes, bytes]:
    """The files of shard `index`. `tick` is told of every new token that was sampled."""
    records = label_all(pair, work, answer_all(pair, work, index, items, tick=tick), index)
    return shards.encoded(records, {**work.provenance, "shard": index})


def answer_all(
    pair: Pair, work: ShardWork, index: int, items: Sequence[Question], *, tick: Callable[[int], None] = lambda num_tokens: None
) -> list[Sampled]:
    """An answer of the target to each prompt."""
    target, _ = backends_of(pair)
    generator = _generator(work.plan.seed, index, 0, target.device)
    answers: list[Sampled] = []
    for start in range(0, len(items), work.plan.batch):
        batch = items[start : start + work.plan.batch]
        sampled = sample_responses(
            target,
            [q.ids for q in batch],
            sampling=work.sampling,
            max_tokens=work.plan.max_tokens,
            ends=work.ends,
            generator=generator,
            max_length=work.context,
            tick=tick,
        )
        answers += [
            Sampled(prompt=q.ids, answer=a, source=q.source, split=q.split) for q, a in zip(batch, sampled, strict=True)
        ]
    return answers


def label_all(pair: Pair, work: ShardWork, answers: Sequence[Sampled], index: int) -> list[Record]:
    """The record of each answer; those that get branches go in batches of their own."""
    target, draft = backends_of(pair)
    generator, branches = _generator(work.plan.seed, index, 1, draft.device), work.plan.branches
    has = [branches is not None and branches.includes(source=a.source, split=a.split) for a in answers]
    records: dict[int, Record] = {}
    for wanted in (False, True):
        chosen = [i for i, has_branches in enumerate(has) if has_branches == wanted]
        how = work.labelling(has_branches=wanted)
        records |= zip(chosen, label(target, draft, [answers[i] for i in chosen], how, generator), strict=True)
    return [records[i] for i in range(len(answers))]


def _generator(seed: int, index: int, stream: int, device: torch.device) -> torch.Generator:
    """An independent stream for each shard and each half of its work."""
    state = np.random.SeedSequence([seed, index, stream]).generate_state(1, np.uint64)[0]
    return torch.Generator(device=device).manual_seed(int(state >> 1))
