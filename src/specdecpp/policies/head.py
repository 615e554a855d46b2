"""Rules that ask a trained acceptance head; SpecDec++ stops when a rejection is likelier than a threshold."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from specdecpp.policies.protocol import Evidence, Policy, Rule, check_probability
from specdecpp.policies.score import by_q

if TYPE_CHECKING:
    from torch import Tensor

    from specdecpp.costs import Costs
    from specdecpp.head import AcceptanceHead, Estimator
    from specdecpp.policies.protocol import DraftSoFar


@dataclass(frozen=True, kw_only=True)
class HeadPolicy(Policy):
    """Base of the rules that have a head judge every draft token.

    `calibrated=True` reads probabilities, and warns where nobody has checked them; `False` the head's raw score.
    """

    head: "AcceptanceHead | None"
    """None: the estimate is that of q, or a short form was read and the head is not loaded yet."""
    calibrated: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head is not None and self.calibrated and not self.head.card.is_calibrated:
            warnings.warn(
                "the head's probabilities have not been calibrated on held-out labels, so what rests on them means little. "
                "Calibrate it (specdecpp train RECIPE --only calibrate), or use its raw score where the rule can "
                "(calibrated=False).",
                stacklevel=4,
            )

    @property
    def looks_ahead(self) -> bool:
        return self.head is None or self.head.card.form == "look_ahead"

    @cached_property
    def _estimators(self) -> "tuple[Estimator, Estimator]":
        head: Any = self.head
        sampled, greedy = (head.estimator(calibrated=self.calibrated, is_greedy=is_greedy) for is_greedy in (False, True))
        return sampled, greedy

    def estimator(self, *, is_greedy: bool) -> "Estimator":
        """The head's estimator for sampled or for greedy draft tokens."""
        return self._estimators[is_greedy]

    def judge(self, draft: "DraftSoFar", hidden: "Tensor") -> float:
        if self.head is None:
            return by_q(draft.confidence(-1))
        from specdecpp.head import features  # it imports torch, which exact computations do without

        scalars = features.of_last(self.head.card.scalars, draft)
        return self.estimator(is_greedy=draft.is_greedy)(hidden, draft.tokens[-1], scalars)


@dataclass(frozen=True, kw_only=True)
class SpecDecPP(HeadPolicy):
    """Stop once 1 - prod_i head(Y_i) > threshold, within [min_tokens, max_tokens] = [2, 20] (Huang et al. 2025).

    A lagged head judges a draft token by the forward pass that also yields its successor; that successor is free and is
    kept. A look-ahead head judges it as soon as it is drawn, so no pass is spent on a draft token that is judged hopeless.

    `calibrated=False` reads the head's raw score, which a weighted loss has biased downwards on purpose (the paper's
    setting: 0.7 with w_rej = 6); `calibrated=True` reads probabilities, and warns where nobody has checked them.

    >>> policy = SpecDecPP.tuned(pair.head)                     # as its card says            # doctest: +SKIP
    """

    short: ClassVar[str] = "specdecpp:threshold"
    threshold: float = 0.7
    calibrated: bool = False
    min_tokens: int = 2
    max_tokens: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probability("SpecDecPP.threshold", self.threshold)

    @classmethod
    def tuned(cls, head: "AcceptanceHead", **changes: Any) -> "SpecDecPP":
        """The rule in the setting that the head's card recommends, the defaults where it says nothing."""
        return cls(head=head, **(head.card.stopping | changes))

    def rule(self, memory: Any, costs: "Costs | None") -> Rule:
        return Rule(Evidence.SURVIVAL, (1 - self.threshold,))


def with_parts(policy: Policy) -> Iterator[Policy]:
    """The rule and all that it is made of."""
    yield policy
    for part in policy.parts:
        yield from with_parts(part)


def takes_head(kind: type[Policy]) -> bool:
    """True for rules with a parameter `head`."""
    return any(f.name == "head" and f.init for f in fields(kind))


def costs_for(policy: Policy, costs: "Costs") -> "Costs":
    """Costs of a step under a rule: where heads judge every draft token, their time is part of drafting."""
    return costs.with_head() if heads(policy) else costs


def judge_of(policy: Policy) -> Policy | None:
    """The rule that judges draft tokens when this one is followed, itself or one that it is made of; None where nobody does."""
    if policy.parts:
        return next(filter(None, map(judge_of, policy.parts)), None)
    return None if type(policy).judge is Policy.judge else policy


def skips_forced(policy: Policy) -> bool:
    """True where tokens that a grammar forces need no pass of their own: a head that judges by that pass needs it."""
    return policy.looks_ahead or judge_of(policy) is None


def judges_plainly(judge: Policy) -> bool:
    """True where a rule judges as `HeadPolicy` does, which compiled engines can: a subclass may have a way of its own."""
    if not isinstance(judge, HeadPolicy) or type(judge).judge is not HeadPolicy.judge:
        return False
    return judge.head is None or type(judge).estimator is HeadPolicy.estimator


def judges_by_q(judge: Policy | None) -> bool:
    """Tell whether a rule judges plainly and has no head."""
    return isinstance(judge, HeadPolicy) and judge.head is None and judges_plainly(judge)


def heads(policy: Policy) -> "list[AcceptanceHead]":
    """The heads that a rule and the rules it is made of ask."""
    return [part.head for part in with_parts(policy) if isinstance(part, HeadPolicy) and part.head is not None]
