"""From what people type to what the library takes: a policy as a short spec, a prompt as a chat message, and a request
whose rounds are shown as they come. Shared by the verbs of the command line; imports no torch by itself.

    cumulative:0.2     specdecpp:threshold=0.5,min_tokens=1     ->     a frozen policy dataclass
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Unpack

from specdecpp.policies import (
    CumulativeConfidence,
    Entropy,
    Fixed,
    Heuristic,
    MaxConfidence,
    Policy,
    SpecDecPP,
)

if TYPE_CHECKING:
    from specdecpp.decoder import Decoder, Options, Output, Prompt
    from specdecpp.head import AcceptanceHead
    from specdecpp.pair import Pair
    from specdecpp.session import Round

TARGET = "target"
# name: (class, the parameter that may stand without its name, the others)
KINDS: dict[str, tuple[type[Policy], str, tuple[str, ...]]] = {
    "fixed": (Fixed, "k", ()),
    "heuristic": (Heuristic, "start_tokens", ("min_tokens", "max_tokens")),
    "max-confidence": (MaxConfidence, "threshold", ("drop", "min_tokens", "max_tokens")),
    "cumulative": (CumulativeConfidence, "threshold", ("min_tokens", "max_tokens")),
    "entropy": (Entropy, "threshold", ("c", "min_tokens", "max_tokens")),
    "specdecpp": (SpecDecPP, "threshold", ("calibrated", "min_tokens", "max_tokens")),
}


@dataclass(frozen=True)
class PolicySpec:
    """A policy that has been read and checked, but may still need its head."""

    policy: Policy
    typed: Mapping[str, Any] = field(default_factory=dict)
    """The parameters that were given; for a policy with a head its card has the rest."""

    @property
    def needs_head(self) -> bool:
        return isinstance(self.policy, SpecDecPP)

    def build(self, head: "AcceptanceHead | None") -> Policy:
        """The policy, with its head where it needs one. Raises ValueError when there is none."""
        if not isinstance(self.policy, SpecDecPP):
            return self.policy
        if head is None:
            raise ValueError(
                "the policy specdecpp needs an acceptance head, and this pair has none. Name one with --head, or "
                "choose a rule that needs none, such as cumulative."
            )
        return SpecDecPP.tuned(head, **self.typed)


def parse_policy(spec: str) -> PolicySpec:
    """Read `name`, `name:value`, `name:key=value,...`. Raises ValueError that lists what exists.

    >>> parse_policy("fixed:4").policy
    Fixed(k=4)
    """
    name, _, rest = spec.partition(":")
    if name == TARGET and not rest:
        return PolicySpec(Fixed(k=0))
    if name not in KINDS:
        raise ValueError(f"there is no policy {spec!r}. Policies: {', '.join(policy_names())}.")
    kind, main, others = KINDS[name]
    values: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, _, text = item.rpartition("=")
        key = key or main
        if key not in (main, *others) or key in values:
            problem = "is given twice" if key in values else "is not a parameter"
            raise ValueError(f"policy {spec!r}: {key} {problem}. {name} takes {', '.join((main, *others))}.")
        values[key] = _value(spec, key, text, kind)
    needed = {"head": None} if kind is SpecDecPP else {}
    return PolicySpec(kind(**needed, **values), typed=values)


def policy_names() -> list[str]:
    """Every policy with the parameter that may follow its name: fixed:k, target, ..."""
    names = [f"{name}:{main}" for name, (_, main, _) in KINDS.items()]
    return [names[0], TARGET, *names[1:]]


def spec_of(policy: Policy) -> str:
    """The short spec of a policy: the inverse of `parse_policy`, heads aside.

    >>> spec_of(CumulativeConfidence(threshold=0.3, max_tokens=8))
    'cumulative:0.3,max_tokens=8'
    """
    if policy == Fixed(k=0):
        return TARGET
    name = next((n for n, (kind, _, _) in KINDS.items() if type(policy) is kind), None)
    if name is None:
        return type(policy).__name__
    kind, main, others = KINDS[name]
    defaults = {f.name: f.default for f in fields(kind)}
    extra = [f"{o}={_text(getattr(policy, o))}" for o in others if getattr(policy, o) != defaults[o]]
    return f"{name}:{','.join([_text(getattr(policy, main)), *extra])}"


def as_prompt(pair: "Pair", text: str, *, chat: bool | None = None) -> "Prompt":
    """A text as a prompt: a user message where the tokenizer has a chat template, unless `chat` says otherwise."""
    if chat is None:
        chat = bool(getattr(pair.tokenizer, "chat_template", None))
    return [{"role": "user", "content": text}] if chat else text


def check_sampling(options: "Options") -> None:
    """Raise ValueError for sampling parameters out of range, before a model is loaded for them."""
    from specdecpp.sampling import Sampling

    given: dict[str, Any] = {**options}
    Sampling(**{name: value for name, value in given.items() if name in Sampling.__dataclass_fields__})


def watched(
    decoder: "Decoder", prompt: "Prompt", on_round: "Callable[[Round], None]", **options: "Unpack[Options]"
) -> "Output":
    """`Decoder.generate`, showing every round as soon as it is decided."""
    from specdecpp.decoder import finished, run

    session = decoder.start(prompt, **options)
    rounds = []
    for outcome in run(session):
        rounds.append(outcome)
        on_round(outcome)
    return finished(session, rounds)


def to_dict(output: "Output", *, policy: str, seed: int) -> dict[str, Any]:
    """An answer as JSON, with what is needed to get it again."""
    keys = ("num_drafted", "num_accepted", "stop_reason")
    return {
        "text": output.text,
        "tokens": list(output.tokens),
        "finish_reason": output.finish_reason,
        "metrics": output.metrics.to_dict(),
        "rounds": [{key: getattr(r, key) for key in keys} for r in output.rounds],
        "policy": policy,
        "seed": seed,
    }


def _value(spec: str, key: str, text: str, kind: type[Policy]) -> bool | int | float:
    """One value, of the type that the field's default has."""
    default = next(f.default for f in fields(kind) if f.name == key)
    assert default is not MISSING, "every parameter of a spec has a default"
    wanted = type(default)
    try:
        return {"true": True, "false": False}[text.lower()] if wanted is bool else wanted(text)
    except (KeyError, ValueError):
        noun = {bool: "true or false", int: "a whole number", float: "a number"}[wanted]
        raise ValueError(f"policy {spec!r}: {key} must be {noun}, got {text!r}.") from None


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
