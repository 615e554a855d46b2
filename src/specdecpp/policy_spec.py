"""Requests as people type them: a policy as a short spec, a text as a chat message. Imports no torch by itself.

    cumulative:0.2     specdecpp:threshold=0.5,min_tokens=1     ->     a frozen policy dataclass

Rules made of rules name them after their own parameters, if any:

    auto-off:cumulative:0.2     bandit:fixed:2|cumulative:0.2     bandit:exploration=0.5:none|fixed:4

A rule may read what follows its name itself (`Policy.read`), as the lab's trees: tree:costs, tree:4x2x1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, get_origin

from specdecpp.policies import CostAware, Fixed, NoDraft, Policy, SpecDecPP, named
from specdecpp.policies.head import takes_head
from specdecpp.verify import check_parts, verifications

if TYPE_CHECKING:
    from specdecpp.decoder import Prompt
    from specdecpp.head import AcceptanceHead
    from specdecpp.loading.pair import Pair

NO_DRAFT = "none"
VERIFICATION_NAMES = tuple(name for name, kind in verifications().items() if not kind.greedy_only)
"""Verifications that a request may name; temperature 0 has a kind of its own."""
BOUNDS = ("min_tokens", "max_tokens")
Form = tuple[type[Policy], str, tuple[str, ...]]
"""A rule, the parameter that may stand without its name (in a rule made of others, these), and further parameters."""

KINDS: dict[str, Form] = {}
WRAPPERS: dict[str, Form] = {}
"""By name: the rules that are made of no others, and those that are."""
READERS: dict[str, Any] = {}
"""By name: the rules that read themselves what follows it."""
for _kind in named():
    _name, _, _main = _kind.short.partition(":")
    _typed = {f.name: f.default for f in fields(_kind) if f.init and f.name != "head"}
    if "read" in vars(_kind):
        READERS[_name] = _kind
    else:
        if _main and _main not in _typed:
            raise TypeError(
                f"{_kind.__qualname__}.short is {_kind.short!r}, and must be NAME, or NAME:FIELD with a field of it."
            )
        _own = [name for name in _typed if name not in (_main, *BOUNDS)]
        _forms = WRAPPERS if _typed.get(_main) is MISSING else KINDS
        _forms[_name] = (_kind, _main, (*_own, *(bound for bound in BOUNDS if bound in _typed)))


@dataclass(frozen=True)
class PolicySpec:
    """A policy that has been read and checked, but may still need its head."""

    policy: Policy
    typed: Mapping[str, Any] = field(default_factory=dict)
    """The parameters that were given; the card of a head has the rest."""
    parts: "tuple[PolicySpec, ...]" = ()
    """The rules that it is made of."""

    @property
    def takes_head(self) -> bool:
        """Tell whether a head makes a difference."""
        return takes_head(type(self.policy)) or any(part.takes_head for part in self.parts)

    @property
    def needs_head(self) -> bool:
        """Tell whether there is no such rule without a head."""
        own = takes_head(type(self.policy)) and not isinstance(self.policy, CostAware)  # which does with q
        return own or any(part.needs_head for part in self.parts)

    def build(self, head: "AcceptanceHead | None") -> Policy:
        """The policy, with its head where it needs one. Raises ValueError when there is none."""
        if self.parts:
            return _wrap(type(self.policy), [part.build(head) for part in self.parts], self.typed)
        kind: Any = type(self.policy)
        if not takes_head(kind):
            return self.policy
        if head is None and self.needs_head:
            raise ValueError(
                f"the policy {_name_of(self.policy)} needs an acceptance head, and this pair has none. Name one with --head, "
                "or choose a rule that needs none, such as cumulative."
            )
        return SpecDecPP.tuned(head, **self.typed) if kind is SpecDecPP and head else kind(head=head, **self.typed)


def parse_policy(spec: str) -> PolicySpec:
    """Read `name`, `name:value`, `name:key=value,...`, or a rule made of others. Raises ValueError that lists what exists.

    >>> parse_policy("fixed:4").policy
    Fixed(k=4)
    >>> parse_policy("auto-off:fixed:4").policy.policy
    Fixed(k=4)
    """
    name, _, rest = spec.partition(":")
    if name in (NO_DRAFT, "target") and not rest:  # the second is its old name
        return PolicySpec(NoDraft())
    if name in READERS and rest and (policy := READERS[name].read(rest)) is not None:
        return PolicySpec(policy)
    if name in KINDS:
        kind, main, further = KINDS[name]
        values = _values(spec, kind, rest, main, further)
        needed: dict[str, Any] = {"head": None} if takes_head(kind) else {}
        return PolicySpec(kind(**needed, **values), typed=values)
    if name not in WRAPPERS:
        raise ValueError(f"there is no policy {spec!r}. Policies: {', '.join(policy_names())}.")
    kind, _, own = WRAPPERS[name]
    first, _, others = rest.partition(":")
    values = {}
    if "=" in first:
        values, rest = _values(spec, kind, first, "", own), others
    if not rest:
        raise ValueError(f"policy {spec!r} names no rule that it is made of, as in {name}:cumulative:0.2.")
    parts = tuple(map(parse_policy, rest.split("|") if _takes_many(kind) else [rest]))
    policy = _wrap(kind, [part.policy for part in parts], values)
    check_parts(policy)
    return PolicySpec(policy, typed=values, parts=parts)


def policy_names() -> list[str]:
    """Every policy with what may follow its name: none, ..., fixed:k, ..., auto-off:POLICY, tree:SHAPE."""
    names = [":".join(filter(None, (name, main))) for name, (_, main, _) in KINDS.items()]
    wrappers = [f"{name}:{'POLICY|POLICY' if _takes_many(kind) else 'POLICY'}" for name, (kind, _, _) in WRAPPERS.items()]
    return [NO_DRAFT, *names, *wrappers, *(kind.short for kind in READERS.values())]


def spec_of(policy: Policy) -> str:
    """The short spec of a policy: the inverse of `parse_policy`, heads aside.

    >>> spec_of(CumulativeConfidence(threshold=0.3, max_tokens=8))
    'cumulative:0.3,max_tokens=8'
    """
    if policy == NoDraft():
        return NO_DRAFT
    if written := getattr(policy, "written", lambda: None)():
        return written
    name = _name_of(policy)
    if name in WRAPPERS:
        own = ",".join(_changed(policy, WRAPPERS[name][2]))
        return ":".join(filter(None, [name, own, "|".join(map(spec_of, policy.parts))]))
    if name not in KINDS:
        return name
    _, main, others = KINDS[name]
    shown = [*([_text(getattr(policy, main))] if main else []), *_changed(policy, others)]
    return ":".join(filter(None, [name, ",".join(shown)]))


def label_of(policy: Policy) -> str:
    """A policy's name as a table shows it."""
    match policy:
        case Fixed(k=0):
            return "target alone"
        case Fixed(k=k):
            return f"fixed K = {k}"
        case SpecDecPP(threshold=threshold, calibrated=calibrated):
            return f"SpecDec++ {threshold:g}{'' if calibrated else ' raw'}"
        case CostAware(head=head) if policy == CostAware(head=head):
            return "cost-aware by q" if head is None else "cost-aware"
    if len(policy.parts) > 1:
        return f"{_name_of(policy)} of {len(policy.parts)}"
    return spec_of(policy).replace(":", " ").replace(",", " ")


