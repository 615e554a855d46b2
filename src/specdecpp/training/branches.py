"""States of the draft under a tree attention mask: what it would see after a token that is not in the text.

After one pass over a batch of clean texts its cache holds every prefix x, X_<i at once. A branch grows from each: its
tokens stand at the positions after the prefix and attend to the prefix, to the branch and to nothing else. One token deep it
is a *leaf*, the state at a draft token on the clean prefix, exactly. Deeper it is a *discarded
branch*: a rejected draft token and what the draft goes on with. One level of many branches is one forward pass, and a
tree of the target that grows with the same tokens says what it would have made of them.

A model takes part if it obeys a mask [B, 1, queries, keys] and the positions it is given; that is put to the test.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache

from specdecpp.backends import EagerModel
from specdecpp.errors import BackendError
from specdecpp.head import features
from specdecpp.sampling import Sampling, penalised, probabilities
from specdecpp.training.responses import draw, roomy_cache

ADVICE = "Leave 'leaf' out of collect.features and set collect.branches to null, or choose another draft."
TARGET_ADVICE = "Set collect.branches.odds to false, or choose another target."
PASS = 512
"""Tokens of one pass over branches: enough to keep a processor busy."""


@dataclass(frozen=True, kw_only=True)
class Branches:
    """One discarded branch at every position of an answer of N tokens, up to K tokens long.

    token[i, 0] ~ norm((q_i - p_i)+) is the rejected draft token, the others are drawn from q after it. `length` counts the
    real ones: a branch ends after an end-of-text token and where the context ends; it is 0 where q_i <= p_i everywhere, so
    that nothing can be rejected, but for answers that rounding took out of both (`grow_branches`). log_q, entropy and gap are
    of the distribution that gave the token, `state` is the draft's state at it; beyond the length they are 0. What takes the
    target is there only where it was asked for.
    """

    token: Int[Tensor, "N K"]
    length: Int[Tensor, " N"]
    log_q: Float[Tensor, "N K"]
    entropy: Float[Tensor, "N K"]
    gap: Float[Tensor, "N K"]
    state: Float[Tensor, "N K D"]
    log_ratio: Float[Tensor, "N K"] | None = None
    """log p - log q of the token after the answer's prefix and the branch before it, unclipped; -inf where p is 0."""
    overlap: Float[Tensor, "N K"] | None = None
    """1 - TV(p, q) of the position after the token: the expected acceptance of the next one."""


@dataclass(frozen=True, kw_only=True)
class BranchRows:
    """Where M positions of the answers lie in a batch of B rows, and how long the prefix of each is."""

    num_rows: int
    batch: Int[Tensor, " M"]
    index: Int[Tensor, " M"]
    prefix: Int[Tensor, " M"]

    @classmethod
    def of(cls, prompts: Sequence[int], answers: Sequence[int], device: torch.device) -> "BranchRows":
        """For rows of so many tokens of prompt and answer."""
        triples = [(b, i, p + i) for b, (p, n) in enumerate(zip(prompts, answers, strict=True)) for i in range(n)]
        columns = torch.tensor(triples, device=device).unbind(-1)
        return cls(num_rows=len(prompts), batch=columns[0], index=columns[1], prefix=columns[2])

    def to(self, device: torch.device) -> "BranchRows":
        return replace(self, batch=self.batch.to(device), index=self.index.to(device), prefix=self.prefix.to(device))

    def parts(self, width: int) -> Iterator[tuple[Int[Tensor, " m"], "BranchRows"]]:
        """`width` neighbouring positions of every answer at a time: which of the M they are, and where they lie."""
        for start in range(0, int(self.index.max()) + 1, width):
            at = ((self.index >= start) & (self.index < start + width)).nonzero()[:, 0]
            yield at, replace(self, batch=self.batch[at], index=self.index[at] - start, prefix=self.prefix[at])

    def scattered(self, values: Int[Tensor, " M"]) -> Int[Tensor, "B L"]:
        """One row for each answer, padded with 0 to the longest."""
        shape = (self.num_rows, int(self.index.max()) + 1)
        return values.new_zeros(shape).index_put((self.batch, self.index), values)

    def gathered(self, values: Float[Tensor, "B L X"]) -> Float[Tensor, "M X"]:
        return values[self.batch, self.index]


