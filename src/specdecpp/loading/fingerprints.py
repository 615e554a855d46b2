"""A checkpoint's fingerprint: a digest of all its weights, remembered as long as its files stay as they are.

model -> fingerprint           files -> state -> remembered: from memory, else made and kept there
"""

import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdecpp import cache_dir
from specdecpp.backends import trimmed

FORMAT = 1
"""Counts up when the same weights get another fingerprint."""
SETTLED_S = 2.0
"""Age of a file from which on another write changes its times; some file systems count in whole seconds."""


def fingerprint(model: Any) -> str:
    """32 hex digits of a model's weights: names and shapes of all parameters, every value as bfloat16 whatever it is loaded in
    (float16 lacks small values and is another model), and which tokens are scored where these are not all."""

    def digest(named: tuple[str, Tensor]) -> bytes:
        name, parameter = named
        found = hashlib.blake2b(f"{name}{tuple(parameter.shape)}".encode(), digest_size=16)
        for values in parameter.detach().reshape(-1).split(2**23):
            found.update(values.to(device="cpu", dtype=torch.bfloat16).view(torch.uint8).numpy().data)
        return found.digest()

    ids = getattr(model.config, trimmed.KEY, None)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        whole = b"".join(pool.map(digest, sorted(model.named_parameters(), key=lambda named: named[0])))
    whole += b"" if ids is None else f"{trimmed.KEY}{sorted(ids)}".encode()
    return hashlib.blake2b(whole, digest_size=16).hexdigest()


def remembered(files: list[Path], make: Callable[[], str], *, dtype: Any) -> str:
    """The fingerprint that `make` gives for these files, read in this type; from memory where they are as they were then."""
    import transformers

    before = state(files)
    of = {"files": before, "dtype": str(dtype), "format": FORMAT, "transformers": transformers.__version__}
    found = (cache_dir.recall("fingerprint", of) or {}).get("fingerprint") if before else None
    if isinstance(found, str):
        return found
    made = make()
    if before and state(files) == before and time.time() - max(max(found[-2:]) for found in before) / 1e9 > SETTLED_S:
        cache_dir.remember("fingerprint", of, {"fingerprint": made})
    return made


def state(files: list[Path]) -> list[Any]:
    """Facts that change when a file does: of each its path, size, inode and the times of its last changes."""
    found = [(path.resolve(), path.stat()) for path in sorted(files)]
    return [[str(path), stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns] for path, stat in found]


def folder_of(name: str | Path) -> Path | None:
    """The folder of a saved model, also in the hub's cache; None where there is none."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(str(name), "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def weight_files(name: str | Path) -> list[Path]:
    """The files that a checkpoint's weights are read from, and its configuration. None where some may lie elsewhere."""
    folder = folder_of(name)
    if folder is None or (folder / "adapter_config.json").exists():
        return []
    return [path for pattern in ("*.safetensors", "*.bin", "config.json") for path in folder.glob(pattern)]
