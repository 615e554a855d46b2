"""What people type becomes the policy they mean, or is refused."""

import pytest

from specdecpp import request
from specdecpp.head import AcceptanceHead, HeadCard
from specdecpp.policies import CumulativeConfidence, Entropy, Fixed, Heuristic, MaxConfidence, Policy, SpecDecPP


@pytest.mark.parametrize(
    ("spec", "policy"),
    [
        ("fixed:4", Fixed(k=4)),
        ("fixed:k=6", Fixed(k=6)),
        ("target", Fixed(k=0)),
        ("heuristic", Heuristic()),
        ("max-confidence:0.4", MaxConfidence(threshold=0.4)),
        ("max-confidence:drop=true", MaxConfidence(drop=True)),
        ("cumulative:0.3,max_tokens=8", CumulativeConfidence(threshold=0.3, max_tokens=8)),
        ("entropy:0.2,c=0.1", Entropy(threshold=0.2, c=0.1)),
    ],
)
def test_a_spec_says_a_policy(spec: str, policy: Policy):
    """Catches a value that lands in another parameter, and a policy whose printed spec cannot be typed in again."""
    assert request.parse_policy(spec).build(None) == policy
    assert request.parse_policy(request.spec_of(policy)).build(None) == policy


def test_specdecpp_takes_the_heads_threshold_unless_told_otherwise():
    """Catches a tuned threshold that is ignored, or one that overrides what was typed."""
    head = AcceptanceHead(HeadCard(hidden_size=4, num_layers=0, stopping={"threshold": 0.6}))
    untuned = AcceptanceHead(HeadCard(hidden_size=4, num_layers=0))
    assert request.parse_policy("specdecpp").build(head) == SpecDecPP(head=head, threshold=0.6)
    assert request.parse_policy("specdecpp:max_tokens=9").build(head) == SpecDecPP(head=head, threshold=0.6, max_tokens=9)
    assert request.parse_policy("specdecpp").build(untuned) == SpecDecPP(head=untuned)
    typed = request.parse_policy("specdecpp:threshold=0.5,min_tokens=1").build(head)
    assert typed == SpecDecPP(head=head, threshold=0.5, min_tokens=1)
    assert request.spec_of(typed) == "specdecpp:0.5,min_tokens=1"


@pytest.mark.parametrize("spec", ["fixed:x", "fixed:1,2", "fixed:max_tokens=3", "target:2", "heuristic:0", "", ":3"])
def test_a_spec_that_says_nothing_is_refused(spec: str):
    """Catches a typo that silently becomes a default."""
    with pytest.raises(ValueError, match=r"policy|Heuristic"):
        request.parse_policy(spec)
