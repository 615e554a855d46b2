"""A small model with fewer of its layers: which go, and that the others are trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_distil import Killed, filled, killing, plan_of

from specdecpp.distillation import measuring, network, pruning, text
from specdecpp.distillation.run import PLAN, TEXT, distil
from specdecpp.distillation.target import Target
from specdecpp.errors import BackendError, DataError
from specdecpp.loading.models import load_model
from specdecpp.testing import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, prompts, and a small model of four layers: three of the target's, and one among them that does nothing."""
    folder = filled(tmp_path_factory.mktemp("pruning"))
    small = network.of_layers(tiny_model("llama", seed=1, layers=4, head_dim=16), [0, 1, 3, 3])
    with torch.no_grad():
        small.model.layers[2].self_attn.o_proj.weight.zero_()
        small.model.layers[2].mlp.down_proj.weight.zero_()
        small.model.embed_tokens.weight.mul_(1.02)  # else it is a draft of this target
    small.save_pretrained(folder / "small")
    tiny_tokenizer().save_pretrained(folder / "small")
    return folder


def plan(folder: Path, out: Path, **more: Any) -> Any:
    return plan_of(folder, out, **{"shape": None, "start": str(folder / "small"), "layers": 2, "tokens": 4000} | more)


def pieces_of(out: Path) -> list[text.TextPiece]:
    return [piece for path in sorted((out / TEXT).glob("text-*")) for piece in text.pieces(path)]


def test_the_layers_that_are_kept_are_trained(folder: Path, tmp_path: Path) -> None:
    """Catches layers that are chosen and not taken, a draft that is written with all of them or is not trained, and a run that
    goes on with other layers."""
    out = tmp_path / "out"
    with pytest.raises(Killed):
        distil(plan(folder, out), tell=killing(6))  # two choices have been made
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
    distil(plan(folder, out, layers=None, tokens=800))
    small, pieces = Target(str(folder / "small")).model, pieces_of(out)
    told: list[str] = []
    layers, accepted = pruning.kept(small, pieces, 3, tell=told.append)
    assert layers == [0, 1, 3]
    whole = pruning.accepted_with(small, range(4), pieces)
    assert accepted == pytest.approx(whole, abs=1e-6)
    assert told == [f"choosing layers: 3 left, acceptance {accepted:.2f} before training"]
    fewer, less = pruning.kept(small, pieces, 2)
    assert set(fewer) < {0, 1, 3}
    assert less < accepted
    assert len(small.model.layers) == 4


def test_numbers_that_cannot_be_are_refused_at_once(folder: Path, tmp_path: Path) -> None:
    """Catches a refusal after the text has been written."""
    for layers in (4, 9):
        with pytest.raises(BackendError, match="Ask for fewer"):
            distil(plan(folder, tmp_path / "out", layers=layers))
    for more in ({"start": None}, {"layers": 0}):
        with pytest.raises(ValueError, match="layers are kept of a small model"):
            plan(folder, tmp_path / "out", **more)
    assert not (tmp_path / "out" / TEXT).exists()
