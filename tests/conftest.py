"""Settings shared by all tests: property tests are reproducible and say nothing about absolute time; no test asks a hub, and
none reads or writes what belongs to the person who runs them."""

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers reads it
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it: a worker for each core, a thread for each worker

import jaxtyping
import pytest
from hypothesis import settings

settings.register_profile("specdecpp", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("specdecpp")

CHECKED, EVERY = 16, 64
"""Calls of a function in a test whose types and shapes are checked, and which of the later ones: when all were, checks took
two thirds of the time of the slowest files."""
_test = 0


def sampled(**options: Any) -> Callable[[Any], Any]:
    """`jaxtyping.jaxtyped`, which the option --jaxtyping-packages puts on all of specdecpp, for some of the calls."""
    decorate = _jaxtyped(**options)

    def decorated(of: Any) -> Any:
        if of.__module__ in (
            "specdecpp.backends.graphs.kernels.layers",
            "specdecpp.backends.graphs.kernels.products",
            "specdecpp.backends.graphs.kernels.draws",
            "specdecpp.backends.graphs.kernels.verdicts",
        ):  # Triton reads their text and never calls them
            return of
        checked = decorate(of)
        if not inspect.isfunction(of) or inspect.iscoroutinefunction(of):
            return checked
        test, num = 0, 0

        @functools.wraps(of)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal test, num
            if test != _test:
                test, num = _test, 0
            num += 1
            return (checked if num <= CHECKED or not num % EVERY else of)(*args, **kwargs)

        return call

    return decorated


_jaxtyped: Any = jaxtyping.jaxtyped
jaxtyping.jaxtyped = sampled  # before specdecpp is imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, so that none of them is left for one core at the end (with --no-loadscope-reorder)."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_runtest_setup() -> None:
    global _test
    _test += 1


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of the tests' own, shared so that a pair is measured once; child processes inherit it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("SPECDECPP_SMOLLM2", "/none")  # verbs without names take the reference pair, installed or not
        yield
