"""The acceptance head: its folder, the published reference form, its calibration, and what a bad file says."""

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from specdecpp import AcceptanceHead, HeadError
from specdecpp.head import Calibration, HeadCard
from specdecpp.loading.pair import REFERENCE

D = 12
State = dict[str, torch.Tensor]


def random_head(num_layers: int = 3, **card: Any) -> AcceptanceHead:
    """A head with random weights: a new one starts as the identity, under which half of the bugs are invisible."""
    head = AcceptanceHead(HeadCard(hidden_size=D, num_layers=num_layers, **card))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return head


def rows(num: int = 6) -> torch.Tensor:
    return torch.randn(num, D, generator=torch.Generator().manual_seed(1))


def is_same(one: AcceptanceHead, other: AcceptanceHead) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# Our own form


@pytest.mark.parametrize("form", [{}, {"form": "look_ahead", "vocab_size": 5, "scalars": ("log_q", "depth"), "width": 7}])
@pytest.mark.parametrize("num_layers", [0, 4])
def test_a_head_comes_back_as_it_was_saved(num_layers: int, form: dict[str, Any], tmp_path: Path) -> None:
    """Catches weights or card fields that are lost, renamed or rounded on the way to disk."""
    head = random_head(
        num_layers,
        target="aa",
        draft="bb",
        sampling={"temperature": 0.7, "top_p": 0.9},
        calibration=Calibration(rejection_weight=6.0, temperature=1.3, bias=-0.2),
        stopping={"threshold": 0.55},
        notes={"seed": 3, "losses": [0.5, 0.4]},
        **form,
    )
    head.save_pretrained(tmp_path / "new" / "folder")
    back = AcceptanceHead.from_pretrained(tmp_path / "new" / "folder")
    assert back.card == head.card
    assert not back.training
    assert is_same(back, head)


def test_a_failed_save_leaves_the_old_head(tmp_path: Path) -> None:
    """Catches a half-written folder (what is no JSON must not cost the head that was there), and a traceback after training."""
    old, new = random_head(1), AcceptanceHead(HeadCard(hidden_size=D, num_layers=1, notes={"data": object()}))
    old.save_pretrained(tmp_path)
    with pytest.raises(TypeError):
        new.save_pretrained(tmp_path)
    assert is_same(AcceptanceHead.from_pretrained(tmp_path), old)
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadError, match=r"cannot be written into .*file/head .*Name another folder"):
        old.save_pretrained(tmp_path / "file" / "head")


def test_cards_of_other_versions_are_read(tmp_path: Path) -> None:
    """Catches defaults that are demanded (only the sizes are needed), and a head that is no longer read because it says more
    than acceptance, or is read by another of its outputs."""
    head = random_head(2, form="look_ahead", vocab_size=5)
    head.save_pretrained(tmp_path)
    weights, path = load_file(tmp_path / "head.safetensors"), tmp_path / "head.json"
    more = {name: torch.cat([weights[name], torch.ones_like(weights[name])]) for name in ("output.weight", "output.bias")}
    save_file(weights | more, tmp_path / "head.safetensors")
    digest = hashlib.sha256((tmp_path / "head.safetensors").read_bytes()).hexdigest()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"outputs": ["accept", "next"], "weights_sha256": digest}))
    back = AcceptanceHead.from_pretrained(tmp_path)
    assert back.card == head.card
    assert is_same(back, head)
    random_head().save_pretrained(tmp_path)
    path.write_text(json.dumps({"hidden_size": D, "num_layers": 3}), encoding="utf-8")
    assert AcceptanceHead.from_pretrained(str(tmp_path)).card == HeadCard(hidden_size=D)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_head_is_float32_whatever_it_reads(dtype: torch.dtype, tmp_path: Path) -> None:
    """Catches a dtype error as soon as the draft runs in bfloat16, and a head that changes its dtype on disk."""
    head, hidden = random_head(), rows().to(dtype)
    assert head(hidden).dtype == torch.float32
    torch.testing.assert_close(head(hidden), head(hidden.float()))
    assert 0 < head.estimator()(hidden[0]) < 1
    random_head().to(dtype).save_pretrained(tmp_path)
    assert {p.dtype for p in AcceptanceHead.from_pretrained(tmp_path).parameters()} == {torch.float32}