def as_prompt(pair: "Pair", text: str, *, chat: bool | None = None) -> "Prompt":
    """A text as a prompt: a user message where the tokenizer has a chat template, unless `chat` says otherwise."""
    if chat is None:
        chat = bool(getattr(pair.tokenizer, "chat_template", None))
    return [{"role": "user", "content": text}] if chat else text


def _takes_many(kind: type[Policy]) -> bool:
    """Tell whether a rule is made of several others."""
    main = kind.short.partition(":")[2]
    return next(get_origin(f.type) is tuple for f in fields(kind) if f.name == main)


def _wrap(kind: type[Policy], parts: Sequence[Policy], values: Mapping[str, Any]) -> Policy:
    main = kind.short.partition(":")[2]
    return kind(**{main: tuple(parts) if _takes_many(kind) else parts[0]}, **values)


def _name_of(policy: Policy) -> str:
    """The name of a policy's kind; the name of its class for a rule of somebody's own."""
    kind = type(policy)
    return vars(kind).get("short", "").partition(":")[0] or kind.__name__


def _changed(policy: Policy, names: Sequence[str]) -> list[str]:
    """The parameters that differ from their defaults."""
    defaults = {f.name: f.default for f in fields(policy)}
    return [f"{name}={_text(getattr(policy, name))}" for name in names if getattr(policy, name) != defaults[name]]


def _values(spec: str, kind: type[Policy], text: str, main: str, further: Sequence[str]) -> dict[str, Any]:
    """The parameters in `value` or `key=value`, separated by commas, each of the type that the field's default has."""
    known, defaults = [*filter(None, [main]), *further], {f.name: f.default for f in fields(kind)}
    values: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, _, value = item.rpartition("=")
        key = key or main
        if key not in known or key in values:
            problem = "is given twice" if key in values else "is not a parameter"
            raise ValueError(f"policy {spec!r}: {key or value} {problem}. {spec.partition(':')[0]} takes {', '.join(known)}.")
        wanted: Any = type(defaults[key])
        try:
            values[key] = {"true": True, "false": False}[value.lower()] if wanted is bool else wanted(value)
        except (KeyError, ValueError):
            noun = {bool: "true or false", int: "a whole number", float: "a number"}[wanted]
            raise ValueError(f"policy {spec!r}: {key} must be {noun}, got {value!r}.") from None
    return values


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
