"""Draws, stop tests and verdicts by kernels of our own against the functions of the host."""

import math
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from distributions import largest_difference
from integration import Distribution, Given, compared, completed, outcomes

from specdecpp.backends.graphs.launches import RowKernels
from specdecpp.backends.graphs.steps import Records
from specdecpp.policies import score
from specdecpp.policies.protocol import Evidence
from specdecpp.sampling import Sampling, inverted, penalised, probabilities, seen_rows
from specdecpp.verify import BlockVerification, CompareVerification, GreedyVerification, TokenVerification

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
slow = partial(pytest.param, marks=pytest.mark.slow)  # left out by CI, which interprets the kernels
SEEDS = range(6 if DEVICE == "cuda" else 2)  # interpreted, each takes seconds
SAMPLINGS = {
    "plain": Sampling(),
    "warm": Sampling(temperature=0.7),
    "nucleus": Sampling(temperature=0.7, top_p=0.9),
    "small nucleus": Sampling(top_p=1e-6),
    "few": Sampling(top_k=5),
    "one": Sampling(top_k=1),
    "all": Sampling(temperature=1.3, top_k=20, top_p=0.8, min_p=0.02, repetition_penalty=1.3),
    "least": Sampling(min_p=0.1),
    "penalised": Sampling(repetition_penalty=1.2),
}


def record_of(vocab_size: int) -> Any:
    """What a step is written down in, under a rule that lets everything pass."""
    body: Any = SimpleNamespace(_embedding=torch.zeros(0), vocab_size=vocab_size)
    cache: Any = SimpleNamespace(device=torch.device(DEVICE), body=body)
    record = Records(cache).each[0]
    record.rest()
    record.evidence.fill_(1)
    record.score.copy_(torch.tensor([0.3, 1.4]))
    record.least.fill_(-torch.inf)
    return record


def logits_of(vocab_size: int, rows: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 3.0) -> Tensor:
    made = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale
    return made.to(dtype).to(DEVICE)


def weighed(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
    """The distribution of a draft's row as the kernels have it."""
    record = record_of(logits.shape[1])
    record.seen = record.seen if seen is None else seen
    kernels = RowKernels(logits, 1)
    kernels.weigh(record, sampling)
    row = record.rows[0].double()
    return row / row.sum()


@pytest.mark.parametrize("name", list(SAMPLINGS))
@pytest.mark.parametrize("vocab_size", [7, slow(1000), 2500])
def test_rows_are_the_hosts(name: str, vocab_size: int) -> None:
    """Catches a part left out, a threshold one off, a penalty on the wrong side: vocabularies of one part and of three."""
    for seed in SEEDS:
        logits = logits_of(vocab_size, 1, seed)
        seen = (torch.rand(vocab_size, generator=torch.Generator().manual_seed(seed)) < 0.3).to(DEVICE)
        expected = probabilities(logits[0].double(), SAMPLINGS[name], seen)
        torch.testing.assert_close(weighed(logits, SAMPLINGS[name], seen), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["nucleus", "few", "all", "least", "small nucleus"])
@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16), slow(torch.float16)])
def test_ties_are_cut_as_the_host_cuts_them(name: str, dtype: torch.dtype) -> None:
    """Catches equal tokens that are all kept by top-p, or cut by top-k, and ranks that do not count the parts before."""
    for seed in SEEDS:
        logits = (logits_of(2500, 1, seed, scale=2.0) * 2).round().to(dtype) / 2
        expected = probabilities(logits.double(), SAMPLINGS[name])[0]
        own = weighed(logits, SAMPLINGS[name])
        assert torch.equal(own > 0, expected > 0)
        torch.testing.assert_close(own, expected, atol=2e-6, rtol=1e-5)


def test_equal_logits_everywhere() -> None:
    """Catches a threshold that is not found where all tokens are equal."""
    own = weighed(torch.zeros(1, 2500, device=DEVICE), Sampling(top_p=0.25))
    assert own[:625].gt(0).all()
    assert not own[625:].any()


