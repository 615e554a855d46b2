"""Rules that ask a logistic regression on what the draft knows whether draft tokens will be accepted: one learned while
decoding, one fitted before.

Neither compares one number with a threshold that is known when the step begins, so both are asked draft token by draft token
(`Policy.stop`), and the host runs their steps.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

from specdecpp.policies.head import HeadPolicy
from specdecpp.policies.protocol import NO_PAST, DraftSoFar, Given, Policy, check_probability
from specdecpp.policies.score import MIN_OTHERS, logit

if TYPE_CHECKING:
    from specdecpp.head import AcceptanceHead
    from specdecpp.policies.protocol import Outcome

START = 1.5
"""The intercepts before anything was learned: acceptance .82 wherever the slope is 0."""
RIDGE = 1e-3


@dataclass(frozen=True, kw_only=True)
class LogisticFit:
    """logit P(accepted) = slope * x + intercepts[k] with x = logit(q), and what the next Newton step needs.

    `sums` are, of the draft tokens at each place, their number, weights w, w x, and residuals r; `shared` w x^2 and r x of all.
    """

    slope: float
    intercepts: tuple[float, ...]
    sums: tuple[tuple[float, float, float, float], ...]
    shared: tuple[float, float] = (0.0, 0.0)
    num_steps: int = 0
    num_fits: int = 0
    num_tested: int = 0
    num_accepted: int = 0
    mean: float = 1 / (1 + math.exp(-START))
    """Share of the draft tokens that was accepted, those before the last step."""

    def chance(self, x: float, k: int) -> float:
        """P(accepted) of a draft token at place k whose logit(q) is x."""
        return 1 / (1 + math.exp(-max(-30.0, min(30.0, self.slope * x + self.intercepts[k]))))


@dataclass(frozen=True, kw_only=True)
class OnlineLogistic(HeadPolicy):
    """Draft while it is expected to raise the tokens per second of the step, by the estimator of vLLM's adaptive verification.

    Its estimate (vllm#52228; the verification vllm#47808): logit P(accepted) = slope * logit(q) + an intercept for each place,
    from one damped Newton step over every 100 steps, n/(n + 50) of it for n draft tokens; whole steps until three steps were
    taken. All these figures are theirs, and so are the 7 draft tokens of their first report.

    There all draft tokens are drafted, and as many verified as maximise the expected tokens per second of the whole batch. To
    choose by a draft token's own q whether it is verified is biased at temperature > 0; a request that is alone is spared, as
    how many are verified comes from the step before. Here the same aim stops the draft instead, behind a draft token that
    stays, which is exact and saves what drafting the others takes. So with k draft tokens of survival S_1 ... S_k, and m the
    share that was accepted lately, drafting goes on while

        (1 + S_1 + ... + S_k + S_k m) / t(k + 1)  >  (1 + S_1 + ... + S_k) / t(k)

    A first draft token is always drafted, as it is there. Their fit lives as long as the server; requests without a seed hand
    this one on. 1 - q is taken to be at least .01.
    """

    short: ClassVar[str] = "online-logistic:fit_every"
    head: "AcceptanceHead | None" = field(default=None, init=False, repr=False)
    calibrated: bool = field(default=True, init=False, repr=False)
    fit_every: int = 100
    warm_up: int = 3
    damping: float = 50.0
    max_tokens: int = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fit_every < 1 or self.warm_up < 0 or not self.damping >= 0:
            raise ValueError(
                "OnlineLogistic needs fit_every of at least 1, warm_up and damping of at least 0, got "
                f"{self.fit_every}, {self.warm_up} and {self.damping}"
            )

    @property
    def needs_costs(self) -> bool:
        return True

    def start(self, given: Given = NO_PAST) -> LogisticFit:
        past = given.past or {}
        intercepts = past.get("intercepts")
        if not (isinstance(intercepts, list | tuple) and len(intercepts) == self.max_tokens):
            return self._fit(0.0, (START,) * self.max_tokens)
        return replace(
            self._fit(past["slope"], tuple(intercepts)),
            sums=tuple(map(tuple, past["sums"])),
            shared=tuple(past["shared"]),
            **{name: past[name] for name in ("num_steps", "num_fits", "num_tested", "num_accepted", "mean")},
        )

    def carry(self, past: Mapping[str, Any] | None, memory: LogisticFit) -> Mapping[str, Any]:
        return vars(memory).copy()

    def stop(self, draft: DraftSoFar, memory: LogisticFit) -> str | None:
        k = draft.num_tokens
        if not k or memory.num_fits < self.warm_up:
            return None
        assert draft.costs is not None, "the session gives costs to a policy that needs them"
        survival = list(accumulate((memory.chance(_logit_q(e), i) for i, e in enumerate(draft.judged)), lambda a, b: a * b))
        now, then = 1 + sum(survival), 1 + sum(survival) + survival[-1] * memory.mean
        if then * draft.costs.step_s(k) > now * draft.costs.step_s(k + 1):
            return None
        return f"{then - now:.2f} more tokens take longer than the others"

    def learn(self, memory: LogisticFit, outcome: "Outcome") -> LogisticFit:
        num = outcome.num_accepted
        tested = outcome.judged[: min(num + 1, outcome.num_drafted)]
        sums, (across, along) = list(memory.sums), memory.shared
        for k, estimate in enumerate(tested):
            x = _logit_q(estimate)
            chance = memory.chance(x, k)
            weight, surprise = chance * (1 - chance), (k < num) - chance
            n, w, wx, r = sums[k]
            sums[k] = n + 1, w + weight, wx + weight * x, r + surprise
            across, along = across + weight * x * x, along + surprise * x
        memory = replace(
            memory,
            sums=tuple(sums),
            shared=(across, along),
            num_steps=memory.num_steps + 1,
            num_tested=memory.num_tested + len(tested),
            num_accepted=memory.num_accepted + num,
        )
        return memory if memory.num_steps < self.fit_every else self._step(memory)

    def _step(self, memory: LogisticFit) -> LogisticFit:
        """One Newton step. Intercepts are eliminated first: what is left is one equation for the slope."""
        across, along = memory.shared[0] + RIDGE, memory.shared[1]
        for _, w, wx, r in memory.sums:
            across -= wx * wx / (w + RIDGE)
            along -= wx * r / (w + RIDGE)
        total = sum(n for n, *_ in memory.sums)
        step = along / across * total / (total + self.damping) if total else 0.0
        step = step if memory.slope + step >= 0 else 0.0
        intercepts = tuple(
            b + (r - wx * step) / (w + RIDGE) * n / (n + self.damping) if n else b
            for b, (n, w, wx, r) in zip(memory.intercepts, memory.sums, strict=True)
        )
        mean = memory.num_accepted / memory.num_tested if memory.num_tested else memory.mean
        return replace(self._fit(memory.slope + step, intercepts), num_fits=memory.num_fits + 1, mean=mean)

    def _fit(self, slope: float, intercepts: tuple[float, ...]) -> LogisticFit:
        return LogisticFit(slope=slope, intercepts=intercepts, sums=((0.0, 0.0, 0.0, 0.0),) * self.max_tokens)


def _logit_q(estimate: float) -> float:
    """logit(q) of a draft token that was judged by its q (`score.by_q`)."""
    return logit(2 - 1 / estimate)


@dataclass(frozen=True, kw_only=True)
class Disco(Policy):
    """Stop once a classifier gives the last draft token less than `threshold`: DISCO (Mamou et al. 2024, arXiv 2405.04304).

        logit P(accepted) = bias + by_rest log(1 - q) + by_entropy H(q) + by_gap gap + by_depth k

    Theirs is a network of two layers on the ten largest probabilities, the entropy and the place in the step; its threshold
    and the most draft tokens are tuned on held-out prompts. This one is linear in what every recording has (what more features
    bring is .003 of .53 nats, docs/how-it-works.md). Weights and threshold are those of the reference pair at temperature 1,
    fitted on development prompts by `benchmarks/rules.py`, which fits the weights anew for every pair and sampling.
    """

    short: ClassVar[str] = "disco:threshold"
    threshold: float = 0.7
    bias: float = 0.6
    by_rest: float = -1.11
    by_entropy: float = -0.11
    by_gap: float = -0.84
    by_depth: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probability("Disco.threshold", self.threshold)

    def stop(self, draft: DraftSoFar, memory: Any) -> str | None:
        if not draft.num_tokens:
            return None
        rest = math.log(max(1 - draft.confidence(-1), MIN_OTHERS))
        x = self.bias + self.by_rest * rest + self.by_entropy * draft.entropy(-1) + self.by_gap * draft.gap(-1)
        chance = 1 / (1 + math.exp(-max(-30.0, min(30.0, x + self.by_depth * draft.num_tokens))))
        return None if chance >= self.threshold else f"classifier says {chance:.2f} < {self.threshold:g}"