class BranchTree:
    """A model's cache over T columns of clean texts, and the branches that have grown from it, one for each of M positions.

    The cache must come from a plain pass over right-padded texts. `grow` adds a level, `clear` cuts all of them off; only
    then may another tree grow from the same cache.
    """

    def __init__(self, backend: EagerModel, cache: Cache, rows: BranchRows):
        rows = rows.to(backend.device)
        self.backend, self.cache, self.rows = backend, cache, rows
        self.num_columns = int(cache.get_seq_length())
        self.num_levels = 0
        self._prefix = rows.scattered(rows.prefix)
        columns = torch.arange(self.num_columns, device=backend.device)
        self._text = columns < self._prefix.unsqueeze(-1)
        self._own = torch.eye(self._prefix.shape[1], dtype=torch.bool, device=backend.device).expand(len(self._prefix), -1, -1)

    def grow(self, tokens: Int[Tensor, " M"]) -> tuple[Float[Tensor, "M V"], Float[Tensor, "M D"]]:
        """One more token on each branch: the logits after it and the state at it."""
        self.num_levels += 1
        allowed = torch.cat([self._text, *[self._own] * self.num_levels], -1).unsqueeze(1)
        dtype = self.backend.model.dtype
        mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)
        positions = self._prefix + self.num_levels - 1
        if self.backend.max_length is not None:
            positions = positions.clamp(max=self.backend.max_length - 1)  # past the context: read, and not used
        logits, hidden = self.backend.offline_pass(
            input_ids=self.rows.scattered(tokens.to(self.backend.device)),
            attention_mask=mask,
            position_ids=positions,
            cache=self.cache,
        )
        return self.rows.gathered(logits), self.rows.gathered(hidden)

    def clear(self) -> None:
        """Back to the clean texts."""
        if self.num_levels:
            self.cache.crop(-self.num_levels * self._prefix.shape[1])  # negative: how many to remove, in transformers 5
        self.num_levels = 0


def believed(
    logits: Float[Tensor, "M V"],
    sampling: Sampling,
    seen: Bool[Tensor, "M V"] | None,
    listed: Bool[Tensor, " V"] | None = None,
) -> tuple[Float[Tensor, "M V"], Float[Tensor, "M V"]]:
    """(q, what the draft believed): the same, but under greedy drafting the belief is the softmax at T = 1, as in `Draft`.

    With a reduced vocabulary the draft scores tokens that are `listed`, and those seen before."""
    if listed is not None and seen is not None:
        logits = logits.masked_fill(~(listed | seen), -torch.inf)
    q = probabilities(logits, sampling, seen)
    return q, penalised(logits, sampling, seen).softmax(-1) if sampling.is_greedy else q


def rejected_distribution(p: Float[Tensor, "M V"], q: Float[Tensor, "M V"]) -> tuple[Float[Tensor, "M V"], Bool[Tensor, " M"]]:
    """(norm((q - p)+), whether a rejection is possible): the distribution of a rejected draft token; q where none can be.

    Token verification rejects Y ~ q with probability 1 - min(1, p(Y)/q(Y)), so jointly with (q(Y) - p(Y))+.
    """
    residual = (q - p).clamp(min=0)
    mass = residual.sum(-1, keepdim=True)
    is_possible = mass > 0
    return torch.where(is_possible, residual / mass.clamp(min=torch.finfo(q.dtype).tiny), q), is_possible.squeeze(-1)


