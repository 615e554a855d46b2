"""Labels by teacher forcing: what would have happened to a draft token at every position of an answer X ~ p.

p and q at position i are the *warped* distributions after the clean prefix x, X_<i, under the sampling parameters that will
be served. Draft tokens Y ~ q are drawn and scored against p; the draft's states that a head may read go with them:

    states[i]      the state that gave q_i: what a look-ahead score reads; states[i + 1] is the state at X_i
    mixed[i]       the state at Z_i of the paper's mixed text: what the paper's head is trained on
    leaf[i]        the state at Y_i attending to x, X_<i only: what a lagged head meets in use, exactly
    branches[i]    what follows a rejected draft token
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdecpp.backends import EagerModel
from specdecpp.head import features
from specdecpp.sampling import probabilities, seen_rows
from specdecpp.training.branches import (
    Branches,
    BranchRows,
    BranchTree,
    Distributions,
    Labelling,
    believed,
    grow_branches,
    half,
)
from specdecpp.training.prompts import Split
from specdecpp.training.responses import draw, roomy_cache, seen_by

TOP_K = 8
KEEP = 0.15
"""How often the mixed text keeps the answer's token: r of the paper."""
LONGEST_STEP = 10
BUDGET, NARROWEST = 2**25, 2**11
"""Logits of one label batch, B T V: about a gigabyte with all that is made of them. A smaller V counts as 2,048."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """A prompt and the answer that was sampled for it, if any yet, as ids."""

    prompt: Sequence[int]
    answer: Sequence[int] = ()
    source: str = ""
    split: Split = "train"

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True, kw_only=True)
class Record:
    """One answer X of N tokens with its labels. C draft tokens are drawn at every position; D is the draft's width.

    Logarithms are natural. Under greedy sampling log_q, entropy and top are of the softmax at T = 1, which is what a policy
    sees then, and log_ratio compares the two choices.
    """

    source: str
    split: Split
    prompt: Int[Tensor, " P"]
    answer: Int[Tensor, " N"]
    candidate: Int[Tensor, "N C"]
    log_q: Float[Tensor, "N C"]
    log_ratio: Float[Tensor, "N C"]
    """log p(Y) - log q(Y), unclipped: the label for block verification. -inf where p(Y) is 0."""
    overlap: Float[Tensor, " N"]
    """1 - TV(p, q) = sum min(p, q): the expected acceptance, before anything is drawn."""
    entropy: Float[Tensor, " N"]
    """Of q, in nats."""
    top: Float[Tensor, "N k"]
    """The largest probabilities of q, falling."""
    answer_log_q: Float[Tensor, " N"]
    """log q(X_i); -inf where the draft could not have proposed it."""
    answer_log_ratio: Float[Tensor, " N"] | None = None
    """log p(X_i) - log q(X_i), unclipped; inf where the draft could not have proposed it. None in older collections."""
    answer_odds: Float[Tensor, " N"]
    """b_i = min(1, q(X_i)/p(X_i)): the chance that the draft token was the answer's own token."""
    depth: Int[Tensor, " N"]
    """From 1: the depth of the position in a simulated step, which ends where a coin of b_i fails, or at a length uniform
    in 1..10."""
    states: Float[Tensor, "N1 D"]
    mixed: Float[Tensor, "N D"] | None = None
    is_mixed: Bool[Tensor, " N"] | None = None
    """True where Z_i is the draft token `candidate[i, 0]`; the paper's loss is taken only there."""
    leaf: Float[Tensor, "N D"] | None = None
    branches: Branches | None = None

    @property
    def accept(self) -> Float[Tensor, "N C"]:
        """min(1, p(Y)/q(Y)): the paper's soft label."""
        return self.log_ratio.exp().clamp(max=1)

    @property
    def gap(self) -> Float[Tensor, " N"]:
        """The lead of the likeliest token over the second; 0 where there is no second."""
        return self.top[:, 0] - self.top[:, min(1, self.top.shape[1] - 1)]


@torch.inference_mode()
def label(
    target: EagerModel, draft: EagerModel, answers: Sequence[Sampled], how: Labelling, generator: torch.Generator
) -> list[Record]:
    """Records in the order of the answers, made in batches of similar length. The generator lives where the draft does."""
    records: dict[int, Record] = {}
    for chosen in batches([a.num_tokens for a in answers], vocab_size=target.vocab_size):
        made = _label_batch(target, draft, [answers[i] for i in chosen], how, generator)
        records |= zip(chosen, made, strict=True)
    return [records[i] for i in range(len(answers))]


def batches(lengths: Sequence[int], *, vocab_size: int, budget: int = BUDGET) -> list[list[int]]:
    """Indices sorted by length and cut so that a padded batch has at most `budget` logits; a batch has at least one row."""
    parts: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if parts and (len(parts[-1]) + 1) * lengths[i] * max(vocab_size, NARROWEST) <= budget:
            parts[-1].append(i)
        else:
            parts.append([i])
    return parts


