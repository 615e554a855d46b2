"""A small model with fewer of its layers: which go, and that the others are trained."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_distil import Killed, filled, pieces_of, plan_of, weights

from specdecpp.distillation import measuring, network, shapes, training, trials
from specdecpp.distillation.run import CARD, PLAN, TEXT, distil
from specdecpp.distillation.target import Target
from specdecpp.errors import BackendError, DataError
from specdecpp.loading.models import load_model
from specdecpp.testing import tiny_model, tiny_tokenizer


def with_small(folder: Path) -> Path:
    """A small model of four layers beside a target: three of the target's, and one among them that does nothing."""
    small = network.of_layers(tiny_model("llama", seed=1, layers=4, head_dim=16), [0, 1, 3, 3])
    with torch.no_grad():
        small.model.layers[2].self_attn.o_proj.weight.zero_()
        small.model.layers[2].mlp.down_proj.weight.zero_()
        small.model.embed_tokens.weight.mul_(1.02)  # else it is a draft of this target
    small.save_pretrained(folder / "small")
    tiny_tokenizer().save_pretrained(folder / "small")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_small(filled(tmp_path_factory.mktemp("pruning")))


def plan(folder: Path, out: Path, **more: Any) -> Any:
    return plan_of(folder, out, **{"shape": None, "start": str(folder / "small"), "layers": 2, "tokens": 4000} | more)


def killing_at(word: str) -> Any:
    """Raises when it is told something that begins so."""

    def tell(line: str) -> None:
        if line.startswith(word):
            raise Killed

    return tell


def test_the_layers_that_are_kept_are_trained(folder: Path, tmp_path: Path) -> None:
    """Catches layers that are chosen and not taken, a draft that is written with all of them or is not trained, and a run that
    goes on with other layers."""
    out = tmp_path / "out"
    with pytest.raises(Killed):
        distil(plan(folder, out), tell=killing_at("training"))  # the layers were settled
    begun = (out / PLAN).read_text()
    card = distil(plan(folder, out))
    assert (out / PLAN).read_text() == begun
    layers = card["draft"]["layers"]
    assert len(layers) == 2
    assert 2 not in layers
    trained = load_model(out / "draft", dtype="auto", device=None, device_map=None)
    assert trained.config.num_hidden_layers == 2
    target, small = (Target(str(folder / name)) for name in ("target", "small"))
    before = network.of_layers(small.model, layers)
    found = [measuring.agreement(target.model, draft, pieces_of(out)) for draft in (before, trained)]
    assert found[1] > found[0] + 0.01
    with pytest.raises(DataError, match="another kind"):
        distil(plan(folder, out, layers=3))


def test_the_layer_that_does_nothing_goes_first(folder: Path, tmp_path: Path) -> None:
    """Catches a choice of the layer that costs most, an acceptance of other layers than those that are kept."""
    out = tmp_path / "out"
    distil(plan(folder, out, layers=4, tokens=800))
    small, pieces = Target(str(folder / "small")).model, pieces_of(out)
    told: list[str] = []
    kept = trials.kept(small, pieces, 2, tell=told.append)
    assert (kept[4], kept[3]) == ([0, 1, 2, 3], [0, 1, 3])
    assert set(kept[2]) < {0, 1, 3}
    whole, same, less = (trials.accepted_with(small, kept[num], pieces) for num in (4, 3, 2))
    assert less < same == pytest.approx(whole, abs=1e-6)
    assert told[0] == f"choosing layers: 3 left, acceptance {same:.2f} before training"
    assert len(small.model.layers) == 4


def test_the_number_of_layers_is_chosen_by_predicted_speed(folder: Path, tmp_path: Path) -> None:
    """Catches a choice that is not the best of its own table, a table that nobody sees, layers of another number."""
    out, said = tmp_path / "out", list[str]()
    card = distil(plan(folder, out, layers=None), say=said.append)
    tried = card["tried"]
    assert sorted(len(one["layers"]) for one in tried) == [2, 3, 4] == sorted(trials.depths(4))
    assert [one["speed_up"] for one in tried] == sorted((one["speed_up"] for one in tried), reverse=True)
    assert card["draft"]["layers"] == tried[0]["layers"]
    assert all(one["expected"] >= one["trained"] > 0 < one["step_s"] for one in tried)
    assert len(said) == 1 + len(tried)
    assert [int(line.split()[0]) for line in said[1:]] == [len(one["layers"]) for one in tried]


@pytest.mark.slow
def test_a_training_that_ends_early_makes_a_draft_and_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a draft of other weights than those so far, a training that is lost or begins anew, a head of a passing draft."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    monkeypatch.setattr(training, "SAVED_S", 0.0)
    with pytest.raises(DataError, match="nothing has been trained"):
        distil(plan(folder, whole, ends=True))
    distil(plan(folder, whole))
    with pytest.raises(Killed):
        distil(plan(folder, out), tell=killing_at("training 5"))
    early = distil(plan(folder, out, ends=True))
    assert 0 < early["training"]["steps"] < (steps := json.loads((whole / CARD).read_text())["training"]["steps"])
    first = weights(out)
    assert distil(plan(folder, out))["training"]["steps"] == steps
    expected, found = weights(whole), weights(out)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert any(not torch.equal(first[name], value) for name, value in expected.items())


def test_what_is_expected_of_more_text() -> None:
    """Catches a gain that does not shrink, a loss that goes on, a number of tokens that is not doubled from the trial's."""
    assert trials._expected([(100, 0.5), (200, 0.6)], 400) == pytest.approx(0.6 + 0.1 * trials.DECAY)
    assert trials._expected([(100, 0.5), (200, 0.6)], 800) == pytest.approx(0.6 + 0.1 * (trials.DECAY + trials.DECAY**2))
    assert trials._expected([(100, 0.6), (200, 0.5)], 800) == 0.5
    assert trials._expected([(100, 0.9), (200, 0.94)], 10**9) == shapes.MOST


def test_the_acceptance_is_that_of_greedy_and_drawn_answers() -> None:
    """Catches a temperature that is applied to q alone, and a target's best token that the draft does not have."""
    q = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]])
    p, row = torch.tensor([[0.6, 0.4], [0.0, 1.0]]), torch.tensor([[0, 2], [1, 2]])
    assert training.served(q.log(), p, row, 0.0).tolist() == [1, 0]
    cold = q**2 / (q**2).sum(-1, keepdim=True)
    drawn = [min(36 / 52, cold[0, 0]) + min(16 / 52, cold[0, 2]), cold[1, 2]]
    assert training.served(q.log(), p, row, 0.5)[2:] == pytest.approx(torch.tensor(drawn))


def test_numbers_that_cannot_be_are_refused_at_once(folder: Path, tmp_path: Path) -> None:
    """Catches a refusal after the text has been written."""
    for layers in (5, 9):
        with pytest.raises(BackendError, match="Ask for fewer"):
            distil(plan(folder, tmp_path / "out", layers=layers))
    for more in ({"start": None}, {"layers": 0}):
        with pytest.raises(ValueError, match="layers are kept of a small model"):
            plan(folder, tmp_path / "out", **more)
    assert not (tmp_path / "out" / TEXT).exists()
