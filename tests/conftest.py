"""Settings shared by all tests: property tests are reproducible and say nothing about absolute time; no test asks a hub, and
none reads or writes what belongs to the person who runs them."""

import os
from collections.abc import Iterator

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers reads it
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it: a worker for each core, a thread for each worker

import pytest
from hypothesis import settings

settings.register_profile("specdecpp", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("specdecpp")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, so that none of them is left for one core at the end (with --no-loadscope-reorder)."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of the tests' own, shared so that a pair is measured once; child processes inherit it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("SPECDECPP_SMOLLM2", "/none")  # verbs without names take the reference pair, installed or not
        yield
