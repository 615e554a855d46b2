"""Practice: what a rule learns from a few prompts of ours, before anybody has asked a pair anything.

    PROMPTS -> steps of given lengths, timed (`measuring`) -> Practice -> past: what a rule begins its first request with

Half of the prompts are answered at temperature 0 and half as the target's own config asks, since acceptance and q differ in
both. Cutting a recorded step shorter leaves the distribution of its first tokens unchanged, so the rule itself is run
over the steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from typing import Any

from specdecpp.policies import CostAware, Costs
from specdecpp.policies.protocol import Given, rule_of
from specdecpp.policy_spec import as_prompt
from specdecpp.prompt import encode

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
"""Steps of one way of sampling; where there are fewer, those of the other way count too."""


@dataclass(frozen=True)
class Practised:
    """A step of given length; `policies.Outcome` without times."""

    num_accepted: int
    judged: tuple[float, ...]
    overlaps: tuple[float, ...] = ()
    expected_s: float = 0.0
    costs: Costs | None = None
    draft_s = head_s = verify_s = other_s = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.num_accepted <= self.num_drafted:
            raise ValueError(f"{self.num_accepted} of {self.num_drafted} draft tokens cannot be accepted")

    num_drafted = property(lambda self: len(self.judged))
    num_tested = property(lambda self: min(self.num_accepted + 1, self.num_drafted))
    num_tokens = property(lambda self: self.num_accepted + 1)

    def cut(self, num: int, costs: Costs) -> "Practised":
        """The step that the rule would have stopped after `num` draft tokens, at these costs."""
        accepted = min(self.num_accepted, num)
        return Practised(
            accepted, self.judged[:num], self.overlaps[: min(accepted + 1, num)], expected_s=costs.step_s(num), costs=costs
        )


@dataclass(frozen=True, kw_only=True)
class Practice:
    """Steps of practice, greedy and sampled; `judge` names the source of `Practised.judged`."""

    greedy: tuple[Practised, ...] = ()
    sampled: tuple[Practised, ...] = ()
    judge: str = ""

    @classmethod
    def parse(cls, values: Any) -> "Practice":
        """Read the JSON form. Raises ValueError, KeyError or TypeError for anything else."""
        greedy, sampled = (
            tuple(Practised(num, tuple(map(float, qs)), tuple(map(float, tested))) for num, qs, tested in values[name])
            for name in ("greedy", "sampled")
        )
        return cls(greedy=greedy, sampled=sampled, judge=str(values["judge"]))

    def to_json(self) -> dict[str, Any]:
        """The inverse of `parse`."""
        greedy, sampled = ([[r.num_accepted, r.judged, r.overlaps] for r in steps] for steps in (self.greedy, self.sampled))
        return {"judge": self.judge, "greedy": greedy, "sampled": sampled}

    def past(self, policy: Any, costs: Costs, *, is_greedy: bool) -> Mapping[str, Any] | None:
        """Statistics that the rule carries on from these steps (`Policy.carry`); None without any by its own judge."""
        own, other = (self.greedy, self.sampled) if is_greedy else (self.sampled, self.greedy)
        steps = own if len(own) >= ENOUGH else other + own
        if not steps or self.judge != judge_name(policy):
            return None
        memory = policy.start(Given(is_greedy=is_greedy))
        for one in steps:
            rule: Any = rule_of(policy, memory, costs)
            survivals = accumulate(rule.read(one.judged), mul, initial=1.0)
            num = next((k for k, s in enumerate(survivals) if s < rule.threshold(k)), one.num_drafted)
            memory = policy.learn(memory, one.cut(min(max(num, 1), one.num_drafted), costs))
        return policy.carry(None, replace(memory.up_to_date(), num_tokens=0, lost=0.0))  # it has cost no request anything


def judge_name(policy: Any) -> str:
    """The source of the estimates that a rule without a threshold goes by; empty for others, which practice does not teach."""
    if type(policy) is not CostAware:
        return ""
    return "q" if policy.head is None else f"{policy.head.card.form} {policy.head.card.calibration}"


def texts(pair: Any) -> list[list[int]]:
    """Token ids of the prompts, through the chat template where the pair has one; none where its tokenizer cannot encode them,
    or not in ids that the models have."""
    try:
        found = [encode(pair, as_prompt(pair, text)) for text in PROMPTS]
    except (ValueError, TypeError, AttributeError):  # PromptError among them; no tokenizer at all
        return []
    return found if max(map(max, found)) < pair.target.vocab_size else []
