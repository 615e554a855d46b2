"""Scores side by side: the steps of a record against steps that are really drawn, and what is said about a head."""

import itertools
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from records import Process, knowing_head, logits_of, random_head, record_of, records

from specdecpp import AcceptanceHead
from specdecpp.errors import DataError
from specdecpp.training.evaluate import evaluate, head_score, verdicts
from specdecpp.training.labels import Record
from specdecpp.training.scores import Steps, head_logits, log_q, steps

DRAWS = torch.Generator().manual_seed(0)


def judged_by(head: AcceptanceHead, process: Process, *, depth: int) -> np.ndarray:
    """Log probabilities [V, V] of a head for every last token and draft token, at a depth."""
    return torch.nn.functional.logsigmoid(head.card.calibration.apply(logits_of(head, process, depth=depth).double())).numpy()


def steps_of(record: Record, *, length: int = 10) -> Steps:
    played = steps(record, length=length)
    assert played is not None
    return played


# The steps of a record


def test_weights_of_a_depth_sum_to_one():
    """Catches an outcome of a step that is left out or counted twice, and starts past the answer's end."""
    process = Process.random(5, seed=1)
    record = records(process, 1, num_tokens=23, seed=2)[0]
    played = steps_of(record)
    for depth in range(1, 11):
        assert played.weight[played.depth == depth].sum() == pytest.approx(23 - depth + 1, abs=1e-5)
    alone = steps_of(replace(record, answer_odds=torch.ones(23)))
    assert set(alone.label) == {1.0}


def test_a_branch_that_ends_its_text_ends_its_step():
    """Catches padding of a short branch that is taken for drafted tokens."""
    process = Process.random(5, seed=1)
    record = record_of(process, [1, 2, 3, 4, 1], generator=DRAWS, branches={i: [1, 2, 3][: i + 1] for i in range(5)})
    played = steps_of(record, length=4)
    odds = record.answer_odds.double().numpy()
    lost = played.weight[(played.depth == 4) & (played.label == 0)].sum()
    reach = np.concatenate([[1], np.cumprod(odds)])
    start_0 = sum(reach[j] * (1 - odds[j]) for j in range(4) if 4 - j <= min(j + 1, 3))
    reach_1 = np.concatenate([[1], np.cumprod(odds[1:])])
    start_1 = sum(reach_1[j - 1] * (1 - odds[j]) for j in range(1, 5) if 4 - (j - 1) <= min(j + 1, 3))
    assert lost == pytest.approx(start_0 + start_1, abs=1e-6)


def test_a_token_the_draft_cannot_propose_ends_every_step():
    """Catches a log q of minus infinity that becomes nan in a score or in a head."""
    process = Process.random(4, seed=3)
    q = process.q.clone()
    q[:, 2] = 0
    process = replace(process, q=q / q.sum(-1, keepdim=True))
    record = record_of(process, [1, 2, 1, 1], generator=DRAWS)
    head = random_head(process, form="look_ahead", scalars=("log_q", "entropy"))
    found = evaluate(head, [record])["toy"]
    assert all(np.isfinite(of["auroc_product"]) for of in found.values())
    assert found["head"]["ece_product"] is not None


Distribution = dict[tuple[int, float, float], float]


def distribution_of_steps(process: Process, judge, num_tokens: int) -> Distribution:
    """The distribution of (depth, label, score) over everything a record draws: the text, and one branch at every position."""
    distribution: Distribution = defaultdict(float)
    v = range(len(process.p))
    for answer in itertools.product(v, repeat=num_tokens):
        contexts = [0, *answer[:-1]]
        chance = np.prod([float(process.p[c, x]) for c, x in zip(contexts, answer, strict=True)])
        branches = []
        for i, context in enumerate(contexts):
            options = []
            for tokens in itertools.product(v, repeat=num_tokens - i):
                of = float(process.residual[context, tokens[0]])
                of *= np.prod([float(process.q[a, b]) for a, b in itertools.pairwise(tokens)])
                if of > 0:
                    options.append((tokens, of))
            branches.append(options)
        for chosen in itertools.product(*branches):
            record = record_of(
                process,
                answer,
                generator=DRAWS,
                draws=1,
                length=num_tokens,
                branches={i: tokens for i, (tokens, _) in enumerate(chosen)},
            )
            played, total = steps_of(record, length=num_tokens), chance * np.prod([of for _, of in chosen])
            scores = played.scores(judge(record).table)
            for depth, label, weight, value in zip(played.depth, played.label, played.weight, scores, strict=True):
                distribution[int(depth), float(label), round(float(value), 3)] += float(weight * total)
    return distribution


