"""A test of the answers that were timed: all of them must have the target's distribution.

Temperature 0: each answer must be the target's own, token by token. Where two logits of the target tie to within rounding,
a pass over several positions may break the tie otherwise than a pass over one; such a tie is reported, and is no failure.

Sampling: given what came before, the next token of a lossless decoder is drawn from p. So the tokens that the target thinks
likelier than the draft does, p > q, come as often as p says; the count less what p expects is a sum of martingale differences
with a known variance, and its square over that is chi-square in the limit, with one degree of freedom. What a faulty
verification does, such as accepting too much or a residual without its (p - q)+, moves mass out of these very tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from specdecpp.bench.contest import Contest, Heat
from specdecpp.bench.contestants import ALONE
from specdecpp.loading.pair import Pair
from specdecpp.policy_spec import label_of
from specdecpp.sampling import Sampling, at_least_float32, probabilities

FALSE_ALARM = 1e-3
"""How often a whole bench of lossless rules fails: shared out among its rows."""
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
        sampling = Sampling(temperature=heat.temperature, top_p=contest.plan.top_p)
        for contestant, answers in heat.answers.items():
            name = f"{label_of(contestant.policy)}, {contestant.verification}, T = {heat.temperature:g}"
            texts = [
                (prompt, answer.tokens, own[0].tokens)
                for prompt, of, own in zip(contest.test, answers, alone, strict=True)
                for answer in of  # none of a prompt that an interrupted contest did not come to
            ]
            if heat.temperature == 0:
                findings.append(_greedy(contest.pair, name, texts))
            else:
                findings.append(_sampled(contest.pair, name, texts, sampling, alarm=FALSE_ALARM / num_sampled))
    return findings


Texts = Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]]
"""Prompts, answers and the answers of the target alone, as ids."""


def _greedy(pair: Pair, name: str, texts: Texts) -> Finding:
    """Comparison of every answer with the target's own, ties aside."""
    num_ties, reason = 0, None
    for prompt, answer, own in texts:
        at = next((i for i, (a, b) in enumerate(zip_longest(answer, own)) if a != b), None)
        if at is None:
            continue
        if at < min(len(answer), len(own)) and _is_tie(pair, [*prompt, *own[:at]], own[at], answer[at]):
            num_ties += 1
        else:
            reason = f"token {at + 1} of an answer is not the target's argmax"
    return Finding(name=name, reason=reason, num_tokens=sum(len(answer) for _, answer, _ in texts), num_ties=num_ties)


def _is_tie(pair: Pair, context: list[int], token: int, other: int) -> bool:
    """Tell whether the target's logits of two tokens differ by rounding only."""
    logits = pair.target.new_cache().extend(context, rows=1)[0][0]
    is_half = logits.dtype in (torch.bfloat16, torch.float16)
    gap, size = abs(float(logits[token] - logits[other])), float(logits[token].abs())
    return gap <= (TIE_ULP_HALF if is_half else TIE_ULP) * torch.finfo(logits.dtype).eps * max(size, 1.0)


def _sampled(pair: Pair, name: str, texts: Texts, sampling: Sampling, *, alarm: float) -> Finding:
    """Test whether tokens with p > q came as often as p says."""
    p_value = chi_square_p([excess(pair, prompt, answer, sampling) for prompt, answer, _ in texts if answer])
    failed = f"its tokens are not distributed as the target's (p-value {p_value:.1g})" if p_value < alarm else None
    return Finding(name=name, reason=failed, num_tokens=sum(len(answer) for _, answer, _ in texts), p_value=p_value)


@torch.inference_mode()
def excess(pair: Pair, prompt: Sequence[int], answer: Sequence[int], sampling: Sampling) -> tuple[float, float]:
    """(How many tokens with p > q an answer has beyond what the target expects, the variance of that number)."""
    ids = [*prompt, *answer[:-1]]
    p, q = (
        probabilities(at_least_float32(backend.new_cache().extend(ids, rows=len(answer))[0]), sampling).cpu().double()
        for backend in (pair.target, pair.draft)
    )
    is_likelier = (p > q).double()
    chance = (p * is_likelier).sum(-1)
    num = is_likelier.gather(1, torch.tensor(answer).unsqueeze(1)).sum()
    return float(num - chance.sum()), float((chance * (1 - chance)).sum())


def chi_square_p(answers: Sequence[tuple[float, float]]) -> float:
    """The p-value of the excesses of some answers, 1 where nothing was left to chance."""
    total, variance = map(sum, zip(*answers, strict=True))
    return math.erfc(abs(total) / math.sqrt(2 * variance)) if variance > 0 else 1.0
