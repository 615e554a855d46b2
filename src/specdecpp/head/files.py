"""A head read from disk: `head.safetensors` and `head.json` in a folder."""

import json
from pathlib import Path

from safetensors.torch import load

from specdecpp.errors import HeadError
from specdecpp.head.model import CARD, DIGEST, WEIGHTS, AcceptanceHead, HeadCard, digest


def read(source: str | Path) -> AcceptanceHead:
    """A head from a folder, or by the hub name of one. Raises `HeadError`."""
    folder = _locate(source)
    try:
        head = _read(folder)
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


def _read(folder: Path) -> AcceptanceHead:
    if not (folder / CARD).is_file():
        names = ", ".join(sorted(p.name for p in folder.iterdir()))
        raise HeadError(f"{folder} holds no head: expected {CARD} and {WEIGHTS}; found {names or 'nothing'}.")
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
        raise HeadError(f"{folder} is a file. Give the folder that holds {CARD} and {WEIGHTS}.")
    if str(source).count("/") != 1 or str(source).startswith((".", "/", "~")):
        raise HeadError(f"there is no head at {folder}. Give a folder with {CARD} and {WEIGHTS}, or a hub name.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(source)))
    except Exception as error:  # the hub's own exceptions differ between its versions
        raise HeadError(f"{source} is neither a local folder nor a head that the hub can deliver ({error}).") from error