def test_blocks_have_weights_of_their_own_and_rows_any_axes() -> None:
    """Catches the [block] * D of the reference (three blocks of one capacity), and a squeeze that drops a batch of one."""
    head = random_head()
    assert len({p.data_ptr() for p in head.parameters()}) == 8
    assert (head(rows(1)).shape, head(rows(1)[0]).shape) == ((1,), ())
    torch.testing.assert_close(head(rows(6).view(2, 3, D)), head(rows(6)).view(2, 3))


@pytest.mark.parametrize(
    ("card", "message"),
    [
        ({"form": "sideways"}, "lagged or look_ahead, got 'sideways'"),
        ({"vocab_size": 5}, "a lagged head has no row for each token"),
        ({"scalars": ("luck",)}, "'luck' is not one of log_q, entropy"),
        ({"width": 0}, "width=0"),
        ({"num_layers": -1}, "num_layers=-1"),
    ],
)
def test_a_card_that_describes_no_head_is_refused(card: dict[str, Any], message: str) -> None:
    """Catches a mistake in a card that shows as a wrong shape much later."""
    with pytest.raises(HeadError, match=message):
        HeadCard(hidden_size=D, **card)


def test_a_changed_card_keeps_the_weights_and_the_old_head() -> None:
    """Catches a calibration that is written into the head it was derived from, or that resets the weights."""
    head = random_head()
    other = head.with_card(calibration=Calibration(bias=2.0), stopping={"threshold": 0.3})
    assert is_same(head, other)
    assert head.card.calibration == Calibration()
    assert (other.card.stopping["threshold"], other.card.calibration.bias) == (0.3, 2.0)
    assert other.estimator()(rows()[0]) > head.estimator()(rows()[0])


def test_unknown_fingerprints_are_not_compared() -> None:
    """Catches a head, or a pair, of unknown origin being refused: only two known prints can exclude each other."""
    random_head().check(hidden_size=D, target="aa", draft="bb")
    random_head(target="aa", draft="bb").check(hidden_size=D)
    random_head(target="aa", draft="bb").check(hidden_size=D, target="aa", draft="bb")
    with pytest.raises(HeadError, match="made for another draft: its card says bb, this draft is cc"):
        random_head(target="aa", draft="bb").check(hidden_size=D, target="aa", draft="cc")
    with pytest.raises(HeadError, match="each of 5 tokens, the pair has 6"):
        random_head(1, form="look_ahead", vocab_size=5).check(hidden_size=D, vocab_size=6)


# Calibration


def test_the_raw_score_minimises_the_weighted_loss() -> None:
    """Catches a closed form that belongs to another loss: -P log s - w (1 - P) log(1 - s), minimised on a grid."""
    s = torch.linspace(0.0005, 0.9995, 2000, dtype=torch.float64)
    for probability, weight in ((0.3, 6.0), (0.9, 3.0), (0.7, 1.0)):
        loss = -probability * s.log() - weight * (1 - probability) * (1 - s).log()
        best = s[loss.argmin()]
        calibrated = torch.sigmoid(Calibration(rejection_weight=weight).apply(best.logit()))
        assert float(calibrated) == pytest.approx(probability, abs=2e-3)


@pytest.mark.parametrize("bad", [{"rejection_weight": 0.0}, {"temperature": 0.0}, {"temperature": float("nan")}])
def test_bad_calibrations_are_value_errors(bad: dict[str, float]) -> None:
    """Catches a division by zero, or estimates that are all NaN or all one half, far from where the value was given."""
    with pytest.raises(ValueError, match="a calibration needs"):
        Calibration(**bad)


# The published reference form


def reference_state(num_layers: int) -> State:
    """The state dict of the authors' checkpoint: D names for one block, then two outputs (reject, accept)."""
    generator = torch.Generator().manual_seed(num_layers)
    weight, bias = (0.3 * torch.randn(D, D, generator=generator)).bfloat16().float(), torch.ones(D)
    state = {f"model.{i}.linear.{k}": v for i in range(num_layers) for k, v in (("weight", weight), ("bias", bias))}
    return state | {
        f"model.{num_layers}.weight": torch.randn(2, D, generator=generator).bfloat16().float(),
        f"model.{num_layers}.bias": torch.tensor([0.25, -0.5]),
    }


