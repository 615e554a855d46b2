"""What this machine is, and what was measured on it before.

Measurements are kept in a file each, so that a later process sees the same figures and chooses the same: under
`$XDG_CACHE_HOME/specdecpp`, else `~/.cache/specdecpp`. Delete a file to measure again.
"""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch


def folder() -> Path:
    """Where measurements and converted weights are kept. It may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdecpp"


def about() -> dict[str, Any]:
    """What a measurement depends on beside the models."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "machine": [platform.node(), platform.machine(), os.cpu_count()],
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
    }


def recall(kind: str, of: Mapping[str, Any]) -> dict[str, Any] | None:
    """What `remember` was given for the same facts; None where nothing readable lies."""
    try:
        found = json.loads(_path(kind, of).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # nothing, half a file, or one of another person
    return found if isinstance(found, dict) else None


def remember(kind: str, of: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Keep figures, whole or not at all; a folder that cannot be written is no error, the next process measures again."""
    path = _path(kind, of)
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({**found, "of": dict(of)}, indent=1) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink()


def _path(kind: str, of: Mapping[str, Any]) -> Path:
    key = hashlib.sha256(json.dumps(dict(of), sort_keys=True).encode()).hexdigest()[:16]
    return folder() / f"{kind}-{key}.json"
