"""Where figures come from: command, day, commit, processor. Standard library only."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def provenance(*program: str) -> dict[str, Any]:
    """Of this process: `program` is its command without arguments, `load` that of the machine over the last minute. Of files
    elsewhere on the machine only the names are told."""
    sha = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "command": shlex.join([*program, *(Path(arg).name if Path(arg).is_absolute() else arg for arg in sys.argv[1:])]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "git": sha.stdout.strip() or None,
        "machine": {"cpu": cpu(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 2)},
    }


def cpu() -> str:
    """The processor's name, and what it can do with vectors."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    sets = [name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16") if name in facts.get("flags", "")]
    name = f"{facts.get('model name', 'unknown')} (family {facts.get('cpu family')}, model {facts.get('model')})"
    return f"{name} with {', '.join(sets)}" if sets else name