def untied(num_layers: int) -> State:
    state = {k: v.clone() for k, v in reference_state(num_layers).items()}
    state["model.1.linear.weight"] *= -2.0
    state["model.2.linear.bias"] += 1.0
    return state


def reference_probability(state: State, num_layers: int, hidden: torch.Tensor) -> torch.Tensor:
    """The reference's own computation, written from its description: softmax of two logits, index 1 = accept."""
    x = hidden.double()
    for i in range(num_layers):
        z = x @ state[f"model.{i}.linear.weight"].double().T + state[f"model.{i}.linear.bias"].double()
        x = x + z / (1 + torch.exp(-z))
    logits = x @ state[f"model.{num_layers}.weight"].double().T + state[f"model.{num_layers}.bias"].double()
    return torch.exp(logits[..., 1]) / torch.exp(logits).sum(-1)


def write_bin(state: State, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    torch.save({k: v.to(dtype) for k, v in state.items()}, folder / "pytorch_model.bin")


def write_safe(state: State, folder: Path, without: tuple[str, ...] = ()) -> None:
    save_file({k: v.clone() for k, v in state.items() if not k.startswith(without)}, folder / "model.safetensors")


def write_config(folder: Path, num_layers: int, hidden_size: int = D) -> None:
    config = {"hidden_size": hidden_size, "num_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


WRITERS: dict[str, Callable[[State, Path], None]] = {
    "pickle": write_bin,
    "safetensors": write_safe,
    "tied blocks once": lambda state, folder: write_safe(state, folder, ("model.1.linear", "model.2.linear")),
    "bfloat16": lambda state, folder: write_bin(state, folder, torch.bfloat16),
}


@pytest.mark.parametrize(("num_layers", "state"), [(0, reference_state(0)), (3, reference_state(3)), (3, untied(3))])
@pytest.mark.parametrize("write", WRITERS)
def test_the_reference_form_gives_the_reference_probability(write: str, num_layers: int, state: State, tmp_path: Path) -> None:
    """Catches a wrong sign of the two outputs, a lost block, a tied block that is read once or one that is taken for granted,
    weights left in bfloat16, and a head that cannot be saved in our form."""
    if write == "tied blocks once":
        state = reference_state(num_layers)
    elif write == "bfloat16":
        state = {k: v.bfloat16().float() for k, v in state.items()}
    WRITERS[write](state, tmp_path)
    write_config(tmp_path, num_layers)
    head = AcceptanceHead.from_pretrained(tmp_path)
    assert head.card.num_layers == num_layers
    expected = reference_probability(state, num_layers, rows())
    torch.testing.assert_close(torch.sigmoid(head(rows())).double(), expected, atol=1e-5, rtol=0)
    assert head.estimator()(rows()[0]) == pytest.approx(float(expected[0]), abs=1e-5)
    head.save_pretrained(tmp_path / "ours")
    assert is_same(head, AcceptanceHead.from_pretrained(tmp_path / "ours"))


# Bad files


def ours(folder: Path, card: bytes | None = None, weights: bytes | None = None) -> None:
    """A head without a digest, one of its files another one."""
    random_head().save_pretrained(folder)
    path = folder / "head.json"
    if card is None:
        found = json.loads(path.read_text())
        del found["weights_sha256"]
        card = json.dumps(found).encode()
    path.write_bytes(card)
    if weights is not None:
        (folder / "head.safetensors").write_bytes(weights)


def theirs(folder: Path, **changes: torch.Tensor | None) -> None:
    state = reference_state(3) | {name.replace("_", "."): tensor for name, tensor in changes.items()}
    write_bin({name: tensor for name, tensor in state.items() if tensor is not None}, folder)
    write_config(folder, 3)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "card is not json": (lambda f: ours(f, b"{"), "JSONDecodeError"),
    "card is not text": (lambda f: ours(f, b"\xff\xfe\x00"), "UnicodeDecodeError"),
    "card lacks the width": (lambda f: ours(f, b'{"num_layers": 3}'), "hidden_size"),
    "card has an unknown field": (lambda f: ours(f, b'{"hidden_size": 12, "colour": 1}'), "colour"),
    "card has a bad calibration": (
        lambda f: ours(f, b'{"hidden_size": 12, "calibration": {"temperature": 0.0}}'),
        "a calibration needs",
    ),
    "card of another width": (lambda f: ours(f, b'{"hidden_size": 13}'), "size mismatch"),
    "weights missing": (lambda f: (ours(f), (f / "head.safetensors").unlink()), "head.safetensors"),
    "weights corrupt": (lambda f: ours(f, weights=b"garbage"), "SafetensorError"),
    "weights are no numbers": (lambda f: ours(f, weights=save(nan())), "no finite numbers"),
    "reference: not a pickle": (
        lambda f: (theirs(f), (f / "pytorch_model.bin").write_bytes(b"<html>not found</html>")),
        "does not hold a readable head",
    ),
    "reference: block missing": (lambda f: theirs(f, model_1_linear_weight=None), "model.1.linear.weight"),
    "reference: one output": (lambda f: theirs(f, model_3_weight=torch.ones(1, D)), "two outputs .* has 1"),
    "reference: config without sizes": (lambda f: (theirs(f), (f / "config.json").write_text("{}")), "hidden_size"),
}


def nan() -> State:
    return {name: torch.full_like(tensor, torch.nan) for name, tensor in random_head().state_dict().items()}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_head_is_a_head_error_that_names_the_damage(damage: str, tmp_path: Path) -> None:
    """Catches errors of json, pickle, safetensors or torch that escape the tree or hide which file is meant."""
    make, message = DAMAGES[damage]
    make(tmp_path)
    with pytest.raises(HeadError, match=message) as raised:
        AcceptanceHead.from_pretrained(tmp_path)
    assert str(tmp_path) in str(raised.value)


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]


