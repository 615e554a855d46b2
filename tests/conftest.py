"""Settings shared by all tests: property tests are reproducible and say nothing about absolute time; no test asks a hub, and
none reads or writes what belongs to the person who runs them."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers reads it
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it: a worker for each core, a thread for each worker

import pytest
from filelock import FileLock
from hypothesis import settings

from specdecpp import cache_dir
from specdecpp.errors import BackendError

BUILT = Path(__file__).parents[1] / "build" / "tests"
"""Compiled code is kept here: its name has the digest of its sources, the compiler and the processor."""

settings.register_profile("specdecpp", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("specdecpp")


@pytest.fixture(scope="session")
def compiled_code() -> Path | None:
    """The compiled code for this processor, made by the worker that comes first; None without a compiler."""
    from specdecpp.backends.native import library  # not above: engines' tests have to come before transformers is imported

    BUILT.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, FileLock(BUILT / "lock"):
        patch.setenv("XDG_CACHE_HOME", str(BUILT))
        try:
            return Path(library.library()._name)
        except BackendError:
            return None


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, compiled_code: Path | None) -> Iterator[None]:
    """A cache of the tests' own, shared so that a pair is measured once; child processes inherit it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("SPECDECPP_SMOLLM2", "/none")  # verbs without names take the reference pair, installed or not
        if compiled_code and compiled_code.is_relative_to(BUILT):
            shutil.copy(compiled_code, cache_dir.folder())
        yield


@pytest.fixture(scope="module")
def pair() -> Any:
    """The pair that ships."""
    from specdecpp.loading.pair import load_pair

    return load_pair("reference")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pair, target and draft, in a folder of the module's own."""
    from specdecpp.testing import save_tiny_pair

    folder = tmp_path_factory.mktemp("pair")
    save_tiny_pair(folder)
    return folder


@pytest.fixture(scope="module")
def server(pair: Any) -> Iterator[Any]:
    """A server around it."""
    from served import served

    with served(pair, max_running=4) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Any) -> Any:
    """OpenAI's own client of that server."""
    return server.client()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """As many threads as processes of the tests have: the last digits depend on it."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
