"""Our speculator of vLLM's second model runner, on vLLM's classes only: its kernels and graphs need a GPU.

`v2_world` says what stands in for them.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("default")


class Table:
    """A network of the last two tokens, drawn at random: what it says depends on the seed and the context only."""

    num_ids = 7

    def __init__(self, seed: int, *, like: "Table | None" = None, share: float = 0.0):
        self.table = torch.randn(self.num_ids, self.num_ids, self.num_ids, generator=torch.Generator().manual_seed(seed))
        if like is not None:
            self.table = share * like.table + (1 - share) * self.table

    def __call__(self, context: Sequence[int]) -> torch.Tensor:
        before, last = (0, *context)[-2:]
        return 2.5 * self.table[before, last]


@pytest.fixture(scope="module")
def target() -> Table:
    return Table(0)


@pytest.fixture(scope="module")
def draft(target: Table) -> Table:
    return Table(1, like=target, share=0.6)


def world(draft: Any, target: Any, ours: dict[str, Any] | None = None, **sizes: Any) -> Any:
    from v2_world import World

    return World(draft, target, ours=ours or {}, **sizes)


def alone(target: Table, prompt: list[int], num: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < num:
        tokens.append(int(target(tokens).argmax()))
    return tokens


def argmaxes(network: Table, context: list[int], num: int) -> list[int]:
    return alone(network, context, len(context) + num)[len(context) :]


def test_draft_tokens_are_those_of_the_draft_whatever_happened_before(draft: Table, target: Table) -> None:
    """Catches a draft that reads too little, or too much, after rounds of other lengths, none, prompts in parts, and a slot's
    next request: every draft token is the draft's own behind the true context (the cache notices anything else)."""
    found = world(draft, target)
    prompts = {"a": [1, 2, 3, 4, 5, 6, 1, 2, 3], "b": [4], "c": [6, 5, 4, 3, 2, 1, 0, 1, 2, 3, 4, 5]}
    lengths = [3, 3, 0, 0, 0, 2, 4, 1, 1, 4, 0, 4, 4]
    for i, length in enumerate(lengths):
        for name, at in (("a", 0), ("b", 1), ("c", 4)):
            if i == at:
                found.add(name, prompts[name])
        if i == 9:
            found.remove("b")
            prompts["d"] = [2, 2, 6]
            found.add("d", prompts["d"])
        found.step(length, chunk=5)
        for r in found.requests.values():
            if r.num_computed >= r.num_prompt and length:
                assert r.draft[:length] == argmaxes(draft, r.tokens, length)
            assert all(t == -1 for t in r.draft[length:])
    for name, r in found.requests.items():
        assert r.tokens == alone(target, prompts[name], len(r.tokens))
        assert len(r.tokens) > r.num_prompt + 4


def test_a_round_of_no_length_costs_nothing(draft: Table, target: Table) -> None:
    """Catches a pass, or an upload, where nothing is drafted: vLLM's own drafts read along."""
    found = world(draft, target)
    found.add("a", [1, 2, 3])
    for _ in range(4):
        found.step(0)
    assert not found.draft.passes
    found.step(2)
    assert found.draft.passes == [[6], [2], [1]]  # the first six of its eight tokens, then a round


def test_what_was_missed_is_read_in_passes_that_fit(draft: Table, target: Table) -> None:
    """Catches one pass over more tokens than the engine has room for, and parts in the wrong order."""
    found = world(draft, target, max_num_tokens=16)
    found.add("a", [1, 2, 3] * 5)
    found.add("b", [3, 2, 1] * 5)
    for _ in range(3):
        found.step(0, chunk=8)
    found.step(3)
    assert all(sum(widths) <= 16 for widths in found.draft.passes)
    assert all(r.draft[:3] == argmaxes(draft, r.tokens, 3) for r in found.requests.values())
