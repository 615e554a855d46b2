"""Clients of others leave connections open, which pytest would make errors of when it ends."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _collected() -> Iterator[None]:
    """Have what they leave collected while warnings of it are still ignored."""
    yield
    gc.collect()


def pytest_configure(config: pytest.Config) -> None:
    for kind in ("ResourceWarning", "pytest.PytestUnraisableExceptionWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::{kind}")
