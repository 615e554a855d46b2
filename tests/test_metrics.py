"""Steps folded into sums and rates."""

import json
from collections import Counter
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any

import pytest
from distributions import Request, finish

from specdecpp.metrics import Metrics
from specdecpp.policies import Fixed
from specdecpp.policies.protocol import LIMIT
from specdecpp.sampling import streams
from specdecpp.session import Piece, Step
from specdecpp.testing import TableModel
from specdecpp.verify import TokenVerification

RATES = ("mean_acceptance_length", "draft_acceptance_rate", "discard_rate", "verification_rate", "tokens_per_second")


def a_step(num_drafted, num_accepted, *, is_cut=False, **seconds):
    """A step; `is_cut` where the answer ended on an accepted draft token, without a token of the target's own."""
    origins = ["accepted"] * num_accepted
    if not is_cut:
        origins.append("bonus" if num_accepted == num_drafted else "correction")
    times: dict[str, Any] = {"draft_s": 0.0, "head_s": 0.0, "verify_s": 0.0, "other_s": 0.0} | seconds
    return Step(
        pieces=tuple(Piece(token=0, text="", origin=o) for o in origins),
        num_drafted=num_drafted,
        num_accepted=num_accepted,
        stop=LIMIT,
        judged=(),
        finish_reason=None,
        **times,
    )


def sessions():
    """The steps of real sessions, some of which end on an accepted draft token."""
    target = TableModel.random(vocab_size=4, depth=2, seed=1)
    request = Request(target=target, draft=TableModel.random(vocab_size=4, depth=2, seed=2), max_tokens=12, ends=(3,))
    for seed in range(20):
        session = request.session(Fixed(k=3), TokenVerification(), streams(seed))
        yield session, finish(session)


def test_sums_and_rates_of_known_steps():
    """Catches a rate over the wrong denominator, and a part of the time that is counted twice or left out: by hand."""
    steps = [
        a_step(4, 4, draft_s=1.0, head_s=2.0, verify_s=4.0, other_s=8.0),
        a_step(4, 1, draft_s=16.0),
        a_step(2, 0),
        a_step(4, 2, is_cut=True),
    ]
    metrics = Metrics.of(steps, num_prompt_tokens=7, prefill_s=32.0)
    assert (metrics.num_tokens, metrics.num_spec_steps, metrics.num_prompt_tokens) == (5 + 2 + 1 + 2, 4, 7)
    assert (metrics.num_draft_tokens, metrics.num_accepted_draft_tokens, metrics.num_spec_tokens) == (14, 7, 4)
    assert metrics.acceptance_histogram == Counter({4: 1, 1: 1, 0: 1, 2: 1})
    assert metrics.drafted_histogram == Counter({4: 3, 2: 1})
    assert metrics.mean_acceptance_length == pytest.approx(1 + 7 / 4)
    assert metrics.draft_acceptance_rate == pytest.approx(7 / 14)
    assert metrics.discard_rate == pytest.approx(7 / 10)
    assert metrics.verification_rate == pytest.approx(4 / 10)
    assert (metrics.draft_s, metrics.head_s, metrics.verify_s, metrics.other_s, metrics.elapsed_s) == (17, 2, 4, 8, 63)
    assert metrics.tokens_per_second == pytest.approx(10 / 63)
    shares = {"draft": 17 / 63, "verify": 4 / 63, "head": 2 / 63, "other": 40 / 63}
    assert metrics.time_shares == pytest.approx(shares), "the prompt is read in the other time"


def test_every_token_is_accepted_or_the_targets_own():
    """Catches drafted tokens that go missing: N = accepted + steps, less one where the end was itself accepted."""
    is_cut_seen = set()
    for session, steps in sessions():
        metrics = Metrics.of(steps)
        is_cut = steps[-1].pieces[-1].origin == "accepted"
        is_cut_seen.add(is_cut)
        assert metrics.num_tokens == len(session.tokens) - session.num_prompt_tokens
        assert metrics.num_tokens == metrics.num_accepted_draft_tokens + metrics.num_spec_steps - is_cut
        assert sum(n * count for n, count in metrics.acceptance_histogram.items()) == metrics.num_accepted_draft_tokens
        assert metrics.acceptance_histogram.total() == metrics.num_spec_steps
    assert is_cut_seen == {True, False}


def test_adding_pools_steps():
    """Catches rates that are averaged over requests instead of pooled, and a histogram that is overwritten."""
    requests = [steps for _, steps in sessions()]
    pooled = reduce(add, (Metrics.of(steps, prefill_s=0.5, num_prompt_tokens=2) for steps in requests))
    together = Metrics.of([r for steps in requests for r in steps], prefill_s=10.0, num_prompt_tokens=40)
    times = ("prefill_s", "draft_s", "verify_s", "head_s", "other_s")
    assert replace(pooled, **dict.fromkeys(times, 0.0)) == replace(together, **dict.fromkeys(times, 0.0))
    assert [getattr(pooled, t) for t in times] == pytest.approx([getattr(together, t) for t in times])
    assert pooled + Metrics() == pooled


def test_no_steps_mean_zero_rates():
    """Catches a division by zero for a request that decodes nothing."""
    empty = Metrics.of([])
    assert [getattr(empty, rate) for rate in RATES] == [0.0] * len(RATES)
    assert empty == Metrics()
    assert (empty.num_spec_tokens, empty.time_shares["draft"]) == (0, 0)
    undrafted = Metrics.of([a_step(0, 0)])
    assert (undrafted.draft_acceptance_rate, undrafted.mean_acceptance_length, undrafted.verification_rate) == (0, 1, 1)


def test_to_dict_is_json_with_every_sum_and_rate():
    """Catches a field that JSON cannot hold or that a report would miss."""
    values = json.loads(json.dumps(Metrics.of([a_step(4, 4), a_step(4, 1)], prefill_s=1.0).to_dict()))
    assert values.keys() >= {*Metrics.__dataclass_fields__, *RATES, "elapsed_s"}
    assert list(values["acceptance_histogram"].items()) == [("1", 1), ("4", 1)], "in order"
    assert values["mean_acceptance_length"] == 3.5
