"""Requests as people type them: a policy as a short spec, a text as a chat message.

    cumulative:0.2     specdecpp:threshold=0.5,min_tokens=1     ->     a frozen policy dataclass

Rules made of rules name them after their own parameters, if any:

    auto-off:cumulative:0.2     bandit:fixed:2|cumulative:0.2     bandit:exploration=0.5:none|fixed:4

A rule may read what follows its name itself (`Policy.read`), as the lab's trees: tree:costs, tree:4x2x1.
"""

from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, get_origin

from specdecpp.policies import CostAware, Fixed, NoDraft, Policy, SpecDecPP, named
from specdecpp.policies.head import takes_head, with_parts
from specdecpp.verify import check_parts, verifications

if TYPE_CHECKING:
    from specdecpp.decoder import Prompt
    from specdecpp.head import AcceptanceHead
    from specdecpp.loading.pair import Pair

NO_DRAFT = "none"
VERIFICATION_NAMES = tuple(name for name, kind in verifications().items() if not kind.greedy_only)
"""Verifications that a request may name; temperature 0 has a kind of its own."""
BOUNDS = ("min_tokens", "max_tokens")

KINDS: dict[str, type[Policy]] = {}
WRAPPERS: dict[str, type[Policy]] = {}
READERS: dict[str, Any] = {}
"""By name: the rules that are made of no others, those that are, and those that read themselves what follows their name."""
for _kind in named():
    _name, _, _main = _kind.short.partition(":")
    _is_wrapper = any(f.name == _main and f.default is MISSING for f in fields(_kind))
    (READERS if "read" in vars(_kind) else WRAPPERS if _is_wrapper else KINDS)[_name] = _kind


@dataclass(frozen=True)
class PolicySpec:
    """A short form that has been read and checked; its policy may still need its head."""

    text: str
    policy: Policy

    @property
    def takes_head(self) -> bool:
        """Tell whether a head makes a difference."""
        return any(takes_head(type(part)) for part in with_parts(self.policy))

    @property
    def needs_head(self) -> bool:
        """Tell whether there is no such rule without a head."""
        return any(map(_needs_head, with_parts(self.policy)))

    def build(self, head: "AcceptanceHead | None") -> Policy:
        """The policy, with its head where it needs one. Raises ValueError when there is none."""
        if head is None and self.needs_head:
            name = next(_name_of(part) for part in with_parts(self.policy) if _needs_head(part))
            raise ValueError(
                f"the policy {name} needs an acceptance head, and this pair has none. Name one with --head, "
                "or choose a rule that needs none, such as cumulative."
            )
        return _read(self.text, head)


def parse_policy(spec: str) -> PolicySpec:
    """Read `name`, `name:value`, `name:key=value,...`, or a rule made of others. Raises ValueError that lists what exists.

    >>> parse_policy("fixed:4").policy
    Fixed(k=4)
    >>> parse_policy("auto-off:fixed:4").policy.policy
    Fixed(k=4)
    """
    return PolicySpec(spec, _read(spec, None))


def policy_of(policy: Policy | str, head: "AcceptanceHead | None") -> Policy:
    """The rule that is given, by itself or by its short form, which has this head."""
    policy = parse_policy(policy).build(head) if isinstance(policy, str) else policy
    if not isinstance(policy, Policy):
        raise TypeError(f"policy must be a rule, as Fixed(3), or its short form, as 'fixed:3', got {policy!r}.")
    return policy


def _read(spec: str, head: "AcceptanceHead | None") -> Policy:
    """The policy of a short form, whose rules have this head."""
    name, _, rest = spec.partition(":")
    if name in (NO_DRAFT, "target") and not rest:  # the second is its old name
        return NoDraft()
    if name in READERS and rest:
        return READERS[name].read(rest)
    if name in KINDS:
        kind: Any = KINDS[name]
        values = _values(spec, kind, rest)
        try:
            if kind is SpecDecPP and head is not None:
                return SpecDecPP.tuned(head, **values)
            return kind(head=head, **values) if takes_head(kind) else kind(**values)
        except ValueError as error:
            raise ValueError(f"policy {spec!r}: {error}") from error
    if name not in WRAPPERS:
        near = get_close_matches(name, [known.partition(":")[0] for known in policy_names()], 1, 0.7)
        hint = f" Is {near[0]} meant?" if near else ""
        raise ValueError(f"there is no policy {spec!r}.{hint} Policies: {', '.join(policy_names())}.")
    kind, values, first = WRAPPERS[name], {}, rest.partition(":")[0]
    if "=" in first:
        values, rest = _values(spec, kind, first), rest.partition(":")[2]
    if not rest:
        raise ValueError(f"policy {spec!r} names no rule that it is made of, as in {name}:cumulative:0.2.")
    takes_many = _takes_many(kind)
    parts = tuple(_read(part, head) for part in (rest.split("|") if takes_many else [rest]))
    policy = kind(**{_main_of(kind): parts if takes_many else parts[0]}, **values)
    check_parts(policy)
    return policy


