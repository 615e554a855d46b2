"""Steps folded into sums and rates."""

import json
from collections import Counter
from dataclasses import replace
from functools import reduce
from operator import add

import pytest
from distributions import outcome

from specdecpp.metrics import Metrics, Step

RATES = ("mean_acceptance_length", "draft_acceptance_rate", "discard_rate", "verification_rate", "tokens_per_second")


def cut(step: Step) -> Step:
    """The step of an answer that ended on an accepted draft token, without a token of the target's own."""
    return replace(step, pieces=step.pieces[:-1])


def test_sums_and_rates_of_known_steps():
    """Catches a rate over the wrong denominator, and a part of the time that is counted twice or left out: by hand."""
    steps = [
        outcome(4, 4, draft_s=1.0, head_s=2.0, verify_s=4.0, other_s=8.0),
        outcome(4, 1, draft_s=16.0),
        outcome(2, 0),
        cut(outcome(4, 2)),
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


def test_adding_pools_steps():
    """Catches rates that are averaged over requests instead of pooled, and a histogram that is overwritten."""
    requests = [outcome(4, 4, draft_s=1.0), outcome(2, 0)], [cut(outcome(4, 2, verify_s=2.0, head_s=0.5))], [outcome(4, 4)]
    pooled = reduce(add, (Metrics.of(steps, prefill_s=0.5, num_prompt_tokens=2) for steps in requests))
    assert pooled == Metrics.of([r for steps in requests for r in steps], prefill_s=1.5, num_prompt_tokens=6)
    assert pooled + Metrics() == pooled


def test_no_steps_mean_zero_rates():
    """Catches a division by zero for a request that decodes nothing."""
    empty = Metrics.of([])
    assert [getattr(empty, rate) for rate in RATES] == [0.0] * len(RATES)
    assert empty == Metrics()
    assert (empty.num_spec_tokens, empty.time_shares["draft"]) == (0, 0)
    undrafted = Metrics.of([outcome(0, 0)])
    assert (undrafted.draft_acceptance_rate, undrafted.mean_acceptance_length, undrafted.verification_rate) == (0, 1, 1)


def test_to_dict_is_json_with_every_sum_and_rate():
    """Catches a field that JSON cannot hold or that a report would miss."""
    values = json.loads(json.dumps(Metrics.of([outcome(4, 4), outcome(4, 1)], prefill_s=1.0).to_dict()))
    assert values.keys() >= {*Metrics.__dataclass_fields__, *RATES, "elapsed_s"}
    assert list(values["acceptance_histogram"].items()) == [("1", 1), ("4", 1)], "in order"
    assert values["mean_acceptance_length"] == 3.5
