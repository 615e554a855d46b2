"""Who takes part: every rule with the settings that a development split chooses among, so that each is seen at its best.

The target alone and the best fixed K are in every field: everything is measured against them. The free rules
are those of `request.KINDS`, so a new one takes part without a change here.
"""

from collections.abc import Iterator, Sequence
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
    """One rule: development chooses among `settings`; `beside` is measured and shown in any case.

    `scan` are the places of the settings that a short run tries first; the others are tried only beside the best of them.
    """

    role: Role
    settings: tuple[Policy, ...]
    beside: tuple[Policy, ...] = ()
    scan: tuple[int, ...] | None = None

    @property
    def first(self) -> tuple[Policy, ...]:
        """The settings that are tried before any result is known; none where there is nothing to choose."""
        if len(self.settings) < 2:
            return ()
        return self.settings if self.scan is None else tuple(self.settings[i] for i in self.scan)

    def around(self, best: Policy) -> tuple[Policy, ...]:
        """The best of a scan and the settings between its neighbours there that have not been tried."""
        if self.scan is None:
            return (best,)
        at = self.settings.index(best)
        lower = max((i for i in self.scan if i < at), default=-1)
        upper = min((i for i in self.scan if i > at), default=len(self.settings))
        return tuple(self.settings[i] for i in range(lower + 1, upper))

    @property
    def most_tried(self) -> int:
        """The most settings that are run on the development split."""
        second = max((len(self.around(p)) for p in self.first), default=0)
        return len(self.first) + (second if second > 1 else 0)

    def shown(self, chosen: Policy | None) -> tuple[Policy, ...]:
        """Settings that run on the test prompts, each once: the chosen setting first."""
        return tuple(dict.fromkeys([*([] if chosen is None else [chosen]), *self.beside]))


def field_for(
    specs: Sequence[PolicySpec],
    sweeps: Sequence[PolicySpec],
    heads: Sequence["AcceptanceHead"] = (),
    *,
    quick: bool = False,
) -> tuple[Contender, ...]:
    """The rules that were named, else the default field, and what is swept beside them. Raises ValueError for a rule that
    lacks its head."""
    rules = named_field(specs, heads, quick=quick) if specs else default_field(heads, quick=quick)
    return with_sweep(rules, built(sweeps, heads))


def default_field(heads: Sequence["AcceptanceHead"] = (), *, quick: bool = False) -> tuple[Contender, ...]:
    """Fixed K of 1 to 20, every free rule, two rules made of others, what each head makes possible (`head_rules`), and without
    a calibrated head the rule that then is the decoder's default, cost-aware by q.

    A quick field scans fixed K coarsely and tries every other threshold.
    """
    rules = [fixed_rule(quick=quick)]
    for policy in free_rules():
        thresholds = _thin(CUMULATIVE, quick) if isinstance(policy, CumulativeConfidence) else ()
        settings = tuple(replace(policy, threshold=t) for t in thresholds) or (policy,)
        rules.append(Contender(role="free", settings=settings))
    others = [parse_policy(spec).policy for spec in MADE_OF_OTHERS if spec.partition(":")[0] in WRAPPERS]
    rules += [Contender(role="other", settings=(policy,)) for policy in others]
    if not any(head.card.is_calibrated for head in heads):
        rules.append(Contender(role="cost_aware", settings=(CostAware(),)))
    return (*rules, *(rule for head in heads for rule in head_rules(head, quick=quick)))


def head_rules(head: "AcceptanceHead", *, quick: bool = False) -> tuple[Contender, ...]:
    """SpecDec++ and, where the head is calibrated, the rule without a threshold.

    SpecDec++ is tuned from the setting on the head's card; that setting and the paper's (0.7 on the raw score, 2 to 20
    draft tokens) stand beside it.
    """
    card, paper = SpecDecPP.tuned(head), SpecDecPP(head=head)
    thresholds = dict.fromkeys([*_thin(SPECDECPP, quick), card.threshold])
    tuned = tuple(replace(card, threshold=t) for t in thresholds)
    specdecpp = Contender(role="specdecpp", settings=tuned, beside=(paper, card))
    if not head.card.is_calibrated:
        return (specdecpp,)
    return specdecpp, Contender(role="cost_aware", settings=(CostAware(head=head),))


