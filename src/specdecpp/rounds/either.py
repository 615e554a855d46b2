"""A round whose candidates are copied from the text or drafted by a model, as the rule `WithCopies` says.

Each request is two, with the same target: one over an index of its text and one over its draft model. Other engines run their
rounds. The model reads what copies have brought when it is next asked, as after any round without it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

from specdecpp.drafters import SuffixDrafter
from specdecpp.policies import WithCopies
from specdecpp.policies.protocol import FREE
from specdecpp.rounds.copying import propose
from specdecpp.rounds.plan import Engine, Plan, Reading, Request, Result


class Either:
    """Takes requests whose rule is `WithCopies`, if one of `engines` takes each of their two parts."""

    def __init__(self, engines: Sequence[Engine]):
        self._engines = tuple(engines)
        self._parts: WeakKeyDictionary[Request, tuple[Part, Part]] = WeakKeyDictionary()
        self.has_batches = all(engine.has_batches for engine in engines)

    def refusal(self, request: Request) -> str | None:
        """Why a request cannot be run here; None where it can."""
        if not isinstance(request.policy, WithCopies):
            return "its rule takes no copies of the text"
        refusals = ([engine.refusal(part) for engine in self._engines] for part in _parts_of(request))
        return next((told[-1] for told in refusals if None not in told), None)

    def run(self, plans: Sequence[Plan], readings: Sequence[Reading] = ()) -> list[Result]:
        told = [self._told(plan) for plan in plans]
        beside = [(self._of(reading.request)[1], reading) for reading in readings]
        asked = [(part.engine, replace(reading, request=part.request)) for part, reading in beside]
        results: dict[int, Result] = {}
        for engine in dict.fromkeys(engine for engine, _ in (*told, *asked)):
            of = [i for i, (its, _) in enumerate(told) if its is engine]
            read = [one for its, one in asked if its is engine]
            results.update(zip(of, engine.run([told[i][1] for i in of], read), strict=True))
        for reading, (_, done) in zip(readings, asked, strict=True):
            reading.took_s = done.took_s
        for i, (_, plan) in enumerate(told):
            results[i].is_copied = plan.found is not None
        return [results[i] for i in range(len(plans))]

    def _of(self, request: Request) -> "tuple[Part, Part]":
        if request not in self._parts:
            copies, model = _parts_of(request)
            self._parts[request] = self._part(copies), self._part(model)
        return self._parts[request]

    def _part(self, request: Request) -> "Part":
        return Part(request, next(engine for engine in self._engines if engine.refusal(request) is None))

    def _told(self, plan: Plan) -> tuple[Engine, Plan]:
        """The round of copies, if these promise more, else that of the model."""
        policy, memory, costs = plan.decision.policy, plan.decision.memory, plan.costs
        assert isinstance(policy, WithCopies)
        assert costs is not None, "the session gives costs to a policy that needs them"
        copies, model = self._of(plan.request)
        decision = plan.decision.of(policy.copies, memory.copies, FREE)
        copied = Plan(copies.request, plan.tokens, decision, costs.copied(), plan.wants_rows)
        found = propose(copied)
        if found[0].tokens and policy.prefers_copies(memory, found[0].judged, costs):
            return copies.engine, replace(copied, found=found)
        decision = plan.decision.of(policy.policy, memory.memory, plan.decision.rule)
        return model.engine, Plan(model.request, plan.tokens, decision, costs, plan.wants_rows)


class Part(NamedTuple):
    """A request of one kind of candidates, and who runs it."""

    request: Request
    engine: Engine


def _parts_of(request: Request) -> tuple[Request, Request]:
    """The request with copies, and with the model."""
    policy = request.policy
    assert isinstance(policy, WithCopies)
    drafter = SuffixDrafter(request.draft.vocab_size, device=request.draft.device)
    return replace(request, draft=drafter, policy=policy.copies), replace(request, policy=policy.policy)
