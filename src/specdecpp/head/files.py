"""A head read from disk: `head.safetensors` and `head.json` in a folder, or the form that the authors publish theirs in."""

import json
from pathlib import Path

import torch
from safetensors.torch import load

from specdecpp.errors import HeadError
from specdecpp.head.model import CARD, DIGEST, WEIGHTS, AcceptanceHead, HeadCard, digest

_REFERENCE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def read(source: str | Path) -> AcceptanceHead:
    """A head from a folder of either form, or by the hub name of one. Raises `HeadError`."""
    folder = _locate(source)
    try:
        head = _read_ours(folder) if (folder / CARD).is_file() else _read_reference(folder)
    except HeadError:
        raise
    except Exception as error:  # json, safetensors and pickle each have errors of their own
        raise HeadError(
            f"{folder} does not hold a readable head ({type(error).__name__}: {error}). A head is a folder with "
            f"{CARD} and {WEIGHTS}; write one with save_pretrained."
        ) from error
    if bad := [name for name, tensor in head.state_dict().items() if not tensor.isfinite().all()]:
        raise HeadError(f"the head in {folder} has weights that are no finite numbers, in {bad[0]}. Train it anew.")
    return head.eval()


def _read_ours(folder: Path) -> AcceptanceHead:
    text, weights = (folder / CARD).read_text(encoding="utf-8"), (folder / WEIGHTS).read_bytes()
    head = AcceptanceHead(HeadCard.from_json(text))
    written, found = json.loads(text).get(DIGEST), digest(weights)
    if written not in (None, found):
        raise HeadError(
            f"{folder / WEIGHTS} is not the file that {CARD} was written with: its SHA-256 is {found}, and {DIGEST} of the "
            f"card says {written}. Copy the head again, or train it anew; if the weights were changed on purpose, take "
            f"{DIGEST} out of the card."
        )
    state = load(weights)
    head.load_state_dict(state | {name: state[name][:1] for name in ("output.weight", "output.bias") if name in state})
    return head


def _locate(source: str | Path) -> Path:
    folder = Path(source)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise HeadError(f"{folder} is a file. Give the folder that holds {CARD} (or config.json) and the weights.")
    if str(source).count("/") != 1 or str(source).startswith((".", "/", "~")):
        raise HeadError(f"there is no head at {folder}. Give a folder with {CARD} and {WEIGHTS}, or a hub name.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(source)))
    except Exception as error:  # the hub's own exceptions differ between its versions
        raise HeadError(f"{source} is neither a local folder nor a head that the hub can deliver ({error}).") from error


def _read_reference(folder: Path) -> AcceptanceHead:
    """The form of the authors' checkpoint: config.json {hidden_size, num_layers}; keys model.{i}.linear.*, model.{D}.*."""
    weights = next((folder / name for name in _REFERENCE_WEIGHTS if (folder / name).is_file()), None)
    if not (folder / "config.json").is_file() or weights is None:
        raise HeadError(
            f"{folder} holds no head: expected {CARD} and {WEIGHTS}, or config.json with "
            f"{' or '.join(_REFERENCE_WEIGHTS)}; found {', '.join(sorted(p.name for p in folder.iterdir())) or 'nothing'}."
        )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    size, last = int(config["hidden_size"]), int(config["num_layers"])
    is_bin = weights.suffix == ".bin"
    state = torch.load(weights, map_location="cpu", weights_only=True) if is_bin else load(weights.read_bytes())
    state = {name: tensor.float() for name, tensor in state.items()}  # before the subtraction below, which would round
    # Tied blocks may be stored once: safetensors drops duplicates and keeps the first name.
    is_stored_once = not any(f"model.{i}.linear.weight" in state for i in range(1, last))
    ours = {}
    for part in ("weight", "bias"):
        for i in range(last):
            ours[f"blocks.{i}.linear.{part}"] = state[f"model.{0 if is_stored_once else i}.linear.{part}"]
        reject_accept = state[f"model.{last}.{part}"]
        if len(reject_accept) != 2:
            raise HeadError(f"the reference form has two outputs (reject, accept); {weights} has {len(reject_accept)}")
        ours[f"output.{part}"] = reject_accept[1:] - reject_accept[:1]
    head = AcceptanceHead(HeadCard(hidden_size=size, num_layers=last, notes={"form": "reference"}))
    head.load_state_dict(ours)
    return head
