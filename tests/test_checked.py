"""That the tests check types and shapes of some calls of every function, and of those that come late too."""

import pytest
import torch
from conftest import CHECKED, EVERY
from jaxtyping import TypeCheckError

from specdecpp.sampling import Sampling, probabilities


def test_shapes_and_types_are_checked_while_testing() -> None:
    """Catches annotations that nothing reads."""
    wrong: object = "0.5"
    with pytest.raises(TypeCheckError):
        probabilities(wrong, Sampling())  # pyright: ignore[reportArgumentType]


def test_later_calls_are_checked_now_and_then() -> None:
    """Catches a check that ends with the first calls of a test."""
    row, wrong = torch.zeros(4), torch.zeros(4, dtype=torch.long)
    for _ in range(CHECKED):
        probabilities(row, Sampling())
    noticed = 0
    for _ in range(2 * EVERY):
        try:
            probabilities(wrong, Sampling())
        except TypeCheckError:
            noticed += 1
        except RuntimeError:
            pass  # of torch
    assert 2 <= noticed < EVERY