def distribution_of_drafting(process: Process, tables: list[np.ndarray], num_tokens: int) -> Distribution:
    """The same by drawing nothing back: for every start a text X ~ p, then draft tokens from q, accepted with min(1, p/q)."""
    distribution: Distribution = defaultdict(float)
    v = range(len(process.p))
    reached = np.eye(len(process.p))[0]
    for start in range(num_tokens):
        for length in range(1, num_tokens - start + 1):
            for first in v:
                for tokens in itertools.product(v, repeat=length):
                    pairs = list(zip((first, *tokens), tokens))  # noqa: B905 (the last token has no successor)
                    chance = reached[first] * np.prod([float(process.q[pair]) for pair in pairs])
                    survival = np.prod([float(process.accept[pair]) for pair in pairs])
                    value = round(float(sum(tables[k][pair] for k, pair in enumerate(pairs))), 3)
                    distribution[length, 1.0, value] += chance * survival
                    distribution[length, 0.0, value] += chance * (1 - survival)
        reached = reached @ process.p.numpy()
    return distribution


def assert_same(a: Distribution, b: Distribution) -> None:
    assert max(abs(a.get(k, 0) - b.get(k, 0)) for k in a.keys() | b.keys()) < 1e-6


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_steps_of_records_have_the_distribution_of_real_steps(num_tokens: int):
    """Catches any error of the coupling: by enumeration, the scores and labels of recorded steps are those of drafting.

    Both sides are exact, for a head whose estimate depends on the depth and for cumulative q.
    """
    process = Process.random(3, seed=5)
    head = random_head(process, form="look_ahead", scalars=("log_q", "depth"), seed=6)
    of_head = [judged_by(head, process, depth=k) for k in range(1, num_tokens + 1)]
    of_q = [process.q.log().numpy()] * num_tokens
    for judge, tables in ((head_score(head), of_head), (log_q, of_q)):
        expected = distribution_of_drafting(process, tables, num_tokens)
        assert sum(expected.values()) == pytest.approx(num_tokens * (num_tokens + 1) / 2)
        assert_same(distribution_of_steps(process, judge, num_tokens), expected)


# Evidence


def test_a_head_that_ignores_the_depth_may_be_told_it():
    """Catches a shortcut for heads without depth that gives other logits than the long way."""
    process = Process.random(5, seed=1)
    record = records(process, 1, num_tokens=12, seed=2)[0]
    plain = random_head(process, form="look_ahead", scalars=("log_q", "gap"), seed=3)
    told = AcceptanceHead(replace(plain.card, scalars=("log_q", "gap", "depth")))
    state = plain.state_dict()
    state["input.weight"] = torch.cat([state["input.weight"], torch.zeros(len(state["input.weight"]), 1)], 1)
    told.load_state_dict(state)
    a, b = (head_logits(head.eval(), record) for head in (plain, told))
    np.testing.assert_allclose(a.score, b.score, atol=1e-5)
    played = steps_of(record)
    assert a.table is not None
    assert b.table is not None
    assert (a.table.shape[2], b.table.shape[2]) == (1, 10)
    np.testing.assert_allclose(played.scores(a.table), played.scores(b.table), atol=1e-5)


def test_a_lagged_head_reads_the_state_at_the_token():
    """Catches states that are shifted by one: a head that looks at the token must find it."""
    process = Process.random(5, seed=1)
    record = records(process, 1, num_tokens=12, seed=2)[0]
    head = random_head(process)
    with torch.no_grad():
        of_token = head(torch.eye(5)).numpy()
    assert record.branches is not None
    first = record.candidate[:, 0]
    for read, drawn in ((record, first), (replace(record, leaf=None), first[record.is_mixed])):
        judged = head_logits(head, read)
        np.testing.assert_allclose(judged.score, of_token[drawn], atol=1e-6)
        tokens = torch.cat([record.answer[:, None], record.branches.token], 1)
        assert judged.table is not None
        np.testing.assert_allclose(judged.table[..., 0], of_token[tokens], atol=1e-6)


