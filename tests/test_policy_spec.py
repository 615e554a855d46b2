"""What people type becomes the policy they mean, or is refused."""

import re
from dataclasses import fields

import pytest

from specdecpp import lab, policies, policy_spec
from specdecpp.head import AcceptanceHead, Calibration, HeadCard
from specdecpp.lab import AcceptanceEMA, ArgmaxLength, AutoOff, Bandit, DraftVerify, Heuristic
from specdecpp.lab.trees import CostAwareTree, TreePolicy, Widths, parse_tree
from specdecpp.policies import CostAware, CumulativeConfidence, Fixed, MaxConfidence, NoDraft, Policy, SpecDecPP


@pytest.mark.parametrize(
    ("spec", "policy"),
    [
        ("fixed:k=4", Fixed(k=4)),
        ("none", NoDraft()),
        ("target", NoDraft()),  # its old name
        ("heuristic", Heuristic()),
        ("max-confidence:0.4,drop=true", MaxConfidence(threshold=0.4, drop=True)),
        ("cumulative:0.3,max_tokens=8", CumulativeConfidence(threshold=0.3, max_tokens=8)),
        ("ema:3,eta=0.5", AcceptanceEMA(start_tokens=3, eta=0.5)),
        ("argmax:0.6,prior_tokens=2", ArgmaxLength(prior=0.6, prior_tokens=2)),
        ("draft-verify:0.8,aim=0.7,step=0.1", DraftVerify(threshold=0.8, aim=0.7, step=0.1)),
        ("auto-off:cumulative:0.3", AutoOff(policy=CumulativeConfidence(threshold=0.3))),
        ("auto-off:patience=2,fading=0.5:fixed:3", AutoOff(policy=Fixed(k=3), patience=2, fading=0.5)),
        (
            "bandit:fixed:2|cumulative:0.3,max_tokens=9",
            Bandit(arms=(Fixed(k=2), CumulativeConfidence(threshold=0.3, max_tokens=9))),
        ),
        (
            "bandit:exploration=0.5:target|auto-off:argmax",
            Bandit(arms=(Fixed(k=0), AutoOff(policy=ArgmaxLength())), exploration=0.5),
        ),
        ("tree:costs", CostAwareTree()),
        ("tree:4x2x1", Widths(widths=(4, 2, 1))),
    ],
)
def test_a_spec_says_a_policy(spec: str, policy: Policy):
    """Catches a value that lands in another parameter, and a policy whose printed spec cannot be typed in again."""
    assert policy_spec.parse_policy(spec).build(None) == policy
    assert policy_spec.parse_policy(policy_spec.spec_of(policy)).build(None) == policy
    assert policy_spec.spec_of(AutoOff(policy=Policy())) == "auto-off:Policy", "of a rule of somebody's own its class"


def test_specdecpp_takes_the_heads_threshold_unless_told_otherwise():
    """Catches a tuned threshold that is ignored, or one that overrides what was typed."""
    head = AcceptanceHead(HeadCard(hidden_size=4, num_layers=0, stopping={"threshold": 0.6}))
    untuned = AcceptanceHead(HeadCard(hidden_size=4, num_layers=0))
    assert policy_spec.parse_policy("specdecpp").build(head) == SpecDecPP(head=head, threshold=0.6)
    assert policy_spec.parse_policy("specdecpp:max_tokens=9").build(head) == SpecDecPP(head=head, threshold=0.6, max_tokens=9)
    assert policy_spec.parse_policy("specdecpp").build(untuned) == SpecDecPP(head=untuned)
    typed = policy_spec.parse_policy("specdecpp:threshold=0.5,min_tokens=1").build(head)
    assert typed == SpecDecPP(head=head, threshold=0.5, min_tokens=1)
    assert policy_spec.spec_of(typed) == "specdecpp:0.5,min_tokens=1"


def test_a_rule_may_have_a_name_alone(monkeypatch: pytest.MonkeyPatch):
    """Catches a rule of somebody's own that has to make up a parameter."""
    monkeypatch.setattr(Fixed, "short", "fixed")
    assert policy_spec.spec_of(policy_spec.parse_policy("fixed:k=3").policy) == "fixed:k=3"


def test_every_exported_rule_and_parameter_can_be_typed():
    """Catches a new rule that the command line does not know, one it offers that is no longer there, and a parameter that is
    offered but refused by its class."""
    shown = {**vars(policies), **vars(lab)}.values()
    rules = {kind for kind in shown if isinstance(kind, type) and issubclass(kind, Policy)}
    forms = policy_spec.KINDS | policy_spec.WRAPPERS
    assert set(forms.values()) == rules - {Policy, TreePolicy}
    assert {name.split(":")[0] for name in policy_spec.policy_names()} == {policy_spec.NO_DRAFT, *policy_spec.READERS, *forms}
    for kind in policy_spec.KINDS.values():
        assert {f.name for f in fields(kind) if f.init} - {"head"} == set(policy_spec._parameters(kind))


def test_rules_within_rules_get_the_head():
    """Catches a rule inside another that is left without the head, or with the defaults instead of what the card says."""
    card = HeadCard(
        hidden_size=4, num_layers=0, stopping={"threshold": 0.6, "calibrated": True}, calibration=Calibration(num_labels=1)
    )
    head = AcceptanceHead(card)
    spec = policy_spec.parse_policy("bandit:specdecpp:max_tokens=9|auto-off:cost-aware|target")
    assert spec.needs_head
    tuned = SpecDecPP(head=head, threshold=0.6, calibrated=True, max_tokens=9)
    assert spec.build(head) == Bandit(arms=(tuned, AutoOff(policy=CostAware(head=head)), Fixed(k=0)))
    with pytest.raises(ValueError, match=r"specdecpp needs an acceptance head.*--head"):
        spec.build(None)
    assert policy_spec.parse_policy("auto-off:cost-aware").build(None) == AutoOff(policy=CostAware()), "which does with q"
    assert not policy_spec.parse_policy("auto-off:cumulative").needs_head


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("auto-off", r"names no rule that it is made of, as in auto-off:cumulative:0\.2"),
        ("auto-off:fixed:2|fixed:3", r"policy 'fixed:2|fixed:3'.*whole number"),
        ("auto-off:threshold=0.2:fixed:1", "threshold is not a parameter. auto-off takes patience, probe_every, fading"),
        ("auto-off:patience=x:fixed:1", "patience must be a whole number, got 'x'"),
        ("bandit:fixed:2", "two or more arms"),
        ("bandit:fixed:1|bandit:fixed:2", "two or more arms"),
        ("bandit:exploration=0.1,exploration=0.2:target|fixed:1", "exploration is given twice"),
        ("auto-off:specdec", r"there is no policy 'specdec'.*auto-off:POLICY, bandit:POLICY\|POLICY"),
        *((spec, "policy|Heuristic") for spec in ("fixed:x", "fixed:1,2", "fixed:max_tokens=3", "target:2", "heuristic:0", "")),
    ],
)
def test_a_spec_that_names_no_rule_is_refused(spec: str, message: str):
    """Catches a typo that silently becomes a default, or an error about another part of the spec."""
    with pytest.raises(ValueError, match=message):
        policy_spec.parse_policy(spec)


@pytest.mark.parametrize("spec", ["", "axb", "4x0", "costs:0", "cost"])
def test_a_tree_that_says_nothing_is_refused(spec: str):
    """Catches int()'s own words, and widths of nothing."""
    with pytest.raises(ValueError, match=re.escape(f"there is no tree {spec!r}. Give costs, or widths")):
        parse_tree(spec)
