"""Whatever judges a token says what golden_head.json says: module, rows in numpy, training, compiled code."""

import ctypes
import json
from typing import Any

import golden_head
import pytest
import torch

from specdecpp.backends import native
from specdecpp.backends.native.library import library
from specdecpp.backends.native.steps import compiled_head
from specdecpp.head import SCALARS, AcceptanceHead, HeadCard, features
from specdecpp.policies import SpecDecPP
from specdecpp.step import Draft
from specdecpp.training.scores import ScoreInputs, raw

GOLDEN: dict[str, Any] = json.loads(golden_head.PATH.read_text(encoding="utf-8"))
ROWS: list[dict[str, Any]] = GOLDEN["rows"]
TOKENS = torch.tensor([row["token"] for row in ROWS])
HIDDEN = torch.tensor([row["hidden"] for row in ROWS])
Q = torch.tensor([row["q"] for row in ROWS])
DEPTH = torch.tensor([row["depth"] for row in ROWS])
BATCH = 2  # rows of each place in a step: a sampled and a greedy one


def named(golden: dict[str, Any]) -> str:
    card = golden["card"]
    return f"{card['form']}-{card['width']}-{'+'.join(card['scalars'])}"


def read(golden: dict[str, Any]) -> AcceptanceHead:
    head = AcceptanceHead(HeadCard.from_json(json.dumps(golden["card"])))
    head.load_state_dict({name: torch.tensor(values) for name, values in golden["weights"].items()})
    return head.eval()


each_head = pytest.mark.parametrize("golden", GOLDEN["heads"], ids=named)


def test_the_file_is_what_its_program_makes() -> None:
    """Catches numbers that were written by hand, or that the code under test has made."""
    made = json.loads(golden_head.text(golden_head.made()))
    flat = [[one[key] for key in ("q", "scalars", "logit", "accept") if key in one] for one in (*made["rows"], *made["heads"])]
    kept = [[one[key] for key in ("q", "scalars", "logit", "accept") if key in one] for one in (*ROWS, *GOLDEN["heads"])]
    assert [one["card"] for one in made["heads"]] == [one["card"] for one in GOLDEN["heads"]]
    for ours, theirs in zip(flat, kept, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a == pytest.approx(b, rel=1e-9)


def test_the_scalars_of_rows_are_the_golden_ones() -> None:
    """Catches a logarithm of nothing, another base of the entropy, a gap to the wrong token, and columns in another order."""
    expected = torch.tensor([[row["scalars"][name] for name in SCALARS] for row in ROWS])
    found = features.rows(SCALARS, tokens=TOKENS, q=Q, depth=DEPTH)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(features.rows(SCALARS[::-1], tokens=TOKENS, q=Q, depth=DEPTH), found.flip(-1))
    assert features.rows((), tokens=TOKENS, q=Q, depth=DEPTH).shape == (len(ROWS), 0)
    one = features.rows(SCALARS, tokens=TOKENS[:BATCH], q=Q[:BATCH], depth=1)
    assert torch.equal(one, found[:BATCH])
    assert features.rows(SCALARS, tokens=torch.tensor([0]), q=torch.ones(1, 1), depth=1).tolist() == [[0.0, 0.0, 0.0, 1.0]]


@each_head
def test_rows_in_numpy_say_the_golden_probabilities(golden: dict[str, Any]) -> None:
    """Catches another function than the module's, and the calibration of the other temperature."""
    head = read(golden)
    for i, row in enumerate(ROWS):
        scalars = tuple(row["scalars"][name] for name in head.card.scalars)
        said = head.estimator(is_greedy=not row["temperature"])(HIDDEN[i], row["token"], scalars)
        assert said == pytest.approx(golden["accept"][i], abs=2e-5)
        as_it_is = head.estimator(calibrated=False)(HIDDEN[i], row["token"], scalars)
        assert as_it_is == pytest.approx(torch.tensor(golden["logit"][i]).sigmoid().item(), abs=2e-5)


@each_head
def test_a_policy_says_them_of_a_step(golden: dict[str, Any]) -> None:
    """Catches scalars of a step, step by step, that differ from those of rows; and a depth that is off by one."""
    policy = SpecDecPP(head=read(golden), calibrated=True)
    for i, row in enumerate(ROWS):
        draft = Draft(is_greedy=not row["temperature"])
        for _ in range(row["depth"] - 1):
            draft.append(0, q=torch.full((golden_head.VOCAB,), 1 / golden_head.VOCAB))
        draft.append(row["token"], torch.tensor(row["logits"]) if draft.is_greedy else Q[i])
        assert policy.judge(draft, HIDDEN[i]) == pytest.approx(golden["accept"][i], abs=2e-5)


@each_head
def test_training_sees_the_golden_logits(golden: dict[str, Any]) -> None:
    """Catches a head that is trained on other scalars than it is asked with; labels may hold a log q of minus infinity."""
    head, known = read(golden), {name: torch.tensor([row["scalars"][name] for row in ROWS]) for name in SCALARS}
    log_q = features.log_q(Q, TOKENS)
    log_q[log_q < -69] = -torch.inf
    evidence = ScoreInputs(hidden=HIDDEN, token=TOKENS, log_q=log_q, entropy=known["entropy"], gap=known["gap"])
    torch.testing.assert_close(raw(head, evidence, DEPTH), torch.tensor(golden["logit"]), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")
@each_head
def test_compiled_code_says_the_golden_probabilities(golden: dict[str, Any]) -> None:
    """Catches another sum, order of scalars, block or calibration, without a model and a step around it."""
    head = read(golden)
    estimators = [head.estimator(is_greedy=is_greedy) for is_greedy in (False, True)]
    compiled = [compiled_head(estimator) for estimator in estimators]  # pyright: ignore[reportArgumentType]
    for i, row in enumerate(ROWS):
        x, p, state = torch.tensor(row["logits"]), Q[i].contiguous(), HIDDEN[i].contiguous()
        told, factor = compiled[not row["temperature"]], 1 / (row["temperature"] or 1.0)
        found = library().native_judge(
            ctypes.byref(told), state.data_ptr(), row["token"], row["depth"], x.data_ptr(), p.data_ptr(), len(p), factor
        )
        assert found == pytest.approx(golden["accept"][i], abs=2e-5)
