"""Test suites of others: fetched from GitHub at a pinned commit and run as they are. None of their code is here.

SPECDECPP_FOREIGN=FOLDER   checkouts that are there already, FOLDER/transformers, FOLDER/vllm and so on: needs no network
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

VARIABLE = "SPECDECPP_FOREIGN"


@dataclass(frozen=True, kw_only=True)
class Source:
    """Folders of a repository at a commit or tag."""

    repository: str
    commit: str
    folders: tuple[str, ...]

    @cached_property
    def root(self) -> Path:
        """Where they lie: fetched once into this environment. Skips the module where they cannot be had, and says how."""
        name = self.repository.partition("/")[2]
        if given := os.environ.get(VARIABLE):
            root, problem = Path(given) / name, ""
        else:
            root = Path(sys.prefix) / "foreign" / f"{name}-{self.commit}"
            problem = "" if root.is_dir() else self._fetch(root)
        if not root.is_dir():
            pytest.skip(
                f"{self.repository} at {self.commit} is not at {root}. {problem} Fetch it where there is a network, and name "
                f"the folder of the checkout with {VARIABLE}.",
                allow_module_level=True,
            )
        return root

    def _fetch(self, root: Path) -> str:
        """Check out the folders; what went wrong, else nothing."""
        part = root.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for command in (
            ("init", "-q"),
            ("remote", "add", "origin", f"https://github.com/{self.repository}"),
            ("sparse-checkout", "set", *self.folders),
            ("fetch", "-q", "--depth", "1", "--filter=blob:none", "origin", self.commit),
            ("-c", "advice.detachedHead=false", "checkout", "-q", "FETCH_HEAD"),
        ):
            done = subprocess.run(["git", *command], cwd=part, capture_output=True, text=True, check=False)
            if done.returncode:
                return f"git said: {done.stderr.strip()[-200:]}"
        part.rename(root)
        return ""


LLAMA_CPP = Source(
    repository="ggml-org/llama.cpp",
    commit="956973c76466b6c791d7bdbe6eed3aa3235b2dc1",
    folders=("tools/server/tests", "tools/server/bench/speed-bench"),
)


def loaded(path: Path, name: str, instead: Mapping[str, ModuleType] = {}) -> Any:
    """A module from its file, which finds the modules `instead` of those of that name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = {name: sys.modules.get(name) for name in instead}
    sys.modules.update(instead)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            spec.loader.exec_module(module)
    finally:  # no patch.dict: it would forget what else was imported meanwhile
        for name, there in before.items():
            if there is None:
                del sys.modules[name]
            else:
                sys.modules[name] = there
    return module


def stand_in(name: str, **contents: Any) -> ModuleType:
    """A module with these contents, which has any other name as well, as a class without use."""
    module = ModuleType(name)
    module.__dict__.update(contents, __getattr__=lambda attribute: type(attribute, (), {}), __path__=[])
    return module


def adopted(module: Any, left_out: Mapping[str, str]) -> dict[str, Any]:
    """The tests and fixtures of a module, for a module of ours; those `left_out` are skipped with their reason.

    A key that ends in * stands for all names that begin so; each key must meet a test.
    """
    found = {name: value for name, value in vars(module).items() if _is_collected(name, value)}
    for pattern, reason in left_out.items():
        names = [name for name in found if name == pattern or (pattern[-1] == "*" and name.startswith(pattern[:-1]))]
        assert names, f"{module.__name__} has no {pattern}: the list of what is left out is of another version"
        for name in names:
            found[name] = pytest.mark.skip(reason=reason)(found[name])
    return found


def _is_collected(name: str, value: Any) -> bool:
    return name.startswith("test_") or type(value).__name__ == "FixtureFunctionDefinition"
