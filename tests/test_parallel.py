"""Parallel heads on a draft's state: the target's distribution, fewer passes, no trace of what was rejected."""

from typing import Any

import pytest
import torch
from distributions import Request, largest_difference

from specdecpp.backends import EagerModel
from specdecpp.lab.parallel import ParallelDraft, ParallelHeads
from specdecpp.policies import CostAware, Fixed, Policy
from specdecpp.testing import TableModel, tiny_model
from specdecpp.verify import BlockVerification, TokenVerification

pytestmark = pytest.mark.lab


def random_heads(hidden_size: int, num_heads: int) -> ParallelHeads:
    heads = ParallelHeads(hidden_size, num_heads)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(2 * torch.randn(parameter.shape, generator=generator))
    return heads.eval()


def over_table(num_heads: int) -> Any:
    base = TableModel.random(vocab_size=3, depth=2, seed=7)
    heads = random_heads(3, num_heads).double()
    return ParallelDraft(base, heads, lambda states: 3 * states)


@pytest.mark.parametrize("verification", [TokenVerification(), BlockVerification()], ids=str)
@pytest.mark.parametrize("policy", [Fixed(k=3), CostAware()], ids=str)
def test_the_distribution_is_the_targets(policy: Policy, verification: Any) -> None:
    """Catches a q that is not what was drawn from, and a state of a rejected draft token that a later step begins with."""
    target = TableModel.random(vocab_size=3, depth=2, seed=3)
    request = Request(target=target, draft=over_table(1), max_tokens=3)
    assert largest_difference(request.distribution(policy, verification), request.own_distribution()) < 1e-12


class Counting(EagerModel):
    """A model that writes down what it reads."""

    reads: list[list[int]]

    def forward(self, parts: Any, *, rows: int) -> Any:
        self.reads += [list(tokens) for _, tokens in parts]
        return super().forward(parts, rows=rows)


def tiny_draft(num_heads: int = 2) -> tuple[Any, Counting]:
    model = tiny_model("llama", seed=2)
    base = Counting(model, probe=False)
    base.reads = []
    return ParallelDraft(base, random_heads(base.hidden_size, num_heads), model.get_output_embeddings()), base


def test_heads_stand_for_passes_and_the_next_pass_reads_what_was_kept() -> None:
    """Catches a pass for each draft token, a head that is asked twice, and kept draft tokens that the model never reads."""
    draft, base = tiny_draft()
    draft.extend([1, 2, 3], rows=1)
    draft.extend([4], rows=1)
    draft.extend([5], rows=1)
    assert (draft.length, base.reads) == (5, [[1, 2, 3]])
    draft.extend([6], rows=1)  # there is no third head
    assert base.reads == [[1, 2, 3], [4, 5, 6]]
    draft.extend([7], rows=1)
    draft.rollback(7)  # all were accepted
    draft.extend([8], rows=1)
    draft.extend([9], rows=1)
    draft.rollback(8)
    draft.extend([10], rows=1)
    assert base.reads[2:] == [[7, 8], [10]]
    assert draft.length == 9


def test_a_rejected_draft_token_leaves_no_trace() -> None:
    """Catches a head that reads the state behind what was cut, and a count of heads that goes on."""
    draft, _ = tiny_draft()
    draft.extend([1, 2, 3], rows=1)
    draft.extend([4], rows=1)
    draft.rollback(3)
    again, _ = tiny_draft()
    again.extend([1, 2, 3], rows=1)
    again.rollback(3)
    for tokens in ([9], [8], [7], [6]):
        for found, wanted in zip(draft.extend(tokens, rows=1), again.extend(tokens, rows=1), strict=True):
            assert torch.equal(found, wanted)


def test_training_lowers_the_loss_of_every_head() -> None:
    """Catches a head that is trained for another place than it is asked for: a text that counts gives each its own next."""
    model = tiny_model("llama", seed=2)
    tokens = torch.arange(40) % 7 + 3
    states = torch.tensor(EagerModel(model).new_cache().extend(tokens.tolist(), rows=40)[1].tolist())  # out of inference mode
    known = states[:-3], torch.stack([tokens[2:-1], tokens[3:]], -1)
    heads = ParallelHeads(states.shape[1], 2)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=0.01)
    for _ in range(150):
        optimizer.zero_grad()
        heads.loss(*known, model.get_output_embeddings()).mean().backward()
        optimizer.step()
    each = heads.loss(*known, model.get_output_embeddings())
    assert max(each.tolist()) < 0.1
    draft = ParallelDraft(EagerModel(model), heads, model.get_output_embeddings())
    draft.extend(tokens[:20].tolist(), rows=1)
    assert [int(draft.extend([int(tokens[20 + i])], rows=1)[0].argmax()) for i in range(2)] == tokens[21:23].tolist()
    with pytest.raises(ValueError, match="num_heads"):
        ParallelHeads(8, 0)