@pytest.mark.parametrize("name", list(SAMPLINGS))
def test_a_draw_is_the_hosts(name: str) -> None:
    """Catches a running sum that begins one token late, in another part or with another scale. The host's token for the same
    uniform, and the distribution as integrated over them: q of the record is the length of the token's interval."""
    sampling, vocab_size = SAMPLINGS[name], 1300
    logits = logits_of(vocab_size, 1, seed=1)
    record, kernels = record_of(vocab_size), RowKernels(logits, 1)
    kernels.weigh(record, sampling)
    weights = (record.rows[0].double() * 2.0**42).long()
    ends = weights.cumsum(0)
    expected = probabilities(logits.cpu(), sampling)[0]
    generator = torch.Generator().manual_seed(2)
    uniforms = torch.rand(40, generator=generator, dtype=torch.float64).tolist()
    likely = int(weights.argmax())
    borders = [float(ends[likely] - weights[likely]) / float(ends[-1]), float(ends[likely]) / float(ends[-1])]
    exact = [first_at(int(ends[place]), float(ends[-1])) for place in (likely, 1023)]  # within a part, and where one ends
    same = 0
    for u in [*uniforms, 0.0, 1 - 2**-53, *exact, borders[0] + 1e-9, borders[1] - 1e-9]:
        record.order.copy_(torch.tensor([0, 0, 1]))
        record.uniforms[0] = u
        note(kernels, record, sampling=sampling)
        token = int(record.records[0, 0])
        same += token == inverted(expected, u)
        assert int(ends[token] - weights[token]) <= int(u * float(ends[-1])) < int(ends[token])
        assert float(record.records[0, 1]) == pytest.approx(float(weights[token]) / float(ends[-1]), rel=1e-12)
    assert token == likely
    assert same >= 43  # rounding may move a border past a uniform


def first_at(point: int, total: float) -> float:
    """The least uniform that stands for this point, or the greatest where that is none."""
    u = min(point / total, 1 - 2**-53)
    while int(u * total) < point and u < 1 - 2**-53:
        u = math.nextafter(u, 1.0)
    return u


INPUTS = torch.zeros(4, dtype=torch.long, device=DEVICE)
ENDS = torch.tensor([3, 900], device=DEVICE)


def note(kernels: RowKernels, record: Any, *, sampling: Sampling, evidence: Evidence = Evidence.NOTHING, **how: Any) -> None:
    kernels.note(record, sampling, INPUTS, ENDS, evidence=evidence, **{"judges": False, "scores": False} | how)


@pytest.mark.parametrize("evidence", list(Evidence))
@pytest.mark.parametrize("name", ["greedy", "plain", "all"])
def test_evidence_flags_and_places(evidence: Evidence, name: str) -> None:
    """Catches other evidence, a score on another scale, a flag of another bit or place, and a write after a stop."""
    sampling = Sampling(temperature=0.0, repetition_penalty=1.3) if name == "greedy" else SAMPLINGS[name]
    vocab_size, by_q = 1300, evidence is Evidence.SURVIVAL
    logits = logits_of(vocab_size, 3, seed=4)
    record, kernels = record_of(vocab_size), RowKernels(logits, 1)
    record.uniforms[:6].copy_(torch.rand(6, generator=torch.Generator().manual_seed(5), dtype=torch.float64))
    record.order[2], seen, value = 3, record.seen.clone(), 1.0
    INPUTS.copy_(torch.tensor([100, 7, 8, 9]))
    for i in range(4):
        logits[0, 900] = 50.0 if i == 2 else 0.0  # an end of text
        row = logits[2:] if i == 0 else logits[:1]
        logits_seen = penalised(row[0], sampling, seen)
        believed = logits_seen.softmax(-1) if sampling.is_greedy else probabilities(row[0], sampling, seen)
        if i == 3:
            record.least[4] = torch.inf
        kernels.weigh(record, sampling)
        note(kernels, record, sampling=sampling, evidence=evidence, judges=by_q, scores=by_q)
        token, q, accept, flags, noted = record.records[i].tolist()
        if sampling.is_greedy:
            assert token == int(believed.argmax())
        assert q == pytest.approx(float(believed[int(token)]), rel=1e-5)
        entropy = float(torch.special.entr(believed.double()).sum())
        factor = score.Score(0.3, 1.4)(score.by_q(q))
        kinds = {Evidence.LAST_Q: q, Evidence.PRODUCT_OF_Q: value * q, Evidence.NEGATIVE_ENTROPY: -entropy}
        value = (kinds | {Evidence.SURVIVAL: value * factor}).get(evidence, 1.0)
        assert noted == pytest.approx(value, rel=1e-5)
        assert accept == pytest.approx(score.by_q(q) if by_q else 1.0, rel=1e-9)
        assert i != 2 or token == 900
        assert flags == (1 if i == 3 else 0) + 2 * (int(token) in (3, 900))
        seen[int(token)] = True
        assert not sampling.needs_seen or torch.equal(record.seen, seen)
        assert record.line[i + 1] == token
        assert INPUTS.tolist() == [103 + i, token, 8, 9]
        assert record.order.tolist() == [i + 1, int(flags != 0), 1]
        assert int(record.totals[i]) == int((record.rows[i].double() * 2.0**42).long().sum())
        record.order[1] = int(i == 3)
    written = record.rows, record.order, record.line, record.evidence, record.records, record.totals, record.seen, INPUTS
    before = [tensor.clone() for tensor in written]
    kernels.weigh(record, sampling)
    note(kernels, record, sampling=sampling, evidence=evidence, judges=by_q, scores=by_q)
    assert all(torch.equal(a, b) for a, b in zip(before, written, strict=True))


