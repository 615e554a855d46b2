"""A test of the answers that were timed: all of them must have the target's distribution.

Temperature 0: each answer must be the target's own, token by token. Where two logits of the target tie to within rounding,
a pass over several positions may break the tie otherwise than a pass over one; such a tie is reported, and is no failure.

Sampling: a chi-square test of whole answers against the target's exact distribution. Given what came before, the next token of
a lossless decoder is drawn from p. So at every position the vocabulary is parted by how much likelier the target thinks a
token than the draft does, p/q; the counts of the parts, less what p expects of them, are sums of martingale differences whose
covariance is known exactly, and their quadratic form is chi-square in the limit. What a faulty verification does, such as
accepting too much or a residual without its (p - q)+, moves mass between these very parts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specdecpp.bench.contest import Contest, Heat
from specdecpp.bench.contestants import ALONE
from specdecpp.decoder import Output
from specdecpp.loading.pair import Pair
from specdecpp.policy_spec import label_of
from specdecpp.sampling import Sampling, at_least_float32, probabilities

EDGES = (-math.log(2), 0.0, math.log(2))
"""Boundaries of log p/q, which part the vocabulary into four."""
FALSE_ALARM = 1e-3
"""How often a whole bench of lossless rules fails: shared out among its rows."""
LEAST = 10
"""The least count that p expects of a part; a smaller one joins its neighbour."""
TIE_ULP, TIE_ULP_HALF = 64, 8
"""How far apart two logits may lie that rounding can swap, in units of the last place of the larger one."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Finding for one contestant: `reason` says how it failed, None where it did not."""

    name: str
    reason: str | None
    num_tokens: int
    p_value: float | None = None
    num_ties: int = 0


def is_kept(findings: Sequence[Finding]) -> bool:
    return all(f.reason is None for f in findings)


def sentences(findings: Sequence[Finding]) -> list[str]:
    """Tests that were made, their chance of a false alarm, and every failure."""
    lines = [f"Not the target's distribution: {f.name}: {f.reason}." for f in findings if f.reason]
    greedy = [f for f in findings if f.p_value is None]
    sampled = [f.p_value for f in findings if f.p_value is not None]
    if greedy:
        num, ties = sum(f.reason is None for f in greedy), sum(f.num_ties for f in greedy)
        more = f", {ties} ties of two logits aside" if ties else ""
        lines.append(f"Greedy: {num} of {len(greedy)} rows give the target's own tokens{more}.")
    if sampled:
        num = sum(p >= FALSE_ALARM / len(sampled) for p in sampled)
        tokens = min(f.num_tokens for f in findings if f.p_value is not None)
        lines.append(
            f"Sampled: {num} of {len(sampled)} rows keep the target's distribution (chi-square of {tokens:,} tokens or more "
            f"each, least p-value {min(sampled):.2g}; lossless rules fail by chance in one run of {1 / FALSE_ALARM:,.0f})."
        )
    return lines


def verify(contest: Contest, heats: Sequence[Heat]) -> list[Finding]:
    """Test every answer of a contest."""
    num_sampled = sum(len(heat.contestants) for heat in heats if heat.temperature > 0)
    findings = []
    for heat in heats:
        alone = next(answers for contestant, answers in heat.answers.items() if contestant.rule is ALONE)
        for contestant, answers in heat.answers.items():
            name = f"{label_of(contestant.policy)}, {contestant.verification}, T = {heat.temperature:g}"
            own = [(prompt, answer) for prompt, of in zip(contest.test, answers, strict=True) for answer in of]
            if heat.temperature == 0:
                expected = [of[0] for of in alone for _ in of]
                findings.append(_greedy(contest.pair, name, own, expected))
            else:
                sampling = Sampling(temperature=heat.temperature, top_p=contest.plan.top_p)
                findings.append(_sampled(contest.pair, name, own, sampling, alarm=FALSE_ALARM / num_sampled))
    return findings


Answers = Sequence[tuple[Sequence[int], Output]]
"""Prompts and answers."""


