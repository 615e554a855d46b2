"""Practice: what a pair makes of a few prompts of ours, before anybody has asked it anything.

    PROMPTS -> steps of given lengths, timed (`measuring`) -> Practice -> past: what a rule begins its first request with

The steps that tell what steps cost have real drafts of a real text, so they also tell how many draft tokens this pair accepts
and what its q says of that. Greedy requests and sampled ones differ in both, so half of the prompts are answered at temperature
0 and half as the target's own config asks. A step of k draft tokens holds the step that a rule would have stopped earlier:
its first tokens have the same distribution. So the rule itself is run over the steps, and learns what it would have gained.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from typing import Any

from specdecpp.costs.curve import Costs
from specdecpp.policies.protocol import Given

PROMPTS = (
    "Write a Python function that returns the second largest number of a list.",
    "Why does bread rise in the oven?",
    "A box holds 12 pens. How many pens are in 7 boxes, if 5 pens are missing?",
    "Hi! I could not sleep last night. Any idea what might help?",
    "Sum up in one sentence: The bridge was closed in May because of rust. Repairs took a year, and cars may use it again.",
    "Name three rivers in Europe and a city on each.",
    "def is_prime(n):\n    # finish this function",
)
"""An odd number of them, so that each is answered in both ways when they are gone through twice."""
ENOUGH = 12
"""Steps of one way of sampling; where there are fewer, those of the other way count too, which say more than nothing."""


@dataclass(frozen=True, kw_only=True)
class Practised:
    """A step of given length; `policies.Outcome` without times."""

    num_drafted: int
    num_accepted: int
    judged: tuple[float, ...] = ()
    overlaps: tuple[float, ...] = ()
    expected_s: float = 0.0
    costs: Costs | None = None
    draft_s: float = 0.0
    head_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return self.num_accepted + 1

    def cut(self, num: int, costs: Costs) -> "Practised":
        """The step that the rule would have stopped after `num` draft tokens, at these costs."""
        accepted = min(self.num_accepted, num)
        overlaps = self.overlaps[: min(accepted + 1, num)]
        judged = self.judged[:num]
        return Practised(
            num_drafted=num,
            num_accepted=accepted,
            judged=judged,
            overlaps=overlaps,
            expected_s=costs.round_s(num),
            costs=costs,
        )


@dataclass(frozen=True, kw_only=True)
class Practice:
    """Steps of practice, greedy and sampled; `judge` says whose estimates `Practised.judged` are."""

    greedy: tuple[Practised, ...] = ()
    sampled: tuple[Practised, ...] = ()
    judge: str = ""

    @classmethod
    def parse(cls, values: Any) -> "Practice":
        """From what JSON has of it. Raises ValueError for anything else."""
        try:
            steps = {name: tuple(map(_tried, values[name])) for name in ("greedy", "sampled")}
            return cls(judge=str(values["judge"]), **steps)
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"practice has greedy and sampled steps and a judge, got {values!r}") from error

    def told(self) -> dict[str, Any]:
        """Parse the JSON form."""
        return {"judge": self.judge} | {
            name: [[r.num_drafted, r.num_accepted, r.judged, r.overlaps] for r in getattr(self, name)]
            for name in ("greedy", "sampled")
        }

    def past(self, policy: Any, costs: Costs, *, is_greedy: bool) -> Mapping[str, Any] | None:
        """Statistics that the rule carries on from these steps (`Policy.carry`); None without any, or where others judged
        them."""
        own, other = (self.greedy, self.sampled) if is_greedy else (self.sampled, self.greedy)
        steps = own if len(own) >= ENOUGH else other + own
        if not steps or self.judge != judge_name(policy):
            return None
        memory = policy.start(Given(is_greedy=is_greedy))
        for one in steps:
            rule = policy.rule(memory, costs)
            survivals = accumulate(rule.read(one.judged), mul, initial=1.0)
            num = next((k for k, s in enumerate(survivals) if s < rule.threshold(k)), one.num_drafted)
            memory = policy.learn(memory, one.cut(min(max(num, 1), one.num_drafted), costs))
        return policy.carry(None, replace(memory.settled(), num_tokens=0, lost=0.0))  # it has cost no request anything


def _tried(values: Sequence[Any]) -> Practised:
    num, accepted, judged, overlaps = values
    if not 0 <= accepted <= num == len(judged):
        raise TypeError("a step that cannot be")
    return Practised(
        num_drafted=num, num_accepted=accepted, judged=tuple(map(float, judged)), overlaps=tuple(map(float, overlaps))
    )


def judge_name(policy: Any) -> str:
    """Whose estimates a rule without a threshold goes by; empty for other rules, which practice teaches nothing."""
    from specdecpp.policies import CostAware

    if type(policy) is not CostAware:
        return ""
    return "q" if policy.head is None else f"{policy.head.card.form} {policy.head.card.calibration}"


def texts(pair: Any) -> list[list[int]]:
    """Token ids of the prompts, through the chat template where the pair has one; none where its tokenizer cannot say them, or
    not in ids that the models have."""
    from specdecpp.decoder import encode

    is_chat = bool(getattr(pair.tokenizer, "chat_template", None))
    try:
        found = [encode(pair, [{"role": "user", "content": text}] if is_chat else text) for text in PROMPTS]
    except (ValueError, TypeError, AttributeError):  # PromptError among them; no tokenizer at all
        return []
    return found if max(map(max, found)) < pair.target.vocab_size else []


def practice_of(steps: Iterable[tuple[bool, Any]], judge: str) -> Practice:
    """The steps with draft tokens, each with whether it was greedy."""
    found: dict[bool, list[Practised]] = {True: [], False: []}
    for is_greedy, r in steps:
        if r.num_drafted and len(r.judged) == r.num_drafted:
            of = {"num_drafted": r.num_drafted, "num_accepted": r.num_accepted}
            found[is_greedy].append(Practised(**of, judged=tuple(r.judged), overlaps=tuple(r.overlaps)))
    return Practice(greedy=tuple(found[True]), sampled=tuple(found[False]), judge=judge)
