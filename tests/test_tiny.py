"""The tiny network: whether it learns what the rounds say, and survives the way to a file and back."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from records import Process, records

from specdecpp.errors import DataError, HeadError
from specdecpp.policies import Net
from specdecpp.training.labels import Record
from specdecpp.training.measures import auroc
from specdecpp.training.rounds import rounds
from specdecpp.training.scores import log_q, minus_entropy
from specdecpp.training.tiny import _as_steps, fit

PROCESS = Process.random(6, seed=4, spread=1.5, noise=1.5)


@pytest.fixture(scope="module")
def answers() -> list[Record]:
    return records(PROCESS, 40, num_tokens=20, seed=2)


@pytest.fixture(scope="module")
def net(answers: list[Record]) -> Net:
    return fit(answers, steps=300)


def test_a_sum_of_steps_is_the_score_of_the_last_token(answers: list[Record]):
    """Catches a network that is trained on another candidate's entropy than the one it is asked about."""
    record = answers[0]
    branches, odds = record.branches, record.answer_odds.double()
    assert branches is not None
    num, length = branches.token.shape
    whole, broken = [], []  # in the order of `rounds`
    for start in range(num):
        reached = [1.0, *odds[start : start + length].cumprod(0).tolist()]
        whole += [float(record.entropy[start + k]) for k in range(len(reached) - 1) if reached[k + 1] > 0]
        for m, k in zip(*np.triu_indices(length), strict=True):
            if start + k < num and reached[m] * (1 - odds[start + m]) > 0 and k - m < branches.length[start + m]:
                broken.append(float(branches.entropy[start + m, k - m]))
    made = rounds(record)
    assert -made.scores(_as_steps(minus_entropy(record))) == pytest.approx(np.array([*whole, *broken]), abs=1e-6)


def test_it_learns_how_likely_a_round_survives(net: Net):
    """Catches features in another order in use than in training, scales that are not folded back, a label turned round.

    On fresh answers its chances must separate rounds better than the product of q does, and be right on average at each depth.
    The answers differ from those it saw: with so few of them an average is off by 0.03 or so by chance.
    """
    fresh = records(PROCESS, 60, num_tokens=20, seed=9)
    parts: list[tuple[np.ndarray, ...]] = []
    for record in fresh:
        made = rounds(record)
        product, entropy = made.scores(log_q(record)), -made.scores(_as_steps(minus_entropy(record)))
        said = [net(*row) for row in zip(product.tolist(), entropy.tolist(), made.depth.astype(float).tolist(), strict=True)]
        parts.append((np.array(said), product, made.label, made.weight, made.depth))
    said, product, label, weight, depth = map(np.concatenate, zip(*parts, strict=True))
    assert auroc(said, label, weight) > auroc(product, label, weight) + 0.02
    for k in (1, 2, 4):
        at = depth == k
        assert np.average(said[at], weights=weight[at]) == pytest.approx(np.average(label[at], weights=weight[at]), abs=0.08)


def test_a_seed_gives_the_same_net_and_touches_no_other_randomness(answers: list[Record], net: Net):
    """Catches draws from the global generator."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert fit(answers, steps=300) == net
    assert torch.equal(torch.get_rng_state(), before)
    assert fit(answers, steps=300, seed=1) != net
    assert net.notes["answers"] == 40
    assert net.notes["loss"] < math.log(2)


def test_labels_without_branches_are_refused():
    """Catches a network that is trained on nothing."""
    with pytest.raises(DataError, match="branches"):
        fit(records(PROCESS, 2, num_tokens=5, seed=1, branches=False))


def test_a_net_comes_back_from_its_file(net: Net, tmp_path: Path):
    """Catches weights that are rounded or moved on the way, and provenance that is lost."""
    net.save(tmp_path / "deep" / "net.json")
    again = Net.from_pretrained(tmp_path / "deep" / "net.json")
    assert (again, again.notes) == (net, net.notes)
    assert again.source == str(tmp_path / "deep" / "net.json")
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["net.json"]


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values.pop("bias"),
        lambda values: values["weights"][0].pop(),
        lambda values: values["biases"].append(1.0),
        lambda values: values.update(bias=math.nan),
        lambda values: values.update(output=None),
    ],
)
def test_a_file_that_is_no_net_is_refused(change, net: Net, tmp_path: Path):
    """Catches half a file that becomes a rule which stops at random."""
    net.save(tmp_path / "net.json")
    values = json.loads((tmp_path / "net.json").read_text())
    change(values)
    (tmp_path / "net.json").write_text(json.dumps(values))
    with pytest.raises(HeadError, match=r"net"):
        Net.from_pretrained(tmp_path / "net.json")


def test_a_missing_file_is_named(tmp_path: Path):
    """Catches a bare FileNotFoundError."""
    with pytest.raises(HeadError, match=r"none\.json does not hold a readable net"):
        Net.from_pretrained(tmp_path / "none.json")
