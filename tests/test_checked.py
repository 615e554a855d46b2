"""The check of types and shapes in `make typecheck`."""

import pytest
from jaxtyping import TypeCheckError

from specdecpp.sampling import Sampling, probabilities


def test_shapes_and_types_are_checked(pytestconfig: pytest.Config) -> None:
    """Catches annotations that nothing reads."""
    if not pytestconfig.getoption("jaxtyping_packages"):
        pytest.skip("make typecheck")
    wrong: object = "0.5"
    with pytest.raises(TypeCheckError):
        probabilities(wrong, Sampling())  # pyright: ignore[reportArgumentType]