@dataclass(frozen=True, kw_only=True)
class Distributions:
    """p, q, what the draft believed, and where they are needed the tokens before, at M places in texts or branches."""

    p: Float[Tensor, "M V"]
    q: Float[Tensor, "M V"]
    belief: Float[Tensor, "M V"]
    seen: Bool[Tensor, "M V"] | None = None

    def at(self, chosen: Int[Tensor, " m"]) -> "Distributions":
        """Those of some of the places."""
        seen = None if self.seen is None else self.seen[chosen]
        return Distributions(p=self.p[chosen], q=self.q[chosen], belief=self.belief[chosen], seen=seen)

    def overlap(self) -> Float[Tensor, " M"]:
        """1 - TV(p, q)."""
        return torch.minimum(self.p, self.q).sum(-1).clamp(max=1)

    def log_ratio(self, tokens: Int[Tensor, "M C"]) -> Float[Tensor, "M C"]:
        """log p - log q of tokens that the draft could have proposed, unclipped."""
        return self.p.gather(-1, tokens).log() - self.q.gather(-1, tokens).log()

    def after(
        self, tree: BranchTree, judge: BranchTree | None, tokens: Int[Tensor, " M"], how: "Labelling"
    ) -> tuple["Distributions", Tensor]:
        """(The distributions after one more token, the draft's states at it [M, D]). Without a judge p stays what it was."""
        seen = None if self.seen is None else self.seen.scatter(-1, tokens.unsqueeze(-1), True)
        logits, state = tree.grow(tokens)
        q, belief = believed(logits, how.sampling, seen, how.listed)
        p = self.p if judge is None else probabilities(judge.grow(tokens)[0].to(q.device), how.sampling, seen)
        return Distributions(p=p, q=q, belief=belief, seen=seen), state


@dataclass(frozen=True, kw_only=True)
class Labelling:
    """Settings of the labels. `branch_length` is for the splits or sources that get branches, 0 for none; with
    `branch_odds` the target judges the branches too. `listed` is a reduced vocabulary of the draft, on its device."""

    sampling: Sampling = Sampling()  # noqa: RUF009 (frozen)
    ends: Collection[int] = ()
    draws: int = 4
    features: Collection[str] = ("mixed",)
    branch_length: int = 0
    branch_odds: bool = False
    max_length: int | None = None
    listed: Bool[Tensor, " V"] | None = None


