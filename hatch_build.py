"""What the build of a wheel adds: compiled code for common processors, where there is a compiler.

Such a wheel is for one system and says so in its name: which glibc it needs is read from the code. Without a compiler, and in
an editable installation, nothing is added, and the wheel is for every system: the code is compiled where it runs then.

    CXX=aarch64-linux-gnu-g++ python -m build --wheel         # for another processor than this one's
"""

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "specdecpp/backends/native"


class CompiledCode(BuildHookInterface):
    """Hatch's hook: it compiles into a temporary folder and has the wheel take the files from there."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        compilation = _compilation(Path(self.root))
        target = "" if version == "editable" else _machine(compilation.compiler())
        if "linux" not in target:
            return
        machine = target.partition("-")[0]
        self._folder = tempfile.TemporaryDirectory(prefix="specdecpp-")
        glibc, of = 17, compilation.digest()
        for level in (level for level, (kind, _) in compilation.LEVELS.items() if kind == machine):
            path = Path(self._folder.name) / "native.so"
            if reason := compilation.compiled(path, *compilation.flags_of(level), *compilation.PORTABLE):
                print(f"specdecpp: the wheel goes without code for {level}: {reason}", file=sys.stderr)  # noqa: T201
                continue
            glibc = max(glibc, compilation.glibc(path))
            name = compilation.named(level, of, path.read_bytes())
            path = path.rename(path.with_name(name))
            build_data["force_include"][str(path)] = f"{PACKAGE}/shipped/{name}"
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-manylinux_2_{glibc}_{machine}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def _machine(compiler: tuple[str, ...] | None) -> str:
    """The machine that a compiler makes code for; empty without a compiler that answers."""
    try:
        return subprocess.run([*(compiler or ()), "-dumpmachine"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _compilation(root: Path) -> Any:
    """The module that compiles, without the package around it: that needs torch."""
    spec = importlib.util.spec_from_file_location("compilation", root / "src" / PACKAGE / "compilation.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