# --- verdicts --------------------------------------------------------------------------------------------------------------


def tables(vocab_size: int, num: int, seed: int) -> tuple[Tensor, Tensor]:
    """Logits of p and q, some of tokens that one of the two does not have."""
    p, q = logits_of(vocab_size, num + 1, seed, scale=1.0), logits_of(vocab_size, num + 1, seed + 50, scale=1.0)
    for rows, own in ((p, seed + 100), (q, seed + 150)):
        is_out = torch.rand(rows.shape, generator=torch.Generator().manual_seed(own)) < 0.2
        rows[is_out.to(DEVICE)] = -torch.inf
        rows[:, 0] = 0.0
    return p, q


class Judged:
    """A verdict of the kernels on draft tokens drawn by them from rows of q."""

    def __init__(self, p: Tensor, q: Tensor, sampling: Sampling, verification: Any):
        self.num, self.sampling, self.verification = len(q) - 1, sampling, verification
        self.record, self.width = record_of(p.shape[1]), len(p) + 1
        padded = torch.cat((p, torch.full((1, p.shape[1]), 3.0, dtype=p.dtype, device=DEVICE)))
        self.kernels = RowKernels(padded, self.width)
        for i in range(self.num):
            drawing = RowKernels(q[i : i + 1].clone(), 1)
            self.record.order.copy_(torch.tensor([i, 0, 1]))
            drawing.weigh(self.record, sampling)
            note(drawing, self.record, sampling=sampling)

    def given(self, tokens: list[int], uniforms: list[float]) -> tuple[int, int]:
        record, num = self.record, self.num
        record.order[0] = num
        record.line.fill_(1)
        record.line[1 : num + 1] = torch.tensor(tokens, dtype=torch.long)
        record.verify_uniforms.fill_(1e-9)
        record.verify_uniforms[: len(uniforms)] = torch.tensor(uniforms, dtype=torch.float64)
        self.kernels.judge(record, self.sampling, self.verification, self.width)
        count, token = record.outcome[:2].tolist()
        return int(count), int(token)


