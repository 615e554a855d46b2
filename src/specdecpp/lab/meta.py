"""Rules made of rules: one that finds out which of several is best here, and one that stops drafting where it does not pay.

Both weigh what a step brought in tokens against the seconds that the cost model has it take, never the clock's, so a seed
gives the same steps again. Neither draws at random. Both begin anew with every request.

A head judges every draft token before anybody asks whether to stop, whichever rule the step follows. So all parts that have
a head must have the same one and read it alike, and a part that looks at dropped draft tokens makes the whole drop them.
"""

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from specdecpp.lab.history import Priced
from specdecpp.policies.head import HeadPolicy, judge_of
from specdecpp.policies.protocol import NO_PAST, Given, Policy, Rule, Stop, check_probability, rule_of

if TYPE_CHECKING:
    from torch import Tensor

    from specdecpp.costs import Costs
    from specdecpp.policies.protocol import DraftSoFar, Outcome


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Sums of an arm so far, and its own memory."""

    memory: Any
    num_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second, a ratio of sums."""
        return self.num_tokens / self.seconds


@dataclass(frozen=True, kw_only=True)
class Arms:
    """All arms, and the one the coming step follows."""

    arms: tuple[Arm, ...]
    chosen: int = 0


@dataclass(frozen=True, kw_only=True)
class Bandit(Priced):
    """Follow the rule that has made most tokens a second so far, trying the others now and then: UCB1 (Auer et al. 2002).

    A step follows the arm with the largest  rate_i + exploration * rate * sqrt(2 ln n / n_i), where rate_i is the arm's
    tokens per second, rate that of all arms together and n_i of the n steps were its own; untried arms come first, in order.
    Bandits over stopping rules: TapOut (Sridhar et al. 2025, arXiv 2511.02017); over configurations: BanditSpec (Hou et al.
    2025, arXiv 2505.15141). The exploration of 0.3 is ours: an answer has tens of steps, so the textbook's 1 would only try.

    Only the arm that was followed learns from a step. Raises ValueError for fewer than two arms, a bandit among them, arms
    with different heads, and arms of which only some drop their last draft token.

    >>> from specdecpp.policies import CumulativeConfidence, Fixed
    >>> policy = Bandit(arms=(Fixed(k=2), CumulativeConfidence(threshold=0.2)))
    """

    short: ClassVar[str] = "bandit:arms"
    arms: tuple[Policy, ...]
    exploration: float = 0.3
    min_tokens: int = field(default=0, init=False, repr=False)
    max_tokens: int = field(default=0, init=False, repr=False)
    _judge: Policy | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "arms", tuple(self.arms))
        if len(self.arms) < 2 or any(_has_bandit(arm) for arm in self.arms):
            raise ValueError(f"a Bandit needs two or more arms, none of them a bandit, got {self.arms}")
        if not self.exploration >= 0:
            raise ValueError(f"Bandit needs exploration of at least 0, got {self.exploration}")
        if len({arm.drops_last for arm in self.arms}) > 1:
            raise ValueError("some arms drop their last draft token and some keep it. Use drop=True for all or none of them.")
        judges = [judge for arm in self.arms if (judge := judge_of(arm)) is not None]
        if any(not _judge_alike(judges[0], judge) for judge in judges[1:]):
            raise ValueError(
                "the arms have different heads, or read one head's raw score and its probabilities, and a draft token is "
                "judged once. Use one head with one setting of calibrated, or none."
            )
        object.__setattr__(self, "_judge", judges[0] if judges else None)
        object.__setattr__(self, "max_tokens", max(arm.max_tokens for arm in self.arms))

    @property
    def parts(self) -> tuple[Policy, ...]:
        return self.arms

    @property
    def drops_last(self) -> bool:
        return self.arms[0].drops_last

    @property
    def looks_ahead(self) -> bool:
        return self._judge is not None and self._judge.looks_ahead

    def judge(self, draft: "DraftSoFar", hidden: "Tensor") -> float | None:
        return None if self._judge is None else self._judge.judge(draft, hidden)

    def start(self, given: Given = NO_PAST) -> Arms:
        return Arms(arms=tuple(Arm(memory=arm.start(given)) for arm in self.arms))

    def limit(self, memory: Arms) -> int:
        return self.arms[memory.chosen].limit(memory.arms[memory.chosen].memory)

    def rule(self, memory: Arms, costs: "Costs | None") -> Rule | None:
        return rule_of(self.arms[memory.chosen], memory.arms[memory.chosen].memory, costs)

    def stop(self, draft: "DraftSoFar", memory: Arms) -> Stop | str | None:
        if (rule := self.rule(memory, draft.costs)) is not None:
            return rule.stop(draft)
        arm = self.arms[memory.chosen]
        return None if draft.num_tokens < arm.min_tokens else arm.stop(draft, memory.arms[memory.chosen].memory)

    def learn(self, memory: Arms, outcome: "Outcome") -> Arms:
        own = memory.arms[memory.chosen]
        own = Arm(
            memory=self.arms[memory.chosen].learn(own.memory, outcome),
            num_steps=own.num_steps + 1,
            num_tokens=own.num_tokens + outcome.num_tokens,
            seconds=own.seconds + outcome.expected_s,
        )
        arms = tuple(own if i == memory.chosen else arm for i, arm in enumerate(memory.arms))
        return Arms(arms=arms, chosen=self._best(arms))

    def _best(self, arms: tuple[Arm, ...]) -> int:
        """The first untried arm, or the one with the largest upper bound; the first of equals."""
        for i, arm in enumerate(arms):
            if not arm.num_steps:
                return i
        rate = sum(arm.num_tokens for arm in arms) / sum(arm.seconds for arm in arms)
        width = self.exploration * rate * math.sqrt(2 * math.log(sum(arm.num_steps for arm in arms)))
        bounds = [arm.rate + width / math.sqrt(arm.num_steps) for arm in arms]
        return bounds.index(max(bounds))


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Tokens and seconds of steps with draft tokens, older ones fading, and how many steps ago the last of them was."""

    memory: Any
    num_tokens: float = 0.0
    seconds: float = 0.0
    num_steps: int = 0
    idle: int = 0


@dataclass(frozen=True, kw_only=True)
class AutoOff(Policy):
    """Another rule, switched off while drafting is slower than the target alone.

    Drafting gains  tokens/seconds * t_target(1)  over the target alone, a ratio of running sums in which every step with
    draft tokens weighs (1 - fading) times the next one. Once `patience` such steps have been seen and the gain is below 1 no
    draft token is drafted, but for a probe after every `probe_every` steps. The defaults are ours. The draft reads what it
    has missed at the next probe, in one pass that the cost model does not count.

    >>> from specdecpp.policies import CumulativeConfidence
    >>> policy = AutoOff(policy=CumulativeConfidence(threshold=0.2))
    """

    short: ClassVar[str] = "auto-off:policy"
    policy: Policy
    min_tokens: int = field(default=0, init=False, repr=False)
    max_tokens: int = field(default=0, init=False, repr=False)
    patience: int = 8
    probe_every: int = 16
    fading: float = 0.1

    def __post_init__(self) -> None:
        check_probability("AutoOff.fading", self.fading)
        if self.patience < 1 or self.probe_every < 1:
            raise ValueError(
                f"AutoOff needs patience and probe_every of at least 1, got {self.patience} and {self.probe_every}"
            )
        object.__setattr__(self, "max_tokens", self.policy.max_tokens)

    @property
    def parts(self) -> tuple[Policy, ...]:
        return (self.policy,)

    @property
    def drops_last(self) -> bool:
        return self.policy.drops_last

    @property
    def looks_ahead(self) -> bool:
        return self.policy.looks_ahead

    @property
    def needs_costs(self) -> bool:
        return True

    def judge(self, draft: "DraftSoFar", hidden: "Tensor") -> float | None:
        return self.policy.judge(draft, hidden)

    def limit(self, memory: Gain) -> int:
        return self.policy.limit(memory.memory)

    def stop(self, draft: "DraftSoFar", memory: Gain) -> Stop | str | None:
        if (rule := self.rule(memory, draft.costs)) is not None:
            return rule.stop(draft)
        return None if draft.num_tokens < self.policy.min_tokens else self.policy.stop(draft, memory.memory)

    def start(self, given: Given = NO_PAST) -> Gain:
        return Gain(memory=self.policy.start(given))

    def rule(self, memory: Gain, costs: "Costs | None") -> Rule | None:
        """The rule of the policy; while it is off, one that no draft token passes."""
        assert costs is not None, "the session gives costs to a policy that needs them"
        target_s = costs.verify_s(1)
        if self.is_off(memory, target_s):
            return Rule(least=(math.inf,), words=f"gain {memory.num_tokens / memory.seconds * target_s:.2f} < 1")
        return rule_of(self.policy, memory.memory, costs)

    def learn(self, memory: Gain, outcome: "Outcome") -> Gain:
        if not outcome.num_drafted and self.is_off(memory, outcome.expected_s):  # the rule was not asked
            return replace(memory, idle=memory.idle + 1)
        inner = self.policy.learn(memory.memory, outcome)
        if not outcome.num_drafted:
            return replace(memory, memory=inner, idle=memory.idle + 1)
        return Gain(
            memory=inner,
            num_tokens=(1 - self.fading) * memory.num_tokens + outcome.num_tokens,
            seconds=(1 - self.fading) * memory.seconds + outcome.expected_s,
            num_steps=memory.num_steps + 1,
        )

    def is_off(self, memory: Gain, target_s: float) -> bool:
        """Tell whether the coming step is the target's alone, which takes `target_s`."""
        is_slower = memory.num_tokens * target_s < memory.seconds
        return memory.num_steps >= self.patience and is_slower and memory.idle < self.probe_every


def _has_bandit(policy: Policy) -> bool:
    return isinstance(policy, Bandit) or any(map(_has_bandit, policy.parts))


def _judge_alike(a: Policy, b: Policy) -> bool:
    if isinstance(a, HeadPolicy) and isinstance(b, HeadPolicy):
        return a.head is b.head and (a.head is None or a.calibrated == b.calibrated)  # None: read from text
    return a == b