def _label_batch(
    target: EagerModel, draft: EagerModel, answers: Sequence[Sampled], how: Labelling, generator: torch.Generator
) -> list[Record]:
    """One padded batch: the clean pass of both models, the draws, then the draft's other passes."""
    texts, sizes = [[*a.prompt, *a.answer] for a in answers], [len(a.answer) for a in answers]
    rows = BranchRows.of([len(a.prompt) for a in answers], sizes, draft.device)
    has_judge = how.branch_length > 0 and how.branch_odds
    q_logits, hidden, tree = _clean(draft, texts, rows, has_tree="leaf" in how.features or how.branch_length > 0)
    p_logits, _, judge = _clean(target, texts, rows, has_tree=has_judge)
    seen = _seen(answers, draft) if how.sampling.needs_seen or how.listed is not None else None
    q, belief = believed(q_logits, how.sampling, seen, how.listed)
    p = probabilities(p_logits.to(draft.device), how.sampling, seen)
    distributions = Distributions(p=p, q=q, belief=belief, seen=seen)
    x = torch.tensor([t for a in answers for t in a.answer], device=draft.device)
    columns = _columns(distributions, x, how.draws, generator)
    columns["depth"] = _depths(columns["answer_odds"], sizes, generator)
    if "mixed" in how.features:
        z, columns["is_mixed"] = mixed_text(x, columns["candidate"][:, 0], generator)
        mixed = [[*a.prompt, *part] for a, part in zip(answers, (z.tolist() for z in z.split(sizes)), strict=True)]
        columns["mixed"] = half(draft.offline_pass(**padded(mixed, draft.device))[1][rows.batch, rows.prefix])
    if tree and "leaf" in how.features:
        columns["leaf"] = half(tree.grow(columns["candidate"][:, 0])[1])
        tree.clear()
    cut: dict[str, Sequence[Any]] = {name: column.cpu().split(sizes) for name, column in columns.items()}
    cut["states"] = [half(hidden[b, len(a.prompt) - 1 : a.num_tokens]).cpu() for b, a in enumerate(answers)]
    if tree and how.branch_length:
        cut["branches"] = grow_branches(tree, judge, distributions, columns["answer_odds"], how, generator)
    return [
        Record(
            source=a.source,
            split=a.split,
            prompt=torch.tensor(a.prompt),
            answer=torch.tensor(a.answer),
            **dict(zip(cut, values, strict=True)),
        )
        for a, *values in zip(answers, *cut.values(), strict=True)
    ]


def _clean(
    backend: EagerModel, texts: Sequence[Sequence[int]], rows: BranchRows, *, has_tree: bool
) -> tuple[Float[Tensor, "M V"], Float[Tensor, "B T D"], BranchTree | None]:
    """(logits before the answers' tokens, states, a tree that grows from the positions) of the texts as they are."""
    cache = roomy_cache() if has_tree else None
    logits, hidden = backend.offline_pass(cache, **padded(texts, backend.device))
    batch, prefix = rows.batch.to(backend.device), rows.prefix.to(backend.device)
    return logits[batch, prefix - 1], hidden, None if cache is None else BranchTree(backend, cache, rows)


def padded(texts: Sequence[Sequence[int]], device: torch.device) -> dict[str, Tensor]:
    """Right-padded texts and their mask: what a causal model reads is not changed by what comes after it."""
    longest = max(map(len, texts))
    ids = [[*text, *[0] * (longest - len(text))] for text in texts]
    mask = [[1] * len(text) + [0] * (longest - len(text)) for text in texts]
    return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}


def _seen(answers: Sequence[Sampled], draft: EagerModel) -> Bool[Tensor, "M V"]:
    """The tokens before each position."""
    prompts = seen_by([a.prompt for a in answers], vocab_size=draft.vocab_size, device=draft.device)
    before = [torch.tensor(a.answer[:-1], dtype=torch.long) for a in answers]
    return torch.cat([seen_rows(*pair) for pair in zip(prompts, before, strict=True)])


def _columns(distributions: Distributions, x: Int[Tensor, " M"], draws: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw the draft tokens and score them and the answer's tokens."""
    p, q, belief = distributions.p, distributions.q, distributions.belief
    candidate, x = draw(q, draws, generator), x.unsqueeze(-1)
    # Rounding can take a token that was sampled out of the top-k of this pass; it then counts as accepted.
    p_x, q_x = p.gather(-1, x)[:, 0].clamp(min=torch.finfo(p.dtype).tiny), q.gather(-1, x)[:, 0]
    columns = {
        "log_q": features.log_q(belief.unsqueeze(1).expand(-1, draws, -1), candidate),
        "log_ratio": distributions.log_ratio(candidate),
        "overlap": distributions.overlap(),
        "entropy": features.entropy(belief),
        "top": belief.topk(min(TOP_K, q.shape[-1]), dim=-1).values,
        "answer_log_q": features.log_q(belief, x[:, 0]),
        "answer_log_ratio": p_x.log() - q_x.log(),
        "answer_odds": (q_x / p_x).clamp(max=1),
    }
    return {"candidate": candidate} | {name: values.float() for name, values in columns.items()}


def mixed_text(
    answer: Int[Tensor, " M"], candidate: Int[Tensor, " M"], generator: torch.Generator
) -> tuple[Int[Tensor, " M"], Bool[Tensor, " M"]]:
    """(Z, whether Z_i is the draft token): X_i with probability `KEEP`, else Y_i."""
    is_mixed = torch.rand(len(answer), generator=generator, device=answer.device) >= KEEP
    return torch.where(is_mixed, candidate, answer), is_mixed


def _depths(odds: Float[Tensor, " M"], sizes: Sequence[int], generator: torch.Generator) -> Int[Tensor, " M"]:
    """The depth of each position in steps that are simulated along each answer."""
    fails = torch.rand(len(odds), generator=generator, device=odds.device) >= odds
    lengths = torch.randint(1, LONGEST_STEP + 1, (len(odds),), generator=generator, device=odds.device)
    depths: list[int] = []
    for coins, drawn in zip(fails.cpu().split(list(sizes)), lengths.cpu().split(list(sizes)), strict=True):
        depth, longest = 0, 0
        for has_failed, length in zip(coins.tolist(), drawn.tolist(), strict=True):
            depth, longest = (1, length) if depth >= longest else (depth + 1, longest)
            depths.append(depth)
            depth = longest if has_failed else depth
    return torch.tensor(depths, device=odds.device)
