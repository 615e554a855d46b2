"""Label records of a process whose p and q are tables of the last token, so that what steps do with them is known exactly."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import distributions
import torch
from torch import Tensor

from specdecpp import AcceptanceHead
from specdecpp.head import Calibration
from specdecpp.training import shards
from specdecpp.training.branches import Branches
from specdecpp.training.labels import Record

NUM_TOP = 8


@dataclass(frozen=True, kw_only=True)
class Process:
    """p and q after each last token, [V, V]; a text starts after token 0. The draft's state at a token is its one-hot row."""

    p: Tensor
    q: Tensor
    end: int | None = None

    @classmethod
    def random(
        cls, num_tokens: int, *, seed: int, spread: float = 1.0, noise: float = 1.0, end: int | None = None
    ) -> "Process":
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(num_tokens, num_tokens, generator=generator, dtype=torch.float64)
        other = logits + noise * torch.randn(num_tokens, num_tokens, generator=generator, dtype=torch.float64)
        return cls(p=logits.softmax(-1), q=other.softmax(-1), end=end)

    @property
    def accept(self) -> Tensor:
        """min(1, p/q) [V, V]."""
        return (self.p / self.q).clamp(max=1)

    @property
    def residual(self) -> Tensor:
        """norm((q - p)+) [V, V]: the distribution of a rejected draft token."""
        rest = (self.q - self.p).clamp(min=0)
        return rest / rest.sum(-1, keepdim=True)

    def text(self, num_tokens: int, generator: torch.Generator) -> list[int]:
        """A draw X ~ p."""
        tokens, last = [], 0
        for _ in range(num_tokens):
            last = draw(self.p[last], generator)
            tokens.append(last)
        return tokens


def pooled_tail(counts: Mapping[Any, int], chances: Mapping[Any, float]) -> float:
    """The chi-square tail of counts against a distribution; outcomes expected fewer than five times count as one."""
    num, total = sum(counts.values()), sum(chances.values())
    assert not [outcome for outcome in counts if chances[outcome] == 0]
    often = {outcome: p / total for outcome, p in chances.items() if num * p / total >= 5}
    found, rare = {outcome: counts.get(outcome, 0) for outcome in often}, 1 - sum(often.values())
    if num * rare >= 1:
        often["rare"], found["rare"] = rare, num - sum(found.values())
    whole = sum(often.values())
    assert len(often) > 5, "the comparison is vacuous"
    return distributions.chi_square_tail(found, {outcome: p / whole for outcome, p in often.items()})


def draw(p: Tensor, generator: torch.Generator) -> int:
    return int(torch.multinomial(p, 1, generator=generator))


def record_of(
    process: Process,
    answer: Sequence[int],
    *,
    generator: torch.Generator,
    draws: int = 4,
    length: int = 10,
    branches: Mapping[int, Sequence[int]] | bool = True,
    features: Sequence[str] = ("mixed", "leaf"),
    source: str = "toy",
    split: Any = "dev",
) -> Record:
    """The record of one answer. `branches` may give the tokens of the branch at a position instead of drawing them."""
    num = len(answer)
    x = torch.tensor(answer)
    last = torch.cat([torch.zeros(1, dtype=torch.long), x[:-1]])
    p, q = process.p[last], process.q[last]
    candidate = torch.multinomial(q, draws, replacement=True, generator=generator)
    log_q = q.log().gather(-1, candidate)
    is_mixed = torch.rand(num, generator=generator) >= 0.15
    states = torch.eye(len(process.p))
    z = torch.where(is_mixed, candidate[:, 0], x)
    depth = torch.arange(num) % 10 + 1
    return Record(
        source=source,
        split=split,
        prompt=torch.tensor([0]),
        answer=x,
        candidate=candidate,
        log_q=log_q.float(),
        log_ratio=(p.log().gather(-1, candidate) - log_q).float(),
        overlap=torch.minimum(p, q).sum(-1).float(),
        entropy=_entropy(q).float(),
        top=q.topk(min(NUM_TOP, q.shape[-1])).values.float(),
        answer_log_q=q.log().gather(-1, x[:, None])[:, 0].float(),
        answer_log_ratio=(p.log() - q.log()).gather(-1, x[:, None])[:, 0].float(),
        answer_odds=(q / p).clamp(max=1).gather(-1, x[:, None])[:, 0].float(),
        depth=depth,
        states=torch.cat([states[:1], states[x]]),
        mixed=states[z] if "mixed" in features else None,
        is_mixed=is_mixed if "mixed" in features else None,
        leaf=states[candidate[:, 0]] if "leaf" in features else None,
        branches=_branches(process, last.tolist(), branches, length, generator) if branches else None,
    )