def grow_branches(
    tree: BranchTree,
    judge: BranchTree | None,
    distributions: Distributions,
    odds: Float[Tensor, " M"],
    how: Labelling,
    generator: torch.Generator,
) -> list[Branches]:
    """Draw a rejected draft token at every position and let the draft go on from it; one `Branches` for each answer.

    `distributions` are those of the clean texts, `odds` the chances that the draft token was the answer's own token. Where they
    are 0 a draft token is rejected for certain, even if p = q: the answer was sampled by another pass, and rounding can take a
    token at the edge of a nucleus out of it, or decide a tie the other way. It is drawn from q then. `judge` is a tree of the
    target over the same texts, for log_ratio and overlap; None leaves them out.
    """
    rows, made, places = tree.rows, [], []
    for chosen, part in rows.parts(-(-PASS // rows.num_rows)):
        branching = BranchTree(tree.backend, tree.cache, part)
        judging = judge and BranchTree(judge.backend, judge.cache, part)
        made.append(_grown(branching, judging, distributions.at(chosen), odds[chosen] == 0, how, generator))
        places.append(chosen)
    order = torch.cat(places).argsort().cpu()
    sizes = rows.batch.bincount(minlength=rows.num_rows).tolist()
    columns = {name: torch.cat([columns[name] for columns in made])[order].split(sizes) for name in made[0]}
    return [Branches(**dict(zip(columns, part, strict=True))) for part in zip(*columns.values(), strict=True)]


def _grown(
    tree: BranchTree,
    judge: BranchTree | None,
    distributions: Distributions,
    is_lost: Bool[Tensor, " M"],
    how: Labelling,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """The columns of `Branches` at the positions of a tree, which is cleared afterwards."""
    source, is_possible = rejected_distribution(distributions.p, distributions.q)
    alive = is_possible | is_lost
    room = torch.full_like(tree.rows.prefix, how.branch_length)
    if how.max_length is not None:
        room = (how.max_length - tree.rows.prefix).clamp(max=how.branch_length)
    ends = torch.tensor(sorted(how.ends), device=source.device, dtype=torch.long)
    levels: list[dict[str, Tensor]] = []
    for level in range(how.branch_length):
        alive = alive & (room > level)
        token = source.argmax(-1, keepdim=True) if how.sampling.is_greedy else draw(source, 1, generator)
        token = token.masked_fill(~alive.unsqueeze(-1), 0)
        belief = distributions.belief
        numbers = {
            "log_q": features.log_q(belief, token[:, 0]),
            "entropy": features.entropy(belief),
            "gap": features.gap(belief),
        }
        before, (distributions, state) = distributions, distributions.after(tree, judge, token[:, 0], how)
        if judge is not None:
            numbers |= {"log_ratio": before.log_ratio(token)[:, 0], "overlap": distributions.overlap()}
        numbers = {name: values.float().masked_fill(~alive, 0) for name, values in numbers.items()}
        state = half(state).masked_fill(~alive.unsqueeze(-1), 0)
        levels.append({"token": token[:, 0], "length": alive.long(), "state": state, **numbers})
        source, alive = distributions.q, alive & ~torch.isin(token[:, 0], ends)
    for grown in (tree, judge):
        if grown is not None:
            grown.clear()
    columns = {name: torch.stack([level[name] for level in levels], 1).cpu() for name in levels[0]}
    return columns | {"length": columns["length"].sum(-1)}


def half(states: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """States as they are stored: float16, with what is beyond its range cut to it."""
    limit = torch.finfo(torch.float16).max
    return states.clamp(-limit, limit).half()


def check_tree_mask(backend: EagerModel, *, longest: int, advice: str = ADVICE) -> None:
    """Raise `BackendError` with the advice unless the model obeys a tree attention mask on texts of up to `longest` tokens.

    A leaf and a branch of two tokens are compared with the same tokens read in a row.
    """
    name, window = type(backend.model).__name__, _window(backend.model.config.get_text_config())
    if window is not None and window < longest:
        raise BackendError(
            f"{name} attends to the last {window} tokens only and texts may have {longest}; a tree mask replaces the mask "
            f"that says so. {advice}"
        )
    try:
        gap = _probe(backend)
    except Exception as error:  # whatever a forward pass may raise that does not know such a mask
        raise BackendError(f"{name} fails under a tree attention mask ({type(error).__name__}: {error}). {advice}") from error
    if not gap <= (1e-3 if backend.model.dtype in (torch.float32, torch.float64) else 5e-2):
        raise BackendError(
            f"{name} gives a branch other states under a tree attention mask than the same tokens in a row (relative "
            f"difference {gap:.3g}): it ignores the mask or the positions. {advice}"
        )


def _probe(backend: EagerModel) -> float:
    """The largest relative difference between branches of two tokens and the same tokens read in a row."""
    text = [t % backend.vocab_size for t in (1, 5, 2, 7, 3, 4)]
    cache, rows = roomy_cache(), BranchRows.of([2], [4], backend.device)
    backend.offline_pass(input_ids=torch.tensor([text], device=backend.device), cache=cache)
    tree, tokens = BranchTree(backend, cache, rows), (rows.prefix * 3 + 1) % backend.vocab_size
    grown = torch.stack([tree.grow(tokens)[1], tree.grow(tokens.flip(0))[1]], 1).float()
    gaps = []
    for i, prefix in enumerate(rows.prefix.tolist()):
        branch = [int(tokens[i]), int(tokens.flip(0)[i])]
        _, alone = backend.offline_pass(input_ids=torch.tensor([text[:prefix] + branch], device=backend.device))
        gaps.append(float((alone[0, -2:].float() - grown[i]).abs().max() / alone.float().abs().max().clamp(min=1e-6)))
    return max(gaps)


def _window(config: Any) -> int | None:
    """The sliding window of a model, None where every layer sees everything."""
    kinds = getattr(config, "layer_types", None)
    windows = [w for w in (getattr(config, f, None) for f in ("sliding_window", "attention_window")) if isinstance(w, int)]
    return None if kinds is not None and "sliding_attention" not in kinds else min(windows, default=None)