@pytest.mark.parametrize("num", [0, 1, 2])
@pytest.mark.parametrize("kind", ["token", "block", "compare"])
def test_the_distribution_of_a_verdict_is_the_targets(kind: str, num: int) -> None:
    """Catches a wrong coin, row, residual or bonus, and padding that is read: integrated, to the kernels' exponentials."""
    judge: Any = {"token": TokenVerification(), "block": BlockVerification(), "compare": CompareVerification()}[kind]
    made: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
    for length in range(3):
        for prefix in torch.cartesian_prod(*[torch.arange(3)] * length).view(-1, length).tolist() if length else [[]]:
            p, q = tables(3, 0, seed=10 + sum(3**i * (1 + token) for i, token in enumerate(prefix)))
            made[tuple(prefix)] = p, q
    plain, distribution = Sampling(), defaultdict(float)
    paths = torch.cartesian_prod(*[torch.arange(3)] * num).view(-1, num).tolist() if num else [[]]
    for path in paths:
        along = [tuple(path[:i]) for i in range(num + 1)]
        p, q = (torch.cat([made[prefix][which] for prefix in along]) for which in (0, 1))
        p_rows, q_rows = (probabilities(rows.double().cpu(), plain) for rows in (p, q[:num]))
        drawn = float(torch.stack([q_rows[i, path[i]] for i in range(num)]).prod()) if num else 1.0
        if drawn == 0:
            continue
        verdicts, tokens = Judged(p, q, plain, judge), torch.tensor(path, dtype=torch.long)
        expected = compared(p_rows, tokens) if kind == "compare" else outcomes(p_rows, q_rows, tokens, kind)
        for verdict, chance, uniforms in expected:
            for u in list(zip(*uniforms, strict=True))[: 1 + (num < 2)]:  # both ends of the piece, of long ones the first
                assert verdicts.given(path, list(u)) == verdict
            distribution[(*path[: verdict[0]], verdict[1])] += drawn * chance
    own: Distribution = {(): 1.0}

    def p_of(prefix: tuple[int, ...]) -> Tensor:
        return probabilities(made[prefix][0].double().cpu(), plain)[0]

    assert largest_difference(completed(distribution, p_of, num + 1), completed(own, p_of, num + 1)) < 1e-9


@pytest.mark.parametrize("name", [slow("plain"), slow("nucleus"), slow("all"), "penalised"])
@pytest.mark.parametrize("kind", ["token", slow("block"), slow("compare"), "greedy"])
def test_verdicts_on_whole_vocabularies_are_the_hosts(kind: str, name: str) -> None:
    """Catches parts of a residual that are left out, contexts that lack the draft tokens, and overlaps of other rows."""
    judge: Any = {"token": TokenVerification(), "block": BlockVerification(), "compare": CompareVerification()}.get(kind)
    sampling, vocab_size, num = SAMPLINGS[name], 1500, 4 if kind == "compare" else 3
    if kind == "greedy":
        sampling, judge = Sampling(temperature=0.0, repetition_penalty=sampling.repetition_penalty), GreedyVerification()
    same, counts, num_seeds = 0, set(), 6 if DEVICE == "cuda" or kind == "greedy" else 3
    for seed in range(num_seeds):
        p = logits_of(vocab_size, num + 1, seed, torch.bfloat16)
        q = (p.float() + logits_of(vocab_size, num + 1, seed + 99, scale=0.3)).bfloat16()
        verdicts = Judged(p, q, sampling, judge)
        generator = torch.Generator().manual_seed(seed)
        context = (torch.rand(vocab_size, generator=generator) < 0.1).to(DEVICE)
        verdicts.record.context = context
        believed = (verdicts.record.rows[:num] / verdicts.record.rows[:num].sum(-1, keepdim=True)).cpu()
        tokens = believed.argmax(-1) if sampling.is_greedy else believed.double().multinomial(1, generator=generator)[:, 0]
        seen = seen_rows(context.cpu(), tokens)
        uniforms = torch.rand(num + 1, generator=generator, dtype=torch.float64).tolist()
        made = penalised if sampling.is_greedy else probabilities
        rows = made(p.cpu(), sampling, seen)
        told = Given()
        told.points = list(uniforms)
        expected = judge(rows, believed, tokens, told)
        own = verdicts.given(tokens.tolist(), uniforms)
        if not sampling.is_greedy:
            weighed_rows = verdicts.kernels._own[: num + 1].cpu()
            torch.testing.assert_close(weighed_rows / weighed_rows.sum(-1, keepdim=True), rows, atol=2e-6, rtol=1e-5)
        same += own == (expected.num_accepted, expected.next_token)
        counts.add(own[0])
        if kind == "token":
            torch.testing.assert_close(
                verdicts.record.outcome[2 : 2 + len(expected.overlaps)].tolist(), list(expected.overlaps), atol=1e-5, rtol=1e-5
            )
    assert same >= num_seeds - 1  # a uniform may lie where rounding decides
    assert len(counts) > 1
