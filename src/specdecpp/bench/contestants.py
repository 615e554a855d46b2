"""Rules that take part in a bench, and the settings of K, `cumulative` and `specdecpp` that development prompts choose among.

The target alone and the best fixed K are in every field: everything is measured against them. The free rules are those of
`policy_spec.KINDS`, so a new one takes part without a change here.
"""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import TYPE_CHECKING

from specdecpp.bench.results import Role
from specdecpp.policies import CostAware, CumulativeConfidence, Fixed, Policy, SpecDecPP
from specdecpp.policies.head import takes_head
from specdecpp.policy_spec import KINDS, WRAPPERS, PolicySpec, parse_policy

if TYPE_CHECKING:
    from specdecpp.head import AcceptanceHead

FIXED = tuple(range(1, 21))
COARSE = (1, 2, 3, 4, 6, 8, 11, 15, 20)
CUMULATIVE = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
SPECDECPP = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
TARGET = Fixed(k=0)
MADE_OF_OTHERS = ("auto-off:cumulative:0.2", "bandit:fixed:2|fixed:5|cumulative:0.2")
"""Those that take part where there are such rules."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One rule and the settings among which development prompts choose."""

    role: Role
    settings: tuple[Policy, ...]


ALONE = Contender(role="target", settings=(TARGET,))


def default_field(heads: Sequence["AcceptanceHead"] = (), *, quick: bool = False) -> tuple[Contender, ...]:
    """Fixed K of 1 to 20, every free rule, two rules made of others, the default by q, and what each head makes possible:
    SpecDec++ tuned from the setting on the head's card, SpecDec++ as in the paper (0.7 on the raw score, 2 to 20 draft tokens)
    and, where the head is calibrated, the rule without a threshold. A quick field has half the settings."""
    every = 2 if quick else 1
    rules = [fixed_rule(quick=quick)]
    for kind in KINDS.values():
        needs = [f.name for f in fields(kind) if f.init and f.default is MISSING and f.default_factory is MISSING]
        if needs or takes_head(kind) or issubclass(kind, Fixed):
            continue
        policy = kind()
        tried = isinstance(policy, CumulativeConfidence)
        settings = tuple(replace(policy, threshold=t) for t in CUMULATIVE[::every]) if tried else (policy,)
        rules.append(Contender(role="free", settings=settings))
    others = [parse_policy(spec).policy for spec in MADE_OF_OTHERS if spec.partition(":")[0] in WRAPPERS]
    rules += [Contender(role="other", settings=(policy,)) for policy in others]
    rules.append(Contender(role="cost_aware", settings=(CostAware(),)))
    for head in heads:
        card = SpecDecPP.tuned(head)
        thresholds = dict.fromkeys([*SPECDECPP[::every], card.threshold])
        rules.append(Contender(role="specdecpp", settings=tuple(replace(card, threshold=t) for t in thresholds)))
        rules.append(Contender(role="specdecpp", settings=(SpecDecPP(head=head),)))
        if head.card.is_calibrated:
            rules.append(Contender(role="cost_aware", settings=(CostAware(head=head),)))
    return tuple(rules)


def fixed_rule(*, quick: bool = False) -> Contender:
    """Every fixed K of 1 to 20; a quick one has nine of them."""
    return Contender(role="fixed", settings=tuple(Fixed(k=k) for k in (COARSE if quick else FIXED)))


def field_for(
    specs: Sequence[PolicySpec], heads: Sequence["AcceptanceHead"] = (), *, quick: bool = False
) -> tuple[Contender, ...]:
    """The rules that were asked for, each as it is, once for each head that it can ask; else the default field.

    Of several fixed K development chooses the best; without any, K of 1 to 20 takes part, since gains are over the best
    fixed K. Raises ValueError for a rule that lacks its head.
    """
    if not specs:
        return default_field(heads, quick=quick)
    policies = [spec.build(head) for spec in specs for head in (heads or [None] if spec.takes_head else [None])]
    named = tuple(dict.fromkeys(policy for policy in policies if policy != TARGET))
    given = tuple(policy for policy in named if isinstance(policy, Fixed))
    fixed = Contender(role="fixed", settings=given) if given else fixed_rule(quick=quick)
    roles: dict[type[Policy], Role] = {type(policy): rule.role for rule in default_field(heads) for policy in rule.settings}
    others = (Contender(role=roles.get(type(p), "other"), settings=(p,)) for p in named if not isinstance(p, Fixed))
    return (fixed, *others)
