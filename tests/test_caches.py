"""What every backend owes: caches that share weights only, forget exactly, grow, and are read over a list."""

from functools import cache
from typing import Any

import pytest
import torch
from kinds import BACKENDS, TEXT, each_backend

from specdecpp.testing import tiny_model


@cache
def built(backend: str) -> Any:
    return BACKENDS[backend](model())


def model() -> Any:
    return tiny_model("llama", seed=1, head_dim=16, max_position_embeddings=1024)


@each_backend
def test_a_rollback_leaves_no_trace(backend: str) -> None:
    """Catches keys of forgotten tokens that are still seen, to the bit, and an off-by-one at both ends of the range."""
    one, other = built(backend).new_cache(), built(backend).new_cache()
    one.extend(TEXT[:5], rows=1)
    before, _ = one.extend(TEXT[5:8], rows=3)
    one.rollback(5)
    one.extend([33, 34, 35, 36], rows=1)
    one.rollback(5)
    assert torch.equal(one.extend(TEXT[5:8], rows=3)[0], before)
    one.rollback(8)
    assert one.length == 8
    for length in (9, -1):
        with pytest.raises(ValueError, match=f"cannot roll back to {length} tokens: the cache holds 8"):
            one.rollback(length)
    one.rollback(0)
    assert one.length == 0
    assert torch.equal(one.extend(TEXT[:5], rows=5)[0], other.extend(TEXT[:5], rows=5)[0])


@each_backend
def test_caches_share_the_weights_only(backend: str) -> None:
    """Catches a cache, a length or outputs that a second sequence writes into while the first goes on."""
    one, two, alone = (built(backend).new_cache() for _ in range(3))
    first, _ = one.extend(TEXT[:4], rows=4)
    kept = first.clone()
    two.extend(TEXT[4:8], rows=4)
    assert (one.length, two.length) == (4, 4)
    one.rollback(2)
    two.extend([9, 9], rows=1)
    assert torch.equal(first, kept)
    alone.extend(TEXT[:4], rows=1)
    alone.rollback(2)
    for own, expected in zip(one.extend([9], rows=1), alone.extend([9], rows=1), strict=True):
        assert torch.equal(own, expected)


@pytest.mark.parametrize("rows", [1, 2])
@each_backend
def test_a_pass_over_a_list_is_each_alone(backend: str, rows: int) -> None:
    """Catches rows of two caches that are mixed up, and bits that depend on the company (on `graphs` they may)."""
    shared = built(backend)
    together, alone = ([shared.new_cache() for _ in range(3)] for _ in range(2))
    for texts in ([TEXT[:n] for n in (2, 9, 4)], [[5, 8], [6, 7, 1], [1, 2]]):
        found = shared.forward(list(zip(together, texts, strict=True)), rows=rows)
        expected = [one.extend(text, rows=rows) for one, text in zip(alone, texts, strict=True)]
        for which in range(2):
            own, whole = found[which], torch.cat([one[which] for one in expected])
            assert torch.equal(own, whole) or (backend == "graphs" and torch.allclose(own, whole, atol=1e-5))
    assert [one.length for one in together] == [one.length for one in alone] == [4, 12, 6]
