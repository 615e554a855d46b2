"""State of a decoder between requests: costs, as measured and as the clock corrects them, and what rules have learned.

request         costs                   begins with                     so that
with a seed     measured or given       practice                        it gives the same answer again
without one     corrected by the clock  experience, else practice       it knows what earlier ones taught, other processes' too
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from specdecpp import cache_dir
from specdecpp.drafters import SuffixDrafter
from specdecpp.drift import PairWatch, RequestTally, text_of
from specdecpp.loading.pair import Pair
from specdecpp.policies import CostClock, Costs, Policy
from specdecpp.policies.head import costs_for, heads
from specdecpp.policies.learning import Experience
from specdecpp.policy_spec import spec_of
from specdecpp.sampling import Sampling
from specdecpp.verify import GreedyVerification, TokenVerification, Verification, is_lossless, verification_for

if TYPE_CHECKING:
    from specdecpp.costs.measuring import Known

SAMPLINGS = 64
"""Ways of sampling of which a decoder remembers what requests have taught, those used last."""


class Memory:
    """Costs and experience of a pair under a policy. `costs` replace the measurement, made when a policy first needs it.

    Without `remembers` nothing that requests have taught is read or written, in this process or on disk: each begins with what
    practice has shown. Costs as they were measured are kept all the same.
    """

    def __init__(self, pair: Pair, policy: Policy, verification: Verification, costs: Costs | None, *, remembers: bool = True):
        self.remembers = remembers
        self.pair, self.policy, self.verification = pair, policy, verification
        self._costs = costs and costs_for(policy, costs)
        self._known: Known | None = None
        self.clock: CostClock | None = None
        self.experiences: OrderedDict[Sampling, Experience] = OrderedDict()
        self._practices: dict[bool, Mapping[str, Any] | None] = {}

    @property
    def costs(self) -> Costs | None:
        """Costs of a step, measured or given; None where the policy does not ask."""
        if self._costs is None and self.policy.needs_costs:
            from specdecpp.costs.measuring import known

            self._known = known(self.pair)
            self._costs = costs_for(self.policy, self._known.costs)
        return self._costs

    def running_costs(self) -> CostClock | None:
        """The costs as the clock corrects them, for requests without a seed. Costs of an earlier process are checked with
        a few steps first: where they say that drafting does not pay, nothing else would show that they are wrong."""
        if self.clock is None and self.costs is not None:
            known = self._known
            now = costs_for(self.policy, known.now) if known and self.remembers else self.costs
            self.clock = CostClock(now, is_copying=isinstance(self.pair.draft, SuffixDrafter))
            if known is not None and not known.is_new and self.pair.is_identified:
                from specdecpp.costs.measuring import check_steps

                self.clock.correct_by(check_steps(self.pair, is_judged=bool(heads(self.policy))))
        return self.clock

    def experience(self, sampling: Sampling) -> Experience:
        """Statistics of requests without a seed under this sampling, those of earlier processes included."""
        clock = self.running_costs()
        now = clock and clock.now
        if not self.remembers:
            return Experience(self.policy, self._practised(sampling, now))
        if sampling not in self.experiences:
            pair, past, keep = self.pair, None, None
            if pair.is_identified:
                key = {"method": 4, **self.way(sampling), "pair": [pair.target_fingerprint, pair.draft_fingerprint]}
                kept = (cache_dir.recall("experience", key) or {}).get("past")
                past, keep = kept if isinstance(kept, dict) else None, partial(self._keep, key)
            self.experiences[sampling] = Experience(self.policy, past or self._practised(sampling, now), keep=keep)
        self.experiences.move_to_end(sampling)
        while len(self.experiences) > SAMPLINGS:
            self.experiences.popitem(last=False)
        return self.experiences[sampling]

    def practised(self, sampling: Sampling) -> Experience:
        """Beginning of a request with a seed: practice, at the costs that it sees."""
        if sampling.is_greedy not in self._practices:
            self._practices[sampling.is_greedy] = self._practised(sampling, self.costs)
        return Experience(self.policy, self._practices[sampling.is_greedy])

    def _practised(self, sampling: Sampling, costs: Costs | None) -> Mapping[str, Any] | None:
        if self._known is None or costs is None:
            return None
        return self._known.practice.past(self.policy, costs, is_greedy=sampling.is_greedy)

    def _keep(self, key: Mapping[str, Any], past: Mapping[str, Any] | None) -> None:
        """Keep what requests have taught, and what the clock has made of the costs, without the head that this rule asks."""
        now = self.clock and self.clock.now
        if past is not None:
            cache_dir.remember("experience", key, {"past": past})
        if now is None or (known := self._known) is None:
            return
        from specdecpp.costs.measuring import keep

        if heads(self.policy):
            head_s = min(known.costs.head_s, now.draft_s)
            now = replace(now, draft_s=now.draft_s - head_s, head_s=head_s)
        keep(self.pair, replace(known, now=now))

    def way(self, sampling: Sampling) -> dict[str, Any]:
        """Rule, heads, sampling and verification of such requests, whatever the pair."""
        named = {f.name: getattr(self.policy, f.name) for f in fields(self.policy) if f.init}
        settings = {name: value for name, value in named.items() if isinstance(value, int | float | str)}
        judges = [(head.card.form, str(head.card.calibration)) for head in heads(self.policy)]
        of = {"rule": [spec_of(self.policy), settings], "heads": judges, "sampling": asdict(sampling)}
        return of | ({} if is_lossless(self.verification) else {"verification": str(self.verification)})

    def tally(self, sampling: Sampling, prompt: Sequence[int]) -> RequestTally | None:
        """A tally that compares a request with the pair's check; None without, or where acceptance is not the ratio test's."""
        of = verification_for(sampling, self.verification)
        if not (self.remembers and self.pair.is_identified and isinstance(of, TokenVerification | GreedyVerification)):
            return None
        if "watch" not in self.pair.measured:
            self.pair.measured["watch"] = PairWatch(self.pair)
        watch: PairWatch = self.pair.measured["watch"]
        return watch.kept and RequestTally(watch, text_of(self.way(sampling)), hash(tuple(prompt)))
