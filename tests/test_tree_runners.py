"""Rows with parents: every row of a tree has the logits of its branch read straight, and so has all that follows a `keep`."""

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from kinds import KINDS, model_of
from test_lean import VARIANTS, built
from test_runners import full_pass

from specdecpp import Decoder, EagerRunner, LeanRunner, Pair, RunnerError
from specdecpp.policies.trees import Widths
from specdecpp.runners import GraphRunner, TreeRunner, refusal_of_trees
from specdecpp.runners.protocol import depths_of
from specdecpp.testing import TableModel, tiny_draft, tiny_model, tiny_tokenizer

WINDOWED = ("mistral", "gemma3_text", "mixtral")
EAGER = [kind for kind in KINDS if kind not in WINDOWED]


def grow_and_keep(runner: Any, model: Any, *, tolerance: float, seed: int, vocab_size: int = 64, most: int = 80) -> int:
    """Rounds of trees at random, in one to four passes, each followed by keep, rollback or a plain pass; how many rows."""
    rng = random.Random(seed)
    text = [rng.randrange(vocab_size) for _ in range(rng.randrange(1, 9))]
    logits, _ = runner.extend(text, rows=1)
    num_rows = 0
    while len(text) < most:
        rows: list[tuple[int, int]] = []  # (token, parent)
        for _ in range(rng.randrange(1, 5)):
            n = rng.randrange(1, 7)
            parents = [rng.randrange(-1, len(rows) + i) for i in range(n)]
            tokens = [rng.randrange(vocab_size) for _ in range(n)]
            rows += zip(tokens, parents, strict=True)
            asked = rng.randrange(1, n + 1)
            logits, hidden = runner.extend(tokens, rows=asked, parents=parents)
            assert runner.length == len(text)
            for i in range(asked):
                branch = branch_of(rows, len(rows) - asked + i)
                expected_logits, expected_hidden = full_pass(model, text + [rows[r][0] for r in branch])
                torch.testing.assert_close(logits[i], expected_logits[-1], atol=tolerance, rtol=0)
                torch.testing.assert_close(hidden[i], expected_hidden[-1], atol=tolerance, rtol=0)
            num_rows += n
        match rng.randrange(6):
            case 0:
                runner.keep([])
            case 1:
                text = text[: rng.randrange(1, len(text) + 1)]
                runner.rollback(len(text))
            case 2:
                pass  # the plain pass below forgets the rows
            case _:
                path = branch_of(rows, rng.randrange(len(rows)))
                runner.keep(path)
                text += [rows[r][0] for r in path]
        new = [rng.randrange(vocab_size) for _ in range(rng.randrange(1, 4))]
        text += new
        logits, _ = runner.extend(new, rows=1)
        assert runner.length == len(text)
        torch.testing.assert_close(logits[0], full_pass(model, text)[0][-1], atol=tolerance, rtol=0)
    return num_rows


def branch_of(rows: list[tuple[int, int]], row: int) -> list[int]:
    branch = []
    while row >= 0:
        branch.append(row)
        row = rows[row][1]
    return branch[::-1]


@pytest.mark.parametrize("kind", EAGER)
def test_eager_rows_equal_their_branches(kind: str) -> None:
    """Catches a mask that shows a cousin or hides an ancestor, a position that counts rows, and a cache that keeps another
    branch or the rows of none, to 1e-9."""
    model = model_of(kind, torch.float64)
    runner = EagerRunner(model)
    assert isinstance(runner, TreeRunner)
    assert refusal_of_trees(runner) is None
    for seed in range(2):
        assert grow_and_keep(runner.new_cache(), model, tolerance=1e-9, seed=seed, most=40) > 20


@pytest.mark.parametrize("variant", VARIANTS)
def test_lean_rows_equal_their_branches(variant: str) -> None:
    """Catches the same, and a window that counts rows instead of positions, or angles of another depth."""
    untouched, model = built(variant).double(), built(variant).double()
    runner = LeanRunner(model)
    most = 12 if variant == "phi3-longrope" else 40
    for seed in range(2):
        grow_and_keep(runner.new_cache(), untouched, tolerance=1e-4, seed=seed, most=most)  # angles are float32


