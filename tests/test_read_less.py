"""A draft that reads the end of a long text only: the output keeps the target's distribution."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from distributions import Request, finish, largest_difference

from specdecpp import Decoder, load_pair
from specdecpp.backends import Skips, native
from specdecpp.lab import Heuristic
from specdecpp.policies import CostAware, Costs, Fixed, Policy
from specdecpp.sampling import Sampling, streams
from specdecpp.testing import TableModel
from specdecpp.verify import BlockVerification, TokenVerification, Verification


class LateTable(TableModel):
    """A table that does not see what it has skipped."""

    num_skipped = 0

    def new_cache(self) -> "LateTable":
        return LateTable({k: v.tolist() for k, v in self.table.items()}, depth=self.depth, max_length=self.max_length)

    def skip(self, length: int) -> None:
        assert len(self.tokens) == self.num_skipped, "only an empty cache can begin elsewhere"
        self.tokens, self.num_skipped = [0] * length, length

    def distribution(self, context: Sequence[int]) -> Any:
        return super().distribution(context[self.num_skipped :])


REQUEST = Request(
    target=TableModel.random(vocab_size=3, depth=3, seed=1),
    draft=LateTable.random(vocab_size=3, depth=3, seed=2),
    prompt=(0, 1, 2, 1),
)


@pytest.mark.parametrize("policy", [Fixed(k=2), Heuristic(), CostAware()], ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("verification", [TokenVerification(), BlockVerification()], ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, top_p=0.9)], ids=["1", "0.7"])
def test_the_distribution_is_the_targets_whatever_the_draft_has_read(
    policy: Policy, verification: Verification, sampling: Sampling
) -> None:
    """Catches draft tokens that are tested against a q of the whole text where they were drawn from one of its end."""
    for tail in (1, 2):
        request = replace(REQUEST, sampling=sampling, tail=tail)
        assert largest_difference(request.distribution(policy, verification), request.own_distribution()) < 1e-12


def test_a_draft_begins_where_it_is_first_asked() -> None:
    """Catches a draft that reads what it was to leave out, or that begins anew in the middle of an answer."""
    request = replace(REQUEST, tail=2)
    session = request.session(Fixed(k=2), TokenVerification(), streams(0))
    finish(session)
    assert isinstance(session.draft, Skips)
    assert session.draft.num_skipped == 1
    whole = replace(REQUEST, tail=None).session(Fixed(k=2), TokenVerification(), streams(0))
    finish(whole)
    assert isinstance(whole.draft, Skips)
    assert whole.draft.num_skipped == 0


@pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")
def test_long_prompts_in_the_compiled_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches answers that depend on what the draft has read or on earlier requests, and late caches kept for other texts."""
    monkeypatch.setattr(Costs, "worth_reading", lambda self, num_tokens: 8)
    pair = load_pair(backend="native")
    monkeypatch.setattr(pair.target, "share_of", lambda draft: 0.0, raising=False)
    story = "Once upon a time there was a little red hen who lived in a small house by the river. " * 2
    texts = [story + end for end in ("She found", "One day the fox", "She found some wheat and")]

    def decoder(policy: str | None = None) -> Decoder:
        return Decoder(replace(pair), policy=policy, costs=Costs(draft_s=0.1, passes={1: 1.0, 2: 1.0, 5: 1.1}))

    plain, late = decoder("none"), decoder()
    greedy = [plain.generate(text, max_tokens=24, temperature=0).tokens for text in texts]
    late = decoder()
    assert [late.generate(text, max_tokens=24, temperature=0).tokens for text in texts] == greedy
    seeded = late.generate(texts[0], max_tokens=24, temperature=1, seed=3).tokens
    assert decoder().generate(texts[0], max_tokens=24, temperature=1, seed=3).tokens == seeded
