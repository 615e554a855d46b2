"""Trees of draft tokens in passes over static caches: rows see their ancestors, a branch is kept, steps are the specification's."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kinds import built

from specdecpp.backends import GraphModel, LeanModel
from specdecpp.backends.graphs.model import GraphCache

PARENTS: dict[str, list[int]] = {
    "chain": [-1, 0, 1, 2],
    "wide": [-1, 0, 0, 0],
    "twigs": [-1, 0, 0, 1, 1, 2, 4, 0, 6],
    "two texts": [-1, -1, 0, 1, 3, 2],
    "full": [-1, *((i - 1) // 2 for i in range(1, 33))],
}


def text_of(length: int) -> list[int]:
    return [(7 * i + i // 11) % 60 for i in range(length)]


def masks_of(parents: Sequence[int]) -> list[int]:
    masks: list[int] = []
    for i, parent in enumerate(parents):
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << i)
    return masks


def path_of(parents: Sequence[int], node: int) -> list[int]:
    return ([] if parents[node] < 0 else path_of(parents, parents[node])) + [node]


def check_tree(cache: Any, plain: Any, parents: Sequence[int], length: int, cuts: Sequence[int], **close: Any) -> None:
    """Read a tree in passes that end at `cuts`, keep a branch and go on: rows are those of reading each branch alone."""
    text, tokens, masks = text_of(length), [(11 * i + 5) % 60 for i in range(len(parents))], masks_of(parents)
    cache.extend(text, rows=1)
    found = []
    for first, end in zip((0, *cuts), (*cuts, len(parents)), strict=True):
        found.append(cache.read_nodes(tokens[first:end], masks[first:end], first).clone())
        assert cache.length == length

    def alone(path: list[int], *more: int) -> torch.Tensor:
        return plain.new_cache().extend([*text, *(tokens[i] for i in path), *more], rows=1)[0][0]

    for node, row in enumerate(torch.cat(found)):
        torch.testing.assert_close(row, alone(path_of(parents, node)), **close)
    kept = path_of(parents, len(parents) - 1)
    cache.keep(kept)
    assert cache.length == length + len(kept)
    torch.testing.assert_close(cache.extend([9], rows=1)[0][0], alone(kept, 9), **close)
    cache.rollback(length + 1)
    torch.testing.assert_close(cache.extend([8, 9], rows=1)[0][0], alone(kept[:1], 8, 9), **close)


@pytest.mark.parametrize("length", [1, 20, 190, 223, 224, 480])
@pytest.mark.parametrize("shape", PARENTS)
def test_every_node_reads_as_its_branch_alone(shape: str, length: int) -> None:
    """Catches a cousin that is seen, an ancestor that is not, a wrong angle, and a row lost when a branch is moved or a cache
    grows."""
    model, parents = built("llama", max_position_embeddings=1024).double(), PARENTS[shape]
    backend, cuts = GraphModel(model), [1, 2, 5] if len(parents) > 5 else [1]
    close = {"atol": 1e-9, "rtol": 1e-9}
    check_tree(backend.new_cache(), LeanModel(model), parents, length, cuts, **close)
    check_tree(backend.new_cache(), LeanModel(model), parents, length, [], **close)


def test_more_nodes_than_a_pass_holds_and_windows_are_refused() -> None:
    """Catches places behind the room of a span, and a window counted by places."""
    cache: GraphCache = GraphModel(built("llama")).new_cache()
    with pytest.raises(ValueError, match="at most 33"):
        cache.read_nodes([1, 2], [1, 2], 32)
    assert cache.takes_nodes
    assert not GraphModel(built("mistral-window")).new_cache().takes_nodes
