"""Trees of rows in the compiled runner: each row has the bits of its branch read alone, and so has what is kept of them."""

from collections.abc import Sequence
from itertools import chain

import pytest
import torch
from test_native import built

from specdecpp import NativeRunner
from specdecpp.runners import TreeRunner, native
from specdecpp.testing import tiny_model

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")

LOCAL = {
    "head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 40,
    "use_sliding_window": True,
}


@pytest.fixture(scope="module", params=["llama", "one-kv-head", "wide-heads", "odd-widths", "gemma3", "near-sighted"])
def runner(request: pytest.FixtureRequest) -> NativeRunner:
    match request.param:
        case "gemma3":
            model = tiny_model("gemma3_text", seed=1, head_dim=16)
        case "near-sighted":
            model = tiny_model("qwen2", seed=1, **LOCAL)
        case _:
            model = built(request.param)
    return NativeRunner(model, num_threads=2)


def drawn(seed: int, *, num_text: int, passes: Sequence[int]) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """(A text, tokens of each pass, parents of each pass)."""
    generator = torch.Generator().manual_seed(seed)

    def ids(num: int) -> list[int]:
        return torch.randint(0, 60, (num,), generator=generator).tolist()

    parents, first = [], 0
    for num in passes:
        parents.append([int(torch.randint(-1, first + i, (1,), generator=generator)) if first + i else -1 for i in range(num)])
        first += num
    return ids(num_text), [ids(num) for num in passes], parents


def branch(parents: Sequence[int], row: int) -> list[int]:
    """The rows from the text to this one."""
    found = [row]
    while (row := parents[row]) >= 0:
        found.append(row)
    return found[::-1]


@pytest.mark.parametrize(("num_text", "passes"), [(1, (4, 3)), (57, (1, 5, 9)), (31, (30,)), (95, (2, 2, 2, 2))])
def test_rows_have_the_bits_of_their_branch(runner: NativeRunner, num_text: int, passes: tuple[int, ...]) -> None:
    """Catches rows that see their siblings, positions counted by place, sums in another order, and a block of queries that ends
    in the middle of a tree."""
    text, tokens, parents = drawn(num_text, num_text=num_text, passes=passes)
    tree = runner.new_cache()
    tree.extend(text, rows=1)
    found = [tree.extend(new, rows=len(new), parents=of) for new, of in zip(tokens, parents, strict=True)]
    assert tree.length == num_text, "open rows are no text yet"
    logits, states = (torch.cat([f[i] for f in found]) for i in range(2))
    flat, known = list(chain(*tokens)), list(chain(*parents))
    for row in range(len(flat)):
        alone, rows = runner.with_threads(1).new_cache(), branch(known, row)
        alone.extend(text, rows=1)
        expected, state = alone.extend([flat[i] for i in rows], rows=1)
        assert torch.equal(logits[row], expected[0])
        assert torch.equal(states[row], state[0])


@pytest.mark.parametrize("seed", range(2))
def test_what_is_kept_is_what_reading_it_gives(runner: NativeRunner, seed: int) -> None:
    """Catches keys or values of another branch, rows that are still open, and a tree that is lost where the cache grows."""
    num_text = 250 + seed  # the cache grows within the tree
    text, tokens, parents = drawn(seed, num_text=num_text, passes=(3, 6, 8))
    flat, known = list(chain(*tokens)), list(chain(*parents))
    tree, alone = runner.new_cache(), runner.new_cache()
    for of in (tree, alone):
        of.extend(text, rows=1)
    for new, of in zip(tokens, parents, strict=True):
        tree.extend(new, rows=1, parents=of)
    path = max((branch(known, row) for row in range(len(known))), key=len)
    tree.keep(path)
    alone.extend([flat[i] for i in path], rows=1)
    assert tree.length == alone.length == num_text + len(path)
    again = [7, 9, 7]
    for of in ([-1, 0, 0], None):
        expected = alone.new_cache()
        expected.extend([*text, *(flat[i] for i in path)], rows=1)
        assert torch.equal(tree.extend(again, rows=1, parents=of)[0], expected.extend([7, 7] if of else again, rows=1)[0])
        tree.rollback(num_text + len(path))
        assert torch.equal(tree.extend([5], rows=1)[0], alone.extend([5], rows=1)[0]), "nothing is left of open rows"
        for each in (tree, alone):
            each.rollback(num_text + len(path))
    tree.keep([])
    assert tree.length == num_text + len(path)


def test_what_is_no_tree_is_refused(runner: NativeRunner) -> None:
    """Catches a row that follows itself or a later one, and a path with a gap; nothing is changed by it."""
    assert isinstance(runner, TreeRunner)
    tree = runner.new_cache()
    tree.extend([1, 2], rows=1)
    for parents in ([0], [-1, 1], [-2]):
        with pytest.raises(ValueError, match="has the parent"):
            tree.extend([3] * len(parents), rows=1, parents=parents)
    tree.extend([3, 4, 5], rows=1, parents=[-1, 0, -1])
    for path in ([1], [0, 2], [3]):
        with pytest.raises(ValueError, match="is no branch"):
            tree.keep(path)
    tree.keep([0, 1])
    assert tree.length == 4