def policy_names() -> list[str]:
    """Every policy with what may follow its name: none, ..., fixed:k, ..., auto-off:POLICY, tree:SHAPE."""
    wrappers = [f"{name}:{'POLICY|POLICY' if _takes_many(kind) else 'POLICY'}" for name, kind in WRAPPERS.items()]
    return [NO_DRAFT, *(kind.short for kind in KINDS.values()), *wrappers, *(kind.short for kind in READERS.values())]


def spec_of(policy: Policy) -> str:
    """The short spec of a policy: the inverse of `parse_policy`, heads aside.

    >>> spec_of(CumulativeConfidence(threshold=0.3, max_tokens=8))
    'cumulative:0.3,max_tokens=8'
    """
    if policy == NoDraft():
        return NO_DRAFT
    if written := getattr(policy, "written", lambda: None)():
        return written
    name, main = _name_of(policy), _main_of(type(policy))
    if name not in KINDS | WRAPPERS:
        return name
    defaults = _parameters(type(policy))
    values = {parameter: _text(getattr(policy, parameter)) for parameter in defaults}
    shown = [values.pop(main)] if main in values else []
    shown += [f"{key}={text}" for key, text in values.items() if getattr(policy, key) != defaults[key]]
    return ":".join(filter(None, [name, ",".join(shown), "|".join(map(spec_of, policy.parts))]))


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
    is_chat = bool(getattr(pair.tokenizer, "chat_template", None)) if chat is None else chat
    return [{"role": "user", "content": text}] if is_chat else text


def _needs_head(policy: Policy) -> bool:
    return takes_head(type(policy)) and not isinstance(policy, CostAware)  # which does with q


def _main_of(kind: type[Policy]) -> str:
    """The parameter that may stand without its name; of a rule made of others, these."""
    return kind.short.partition(":")[2]


def _takes_many(kind: type[Policy]) -> bool:
    """Tell whether a rule is made of several others."""
    return next(get_origin(f.type) is tuple for f in fields(kind) if f.name == _main_of(kind))


def _name_of(policy: Policy) -> str:
    """The name of a policy's kind; the name of its class for a rule of somebody's own."""
    kind = type(policy)
    return vars(kind).get("short", "").partition(":")[0] or kind.__name__


def _parameters(kind: type[Policy]) -> dict[str, Any]:
    """The parameters that a short form may set and their defaults, the main one first and the bounds last."""
    found = {f.name: f.default for f in fields(kind) if f.init and f.name != "head" and f.default is not MISSING}
    main = [name for name in found if name == _main_of(kind)]
    own = [name for name in found if name not in (*main, *BOUNDS)]
    bounds = [name for name in BOUNDS if name in found and name not in main]
    return {name: found[name] for name in (*main, *own, *bounds)}


def _values(spec: str, kind: type[Policy], text: str) -> dict[str, Any]:
    """The parameters in `value` or `key=value`, separated by commas, each of the type that the field's default has."""
    defaults, main, values = _parameters(kind), _main_of(kind), dict[str, Any]()
    for item in filter(None, text.split(",")):
        key, _, value = item.rpartition("=")
        key = key or (main if main in defaults else "")
        if key not in defaults or key in values:
            problem = "is given twice" if key in values else "is not a parameter"
            raise ValueError(
                f"policy {spec!r}: {key or value} {problem}. {spec.partition(':')[0]} takes {', '.join(defaults)}."
            )
        wanted: Any = type(defaults[key])
        try:
            values[key] = {"true": True, "false": False}[value.lower()] if wanted is bool else wanted(value)
        except (KeyError, ValueError):
            noun = {bool: "true or false", int: "a whole number", float: "a number"}[wanted]
            raise ValueError(f"policy {spec!r}: {key} must be {noun}, got {value!r}.") from None
    return values


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