def test_a_kept_branch_lies_in_the_cache_as_it_was_read() -> None:
    """Catches a keep that reads again or moves a layer too few: a branch that was read row by row, as the straight text was, is
    the same to the last bit."""
    runner = LeanRunner(built("llama"))
    straight, tree = runner.new_cache(), runner.new_cache()
    for one in (straight, tree):
        one.extend([1, 7, 3], rows=1)
    for row, (token, other) in enumerate(zip([9, 12, 30], [5, 6, 7], strict=True)):
        straight.extend([token], rows=1)
        tree.extend([other], rows=1, parents=[2 * row - 1])
        tree.extend([token], rows=1, parents=[2 * row - 1])
    tree.keep([1, 3, 5])
    assert tree.length == straight.length == 6
    for mine, its in zip((*tree._keys, *tree._values), (*straight._keys, *straight._values), strict=True):
        assert (mine[:, :6] - its[:, :6]).abs().max() < 1e-5
        assert torch.equal(mine[:, :3], its[:, :3])
    assert (tree.extend([2], rows=1)[0] - straight.extend([2], rows=1)[0]).abs().max() < 1e-3


def test_rows_survive_a_cache_that_grows() -> None:
    """Catches open rows that are left behind when the cache moves to a larger place."""
    model = built("llama").double()
    runner, text = LeanRunner(model).new_cache(), [1 + i % 60 for i in range(250)]
    runner.extend(text, rows=1)
    runner.extend([5, 6, 7], rows=1, parents=[-1, -1, 1])
    logits, _ = runner.extend([9] * 12, rows=1, parents=[2, *range(3, 14)])
    torch.testing.assert_close(logits[0], full_pass(model, [*text, 6, 7, *[9] * 12])[0][-1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("make", [EagerRunner, LeanRunner, lambda model: TableModel.random(vocab_size=3, depth=2, seed=0)])
def test_what_is_no_tree_is_refused(make: Callable[[Any], Any]) -> None:
    """Catches a row that sees itself as its parent, and a path over rows that do not follow each other."""
    runner = make(tiny_model("llama"))
    runner.extend([1, 2], rows=1)
    with pytest.raises(ValueError, match="row 1 of a tree has the parent 1"):
        runner.extend([1, 2], rows=1, parents=[-1, 1])
    runner.rollback(2)
    runner.extend([1, 2, 0], rows=1, parents=[-1, 0, 0])
    for path in ([1], [0, 1, 2], [3], [-1], [0, 0]):
        with pytest.raises(ValueError, match="is no branch of the 3 open rows"):
            runner.keep(path)
    runner.keep([0, 2])
    assert runner.length == 4
    assert depths_of([0, -1], [3]) == [4, 0]


@cache
def small_pair(kind: str, make: Any, **config: Any) -> Pair:
    target = tiny_model(kind, seed=1, **config)
    return Pair(target=make(target), draft=make(tiny_draft(target, noise=0.3)), tokenizer=tiny_tokenizer())


@pytest.mark.parametrize(("kind", "make"), [("mistral", EagerRunner), ("llama", GraphRunner)])
def test_runners_without_trees_are_refused_with_a_reason(kind: str, make: Any) -> None:
    """Catches a tree that is read as a chain, or a window that a mask of ours would replace."""
    pair = small_pair(kind, make, **KINDS[kind])
    assert refusal_of_trees(pair.target) is not None
    with pytest.raises(RunnerError, match="Widths drafts trees, and the target cannot be given them"):
        Decoder(pair, policy=Widths()).generate([3, 4], max_tokens=4)


def test_a_model_that_takes_no_mask_is_found_out() -> None:
    """Catches a model whose signature says that it takes a mask of four dimensions and which then ignores it."""
    model = tiny_model("llama", seed=1)
    inner = model.model.forward
    model.model.forward = lambda *args, **kwargs: inner(*args, **(kwargs | {"attention_mask": None}))
    assert not EagerRunner(model).takes_trees


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("make", [EagerRunner, LeanRunner])
def test_trees_of_a_real_model_end_in_the_targets_own_text(make: Any, temperature: float) -> None:
    """Catches a branch kept in one cache and another in the other, over many rounds."""
    pair = small_pair("llama", make)
    chain, most, younger = Decoder(pair, policy=Widths(widths=(1, 1, 1, 1))), 0, False
    trees = Decoder(pair, policy=Widths(widths=(3, 2, 1)))
    alone = Decoder(pair, policy=Widths(widths=()))
    for seed in range(3):
        options: Any = {"temperature": temperature, "seed": seed, "max_tokens": 60, "ignore_eos": True}
        out = trees.generate([3, 9, 4 + seed], **options)
        if temperature == 0:
            assert out.tokens == alone.generate([3, 9, 4 + seed], **options).tokens
            assert out.tokens == chain.generate([3, 9, 4 + seed], **options).tokens
        most = max(most, *(r.num_accepted for r in out.rounds))
        younger |= any(r.grown and r.grown.path and r.grown.path[0] > 0 for r in out.rounds)
    assert most >= 2
    assert younger, "a branch other than the first is accepted somewhere"