# The whole


def test_the_true_probability_is_calibrated_and_beats_the_free_rule():
    """Catches a product that is not a probability: for the true acceptance it must be one, at every depth."""
    process = Process.random(5, seed=11, noise=2.0)
    held_out = records(process, 60, num_tokens=40, seed=12)
    found = evaluate(knowing_head(process), held_out)
    figures = found["toy"]["head"]
    assert figures["kl"] == pytest.approx(0, abs=1e-3)
    assert figures["ece_token"] < 0.01
    assert figures["ece_product"] < 0.02
    assert figures["gain_product"] > 5 * figures["gain_product_error"]
    assert verdicts(found)[0].startswith("toy: head beats cumulative q (AUROC ")


def test_every_score_has_every_figure():
    """Catches a figure that is missing in one row."""
    process = Process.random(5, seed=1)
    lagged, other = random_head(process), random_head(process, form="look_ahead", seed=5)
    mixed = records(process, 5, num_tokens=20, seed=2, features=("mixed",)) + records(
        process, 4, num_tokens=20, seed=3, features=("mixed",), source="other", split="test"
    )
    found = evaluate(lagged, mixed, others={"ahead": other})
    assert set(found) == {"toy", "other"}
    for scores in found.values():
        assert list(scores) == ["head", "ahead", "cumulative_q"]
        assert len({tuple(of) for of in scores.values()}) == 1
        assert scores["head"]["evidence"] == "mixed"
        assert scores["ahead"]["evidence"] == "clean"
        assert scores["cumulative_q"]["gain_product"] is None
    assert found["toy"]["head"]["num_answers"] == 5
    assert len(verdicts(found)) == 4


def test_without_branches_the_product_is_unknown():
    """Catches figures of the step made from nothing, and a verdict that claims one."""
    process = Process.random(5, seed=1)
    found = evaluate(random_head(process), records(process, 3, num_tokens=10, seed=2, branches=False))
    full = evaluate(random_head(process), records(process, 3, num_tokens=10, seed=2))
    assert found["toy"]["head"].keys() == full["toy"]["head"].keys()
    assert found["toy"]["head"]["auroc_product"] is found["toy"]["cumulative_q"]["auroc_product"] is None
    assert found["toy"]["head"]["auroc_token"] is not None
    assert verdicts(found) == ["toy: whether head beats cumulative q is unknown: the labels lack branches or rejections."]


@pytest.mark.parametrize(
    ("gain", "error", "words"),
    [
        (0.031, 0.004, "head beats cumulative q (AUROC 0.831, +0.031 ± 0.004)."),
        (-0.05, 0.004, "head does not beat cumulative q (AUROC 0.750, -0.050 ± 0.004)."),
        (-0.001, 0.004, "head does not beat cumulative q (AUROC 0.799, -0.001 ± 0.004)."),
        (0.005, 0.004, "head and cumulative q are too close to call (AUROC 0.805, +0.005 ± 0.004)."),
        (0.005, None, "head and cumulative q are too close to call (AUROC 0.805, +0.005)."),
    ],
)
def test_a_head_that_does_not_beat_the_free_rule_says_so(gain: float, error: float | None, words: str):
    """Catches a verdict that hides a loss, or claims a gain that is noise."""
    head = {"auroc_product": 0.8 + gain, "gain_product": gain, "gain_product_error": error}
    assert verdicts({"gsm8k": {"head": head, "cumulative_q": {}}}) == [f"gsm8k: {words}"]


def test_nothing_to_evaluate_on_is_refused():
    """Catches an empty table, and a head whose row would replace that of a score."""
    process = Process.random(5, seed=1)
    none: list[Record] = []
    with pytest.raises(DataError, match="no records to evaluate on"):
        evaluate(random_head(process), none)
    with pytest.raises(ValueError, match="another head is called cumulative_q"):
        evaluate(random_head(process), none, others={"cumulative_q": random_head(process)})