def _thin(values: tuple[float, ...], quick: bool) -> tuple[float, ...]:
    return values[:: 2 if quick else 1]


def fixed_rule(*, quick: bool = False) -> Contender:
    """Every fixed K of 1 to 20; a quick one looks at nine of them and then around the best."""
    scan = tuple(FIXED.index(k) for k in COARSE) if quick else None
    return Contender(role="fixed", settings=tuple(Fixed(k=k) for k in FIXED), scan=scan)


def free_rules() -> Iterator[Policy]:
    """Every rule that has a name, needs no head, and can be used as it comes."""
    for kind, _, _ in KINDS.values():
        needs = [f.name for f in fields(kind) if f.init and f.default is MISSING and f.default_factory is MISSING]
        if not (needs or takes_head(kind) or issubclass(kind, Fixed)):
            yield kind()


def named_field(
    specs: Sequence[PolicySpec], heads: Sequence["AcceptanceHead"] = (), *, quick: bool = False
) -> tuple[Contender, ...]:
    """The rules that were asked for instead of the default field, each as it is.

    Of several fixed K development chooses the best; without any, K of 1 to 20 takes part, since gains are over the best
    fixed K. Raises ValueError for a rule that lacks its head.
    """
    policies = [policy for policy in built(specs, heads) if policy != TARGET]
    given = tuple(dict.fromkeys(p for p in policies if isinstance(p, Fixed)))
    fixed = Contender(role="fixed", settings=given) if given else fixed_rule(quick=quick)
    others = dict.fromkeys(p for p in policies if not isinstance(p, Fixed))
    return (fixed, *(Contender(role=role_of(p), settings=(p,)) for p in others))


def built(specs: Sequence[PolicySpec], heads: Sequence["AcceptanceHead"]) -> list[Policy]:
    """The policies, one for each head where they need one."""
    return [spec.build(head) for spec in specs for head in (heads or [None] if spec.takes_head else [None])]


def with_sweep(field: Sequence[Contender], swept: Sequence[Policy]) -> tuple[Contender, ...]:
    """The field with more settings shown: beside the rule of their role, or as a rule where there is nothing to choose.

    >>> len(with_sweep([fixed_rule()], [Fixed(k=2), Fixed(k=4)])[0].beside)
    2
    """
    rules = list(field)
    for policy in swept:
        kinds = [i for i, rule in enumerate(rules) if type((*rule.settings, *rule.beside)[0]) is type(policy)]
        if kinds:
            rules[kinds[0]] = replace(rules[kinds[0]], beside=(*rules[kinds[0]].beside, policy))
        else:
            rules.append(Contender(role=role_of(policy), settings=(), beside=(policy,)))
    return tuple(rules)


def swept(text: str) -> list[PolicySpec]:
    """Read `POLICY.PARAMETER=VALUE,VALUE,...`. Raises ValueError for anything else.

    >>> [spec.policy.k for spec in swept("fixed.k=2,4")]
    [2, 4]
    """
    name, _, rest = text.partition(".")
    parameter, equals, values = rest.partition("=")
    if not (name and parameter and equals and values.strip(",")):
        raise ValueError(f"a sweep reads POLICY.PARAMETER=VALUE,VALUE,..., such as specdecpp.threshold=0.3,0.5; got {text!r}.")
    return [parse_policy(f"{name}:{parameter}={value}") for value in values.split(",")]


def role_of(policy: Policy) -> Role:
    """The role of a policy in a comparison."""
    match policy:
        case Fixed(k=0):
            return "target"
        case Fixed():
            return "fixed"
        case SpecDecPP():
            return "specdecpp"
        case CostAware():
            return "cost_aware"
    is_free = any(type(policy) is kind for kind, _, _ in KINDS.values()) and not takes_head(type(policy))
    return "free" if is_free else "other"
