"""The head of a served pair: where it lies, and whether it was made for that pair.

A head exported into the folder of its draft needs no mention: `DRAFT/specdecpp_head/head.json` is found by the plugin.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from specdecpp.errors import HeadError
from specdecpp.head import CARD, AcceptanceHead
from specdecpp.loading import fingerprints

BESIDE = "specdecpp_head"
"""The folder of a head inside the folder of its draft."""


def export_head(head: str | Path, draft: str | Path) -> Path:
    """Copy a head into the folder of its draft, where the plugin finds it. Returns the new folder.

    Raises `HeadError` for a head that was made for another draft, or a draft that is no folder.

    >>> export_head("runs/head", "Qwen3-0.6B")                                                # doctest: +SKIP
    PosixPath('Qwen3-0.6B/specdecpp_head')
    """
    found = AcceptanceHead.from_pretrained(head)
    if not (Path(draft) / "config.json").is_file():
        raise HeadError(f"{draft} is not the folder of a model. Give the folder that the draft was saved into.")
    found.check(hidden_size=found.card.hidden_size, draft=folder_fingerprint(draft))
    found.save_pretrained(Path(draft) / BESIDE)
    return Path(draft) / BESIDE


def find_head(named: str | None, draft: str) -> AcceptanceHead | None:
    """The head that was named, else the one beside the draft (a folder or a hub name), else None."""
    if named is not None:
        return AcceptanceHead.from_pretrained(named)
    folder = _folder(draft, f"{BESIDE}/*")
    beside = None if folder is None else folder / BESIDE
    return AcceptanceHead.from_pretrained(beside) if beside is not None and (beside / CARD).is_file() else None


def check_head(head: AcceptanceHead, *, target: str, draft: str, hidden_size: int, vocab_size: int) -> None:
    """Raise `HeadError` unless the head was made for the checkpoints of these names."""
    card = head.card
    head.check(
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        target=None if card.target is None else folder_fingerprint(target),
        draft=None if card.draft is None else folder_fingerprint(draft),
    )


def fitting_head(named: str | None, *, target: str, draft: str, hidden_size: int, vocab_size: int) -> AcceptanceHead | None:
    """The head that `find_head` gives, checked as by `check_head`; None where there is none. Raises `HeadError`."""
    head = find_head(named, draft)
    if head is not None:
        check_head(head, target=target, draft=draft, hidden_size=hidden_size, vocab_size=vocab_size)
    return head


def folder_fingerprint(name: str | Path) -> str | None:
    """`fingerprints.fingerprint` of a saved checkpoint, without loading it: an engine's own weights are fused and sharded.

    None where it cannot be told: no safetensors, or parameters that transformers stores under other names than it uses.
    """
    folder = _folder(name, "*.safetensors", "config.json")
    if folder is None:
        return None
    try:
        files = fingerprints.weight_files(folder)
        return fingerprints.remembered(files, lambda: fingerprints.fingerprint(_Stored(folder)), dtype="auto")
    except (KeyError, OSError, ValueError):
        return None


class _Stored:
    """The parameters of a checkpoint on disk; only the pages that are read are loaded."""

    def __init__(self, folder: Path):
        from transformers import AutoConfig

        self._folder, self.config = folder, AutoConfig.from_pretrained(folder)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        from safetensors import safe_open

        files = [safe_open(path, framework="pt") for path in sorted(self._folder.glob("*.safetensors"))]
        home = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (no mapping)
        for name in _parameter_names(self.config):
            yield name, home[name].get_tensor(name)


def _parameter_names(config: Any) -> list[str]:
    """As transformers names them; tied ones are stored twice or once, and count once."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return [name for name, _ in model.named_parameters()]


def _folder(name: str | Path, *patterns: str) -> Path | None:
    """A local folder, or what the hub's cache or the hub has of these files; None where nobody has them."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(name), allow_patterns=list(patterns)))
    except Exception:  # the hub's own exceptions differ between its versions
        return None