def test_damage_of_the_weights_is_refused_by_their_digest(tmp_path: Path) -> None:
    """Catches weights that were damaged on the way and decode as if they were the head's own: any bit, anywhere in the file."""
    random_head().save_pretrained(tmp_path)
    path = tmp_path / "head.safetensors"
    whole, dice = path.read_bytes(), random.Random(0)
    places = (0, 9, len(whole) - 1, *(dice.randrange(len(whole)) for _ in range(97)))
    for damaged in (whole[:-1], b"", whole + b"x", *(flipped(whole, at) for at in places)):
        path.write_bytes(damaged)
        with pytest.raises(HeadError, match=r"is not the file that head\.json was written with.*Copy the head again"):
            AcceptanceHead.from_pretrained(tmp_path)
    card, weights = (REFERENCE / "head" / name for name in ("head.json", "head.safetensors"))
    assert json.loads(card.read_text())["weights_sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest(), "that ships"


def test_a_head_without_a_digest_is_read_or_refused(tmp_path: Path) -> None:
    """Catches heads of an earlier version that are no longer read, and damage that is a signal or a traceback where nobody has
    written down what the weights were."""
    head = random_head()
    ours(tmp_path)
    assert is_same(AcceptanceHead.from_pretrained(tmp_path), head)
    path = tmp_path / "head.safetensors"
    whole, dice = path.read_bytes(), random.Random(1)
    header = 8 + int.from_bytes(whole[:8], "little")
    refused = 0
    for at in [*range(8), *(dice.randrange(header) for _ in range(92))]:
        path.write_bytes(flipped(whole, at))
        try:
            AcceptanceHead.from_pretrained(tmp_path)
        except HeadError:
            refused += 1
    assert refused > 50


def test_a_pickle_with_code_is_refused(tmp_path: Path) -> None:
    """Catches a checkpoint that runs code when it is loaded."""
    ran = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (ran,))

    write_config(tmp_path, 3)
    torch.save({"model.3.weight": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(HeadError):
        AcceptanceHead.from_pretrained(tmp_path)
    assert not ran.exists()


def test_places_without_a_head_say_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a message from which one cannot tell that the wrong folder was named, a missing path that is sent to the hub, and
    the hub's own exceptions."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "empty").mkdir()
    for source, message in (
        (tmp_path, r"expected head\.json and head\.safetensors.*found config\.json, empty"),
        (tmp_path / "empty", "found nothing"),
        (tmp_path / "config.json", r"config\.json is a file\. Give the folder"),
        (tmp_path / "none", f"there is no head at {tmp_path}/none"),
        ("nobody/no-such-head", "nobody/no-such-head is neither a local folder nor"),
    ):
        with pytest.raises(HeadError, match=message):
            AcceptanceHead.from_pretrained(source)