def _greedy(pair: Pair, name: str, answers: Answers, alone: Sequence[Output]) -> Finding:
    """Comparison of every answer with the target's own, ties aside."""
    num_ties, reason = 0, None
    for (prompt, answer), expected in zip(answers, alone, strict=True):
        own = expected.tokens
        at = next((i for i, (a, b) in enumerate(zip_longest(answer.tokens, own)) if a != b), None)
        if at is None:
            continue
        is_inside = at < min(len(answer.tokens), len(own))
        if is_inside and _is_tie(pair, [*prompt, *own[:at]], own[at], answer.tokens[at]):
            num_ties += 1
        elif reason is None:
            reason = f"token {at + 1} of an answer is not the target's argmax"
    return Finding(name=name, reason=reason, num_tokens=sum(len(of.tokens) for _, of in answers), num_ties=num_ties)


def _is_tie(pair: Pair, context: list[int], token: int, other: int) -> bool:
    """Tell whether the target's logits of two tokens differ by rounding only."""
    logits = pair.target.new_cache().extend(context, rows=1)[0][0]
    is_half = logits.dtype in (torch.bfloat16, torch.float16)
    gap, size = abs(float(logits[token] - logits[other])), float(logits[token].abs())
    return gap <= (TIE_ULP_HALF if is_half else TIE_ULP) * torch.finfo(logits.dtype).eps * max(size, 1.0)


def _sampled(pair: Pair, name: str, answers: Answers, sampling: Sampling, *, alarm: float) -> Finding:
    """Test whether the parts of the vocabulary came as often as p says."""
    pairs = [parts(pair, prompt, answer.tokens, sampling) for prompt, answer in answers if answer.tokens]
    counts, distributions = (torch.cat(side) for side in zip(*pairs, strict=True))
    p_value = chi_square_p(counts, distributions)
    failed = f"its tokens are not distributed as the target's (p-value {p_value:.1g})" if p_value < alarm else None
    return Finding(name=name, reason=failed, num_tokens=len(counts), p_value=p_value)


@torch.inference_mode()
def parts(
    pair: Pair, prompt: Sequence[int], answer: Sequence[int], sampling: Sampling
) -> tuple[Float[Tensor, "N 4"], Float[Tensor, "N 4"]]:
    """(In which part each token of an answer lies, one-hot, and the target's probability of each part there)."""
    ids = [*prompt, *answer[:-1]]
    p, q = (
        probabilities(at_least_float32(backend.new_cache().extend(ids, rows=len(answer))[0]), sampling).cpu().double()
        for backend in (pair.target, pair.draft)
    )
    ratio = torch.nan_to_num(p.log() - q.log(), nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    part = torch.bucketize(ratio, torch.tensor(EDGES, dtype=torch.float64))
    distributions = torch.zeros(len(answer), len(EDGES) + 1, dtype=torch.float64).scatter_add_(1, part, p)
    mine: Int[Tensor, "N 1"] = part.gather(1, torch.tensor(answer).unsqueeze(1))
    return torch.zeros_like(distributions).scatter_(1, mine, 1.0), distributions


def chi_square_p(counts: Float[Tensor, "N C"], distributions: Float[Tensor, "N C"]) -> float:
    """The p-value of N draws, one-hot in C parts, under the distribution of each given those before it.

    Parts that are expected too rarely join a neighbour. Where only one is left there is nothing to test, and it is 1.
    """
    groups = _joined(distributions.sum(0).tolist())
    join = torch.zeros(distributions.shape[1], len(groups), dtype=torch.float64)
    for column, group in enumerate(groups):
        join[group, column] = 1.0
    counts, distributions = (counts @ join)[:, :-1], (distributions @ join)[:, :-1]
    if not distributions.shape[1]:
        return 1.0
    excess = (counts - distributions).sum(0)
    covariance = torch.diag(distributions.sum(0)) - distributions.T @ distributions
    value = float(excess @ torch.linalg.pinv(covariance, hermitian=True) @ excess)
    half = torch.tensor([distributions.shape[1] / 2, value / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def _joined(expected: Sequence[float]) -> list[list[int]]:
    """Neighbours together until each group expects enough; what is left at the end joins the last group."""
    groups: list[list[int]] = [[]]
    for i in range(len(expected)):
        groups[-1].append(i)
        if sum(expected[j] for j in groups[-1]) >= LEAST:
            groups.append([])
    *whole, rest = groups
    return [*whole[:-1], [*whole[-1], *rest]] if whole else [rest]
