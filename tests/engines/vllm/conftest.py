"""What vLLM needs on a CPU: its environment, engines that are made once, and the sources of its newest release."""

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
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engines of this process live in it, and their drafters can be looked at
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


def engine(spec: dict[str, Any] | None = None, ours: dict[str, Any] | None = None, **changes: Any) -> Any:
    """An engine in this process: the reference target in float32, `spec` its speculative config, `ours` the plugin's."""
    from vllm import LLM

    options: dict[str, Any] = {
        "model": TARGET,
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 64,
        "enforce_eager": True,
        "distributed_executor_backend": "uni",
        "additional_config": {} if ours is None else {"specdecpp": ours},
    }
    if spec is not None:
        options |= {"speculative_config": spec}
    return LLM(**options | changes)


def drafting(**changes: Any) -> dict[str, Any]:
    """A speculative config: the reference draft, eight draft tokens at most, the true ratio test."""
    return {
        "method": "draft_model",
        "model": DRAFT,
        "num_speculative_tokens": 8,
        "draft_sample_method": "probabilistic",
    } | changes


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
def python() -> Callable[..., str]:
    """Run a program of these tests in a new interpreter, or in two; what it prints. One that hangs is ended."""

    def run(program: str, *arguments: str, ranks: int = 1, timeout_s: float = 600, **environment: str) -> str:
        launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, *launcher, str(Path(__file__).parent / program), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=timeout_s, env=os.environ | environment
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    return run


def json_in(printed: str) -> Any:
    """The last JSON among vLLM's log."""
    return json.loads([line for line in printed.splitlines() if line.startswith(("{", "["))][-1])