def records(process: Process, num: int, *, num_tokens: int, seed: int, **options: Any) -> list[Record]:
    """Records of answers drawn from p."""
    generator = torch.Generator().manual_seed(seed)
    return [record_of(process, process.text(num_tokens, generator), generator=generator, **options) for _ in range(num)]


def save(folder: Path, shard: Sequence[Record], **about: Any) -> Path:
    """A collection with one shard, as `collect` would leave it."""
    folder.mkdir(parents=True)
    shards.write(folder, 0, shards.encoded(shard, {}))
    (folder / shards.COLLECTION).write_text(json.dumps(about), encoding="utf-8")
    return folder


def random_head(process: Process, *, seed: int = 0, scale: float = 1.0, **card: Any) -> AcceptanceHead:
    """A head with random weights for the states of a process."""
    size = len(process.p)
    vocabulary = {"vocab_size": size} if card.get("form") == "look_ahead" else {}
    return distributions.random_head(size, seed=seed, scale=scale, **vocabulary, **card)


def logits_of(head: AcceptanceHead, process: Process, *, depth: int = 1) -> Tensor:
    """Raw logits [V, V] of a head for every last token and draft token."""
    v, top = len(process.p), process.q.topk(2).values
    known = {
        "log_q": process.q.log(),
        "entropy": _entropy(process.q)[:, None].expand(v, v),
        "gap": (top[:, :1] - top[:, 1:]).expand(v, v),
        "depth": torch.full((v, v), depth),
    }
    token = torch.arange(v).expand(v, v)
    hidden = torch.eye(v)[:, None].expand(v, v, v) if head.card.form == "look_ahead" else torch.eye(v)[token]
    scalars = torch.stack([known[name].float() for name in head.card.scalars], -1) if head.card.scalars else None
    with torch.no_grad():
        return head(hidden, token, scalars)


def knowing_head(process: Process, bent: Calibration | None = None, **card: Any) -> AcceptanceHead:
    """A look-ahead head whose score is min(1, p/q), or one that `bent` would make of it by its calibration.

    With the weight 100 of the state and of the token a unit of the block is 250 and a little where both fit, and the same
    small number wherever fewer do: enough for a linear output to say anything about each pair.
    """
    v = len(process.p)
    head = random_head(process, form="look_ahead", width=v * v, **card)
    logit = process.accept.clamp(max=1 - 1e-4).logit()
    if bent is not None:
        logit = (logit - bent.bias) * bent.temperature - math.log(bent.rejection_weight)
    assert head.input is not None
    assert head.token is not None
    unit = torch.arange(v * v)
    state, token = unit // v, unit % v
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
        head.input.weight[unit, state] = 100.0
        head.token.weight[token, unit] = 100.0
        block: Any = head.blocks[0]
        block.linear.weight[unit, unit] = 1.0
        block.linear.bias[:] = -150.0
        known = head.blocks(head.input(torch.eye(v)[state]) + head.token(token)).double()
        head.output.weight[0] = torch.linalg.solve(known, logit[state, token]).float()
    return head


def _branches(process: Process, last: list[int], given: Any, length: int, generator: torch.Generator) -> Branches:
    tokens, lengths = torch.zeros(len(last), length, dtype=torch.long), []
    contexts = torch.zeros(len(last), length, dtype=torch.long)
    for i, context in enumerate(last):
        forced = list(given.get(i, ())) if isinstance(given, Mapping) else None
        at, n = context, 0
        while n < length and not (n and at == process.end):
            if forced is not None and n == len(forced):
                break
            distribution = process.residual[at] if n == 0 else process.q[at]
            contexts[i, n] = at
            at = draw(distribution, generator) if forced is None else forced[n]
            tokens[i, n] = at
            n += 1
        lengths.append(n)
    p, q = process.p[contexts], process.q[contexts]
    top = q.topk(2).values
    return Branches(
        token=tokens,
        length=torch.tensor(lengths),
        log_q=q.log().gather(-1, tokens[..., None])[..., 0].float(),
        entropy=_entropy(q).float(),
        gap=(top[..., 0] - top[..., 1]).float(),
        state=torch.eye(len(process.p))[tokens],
        log_ratio=(p.log() - q.log()).gather(-1, tokens[..., None])[..., 0].float(),
        overlap=torch.minimum(process.p, process.q).sum(-1)[tokens].float(),
    )


def _entropy(q: Tensor) -> Tensor:
    return torch.special.entr(q).sum(-1)
