"""One request being decoded. A step of it is

    plan -> run (draft, stop, verify: `step.Engine`, chosen in `backends/engines.py`) -> commit, roll back -> learn

A session owns its two caches; several of them can share one pair, step by step (`scheduler`).
"""

from collections.abc import Callable, Sequence
from numbers import Integral
from time import perf_counter
from typing import cast

import torch

from specdecpp.backends import Cache, ReadsBoth, Skips
from specdecpp.backends.engines import engine_for
from specdecpp.backends.kept import Kept
from specdecpp.costs.curve import is_switch
from specdecpp.detokenize import Detokenizer
from specdecpp.drift import RequestTally
from specdecpp.errors import PromptError
from specdecpp.grammar import Matcher
from specdecpp.metrics import FinishReason, Origin, Piece, Step
from specdecpp.policies import CostClock, Costs, Policy
from specdecpp.policies.learning import Experience
from specdecpp.policies.protocol import Decision, Given, decide
from specdecpp.sampling import Randomness, Sampling, Uniforms
from specdecpp.scheduler import ROWS, Reading, decode
from specdecpp.step import Plan, Request, Result
from specdecpp.verify import Verification, check_request, is_lossless

Watch = Callable[[Plan, Result], None]
"""Sees a step before it is committed, with the rows that it was decided on (`step.Rows`)."""


class Session:
    """Decode one prompt, step by step, until `finish_reason` is set.

    `target`, `draft`  caches, empty or with the prompt's beginning; they go to `kept` at the end where it is given
    `randomness`       two independent streams, one to draft and one to verify
    `ends`             ids that end the text
    `costs`            costs of a step; a `CostClock` follows the clock, so stops then depend on times, as with `experience`
    `tally`            sees all steps (`drift`)
    `tail`             tokens at the end of the text that a draft which can skip (`backends.Skips`) reads when first asked
    `grammar`          what the answer may be, as far as its beginning (`grammar.Grammar.matcher`)

    `watch`, where it is set, sees every step; that changes nothing else. Raises `PromptError` for an empty prompt or one longer
    than the target's context, `UnsoundError` and ValueError for what `verify.check_request` refuses.
    """

    def __init__(
        self,
        *,
        target: Cache,
        draft: Cache,
        policy: Policy,
        verification: Verification,
        sampling: Sampling,
        prompt: Sequence[int],
        max_tokens: int,
        randomness: tuple[Randomness, Randomness],
        ends: Sequence[int] = (),
        detokenizer: Detokenizer | None = None,
        costs: Costs | CostClock | None = None,
        experience: Experience | None = None,
        lossless: bool = True,
        kept: Kept | None = None,
        tail: int | None = None,
        tally: RequestTally | None = None,
        grammar: Matcher | None = None,
    ):
        is_greedy, has_costs, has_grammar = sampling.is_greedy, costs is not None, grammar is not None
        check_request(
            policy, verification, is_greedy=is_greedy, has_costs=has_costs, lossless=lossless, has_grammar=has_grammar
        )
        _check_prompt(prompt, max_tokens=max_tokens, max_length=target.max_length)
        self.target, self.draft = target, draft
        self.policy, self.sampling, self.is_lossless = policy, sampling, is_lossless(verification)
        self.tokens = list(prompt)
        self.num_prompt_tokens, self.num_cached_tokens = len(prompt), target.length
        self.max_tokens, self.ends = max_tokens, frozenset(ends)
        self.finish_reason: FinishReason | None = None
        self.prefill_s = 0.0
        self.watch: Watch | None = None
        self.tally, self.num_together = tally, 1
        self._costs, self._experience = costs, experience
        self._detokenizer, self._kept = detokenizer, kept
        self._num_before, self._num_steps, self._num_alike, self._learning_s = 1, 0, 0, 0.0
        reads_along = isinstance(target.model, ReadsBoth) and target.model.share_of(draft.model) > 0
        self._tail = tail if isinstance(draft, Skips) and not reads_along else None
        given = Given(num_unread=min(len(prompt), self._tail or len(prompt)), is_greedy=sampling.is_greedy)
        self._memory = (experience or Experience(policy)).begin(given)
        seen = None
        if sampling.needs_seen:
            seen = torch.zeros(target.vocab_size, dtype=torch.bool, device=target.device)
            seen[self.tokens] = True
        self._request = Request(
            target=target,
            draft=draft,
            policy=policy,
            verification=verification,
            sampling=sampling,
            randomness=randomness,
            ends=self.ends,
            seen=seen,
            grammar=grammar,
        )
        self.engine = engine_for(self._request)
        self._uniforms = [stream for stream in randomness if isinstance(stream, Uniforms)]
        self._mark()
        if self.num_tokens_left <= 0:
            self.finish_reason = "length"
            self.release()

    @property
    def costs(self) -> Costs | None:
        """Costs of a step as they are now: the request's share, where requests are decoded together. With a seed always what it
        costs alone, so that an answer does not depend on who else is there."""
        return self._costs.shared(self.num_together) if isinstance(self._costs, CostClock) else self._costs

    @property
    def num_tokens_left(self) -> int:
        """How many more tokens may be emitted: by `max_tokens`, and by the target's context."""
        left = self.max_tokens - (len(self.tokens) - self.num_prompt_tokens)
        return left if self.target.max_length is None else min(left, self.target.max_length - len(self.tokens))

    def prefill(self, most: int | None = None) -> bool:
        """Read the prompt but for its last token, which the first step reads; at most `most` tokens of it where others wait.
        Return True once all of it has been read."""
        self.read(most)
        return not self.num_unread

    def read(self, most: int | None = None) -> Reading:
        """Read as `prefill` does: the piece that has been read."""
        piece = self.reading(self.num_unread if most is None else most)
        piece.read()
        self.prefill_s += piece.took_s
        return piece

    @property
    def shares(self) -> bool:
        """True where its steps share passes with those of others."""
        return self.engine.shares(self._request)

    @property
    def num_unread(self) -> int:
        """Tokens that `prefill` still has to read. Where passes are shared, also those that the draft lacks before it first
        drafts, if more than `ROWS`: a step would read them at once while other requests wait."""
        lacking = len(self.tokens) - 1 - self.draft.length
        if lacking > ROWS and self.shares and self._decision(self.costs).may_draft:
            return lacking
        return max(0, len(self.tokens) - 1 - self.target.length)

    def reading(self, most: int) -> Reading:
        """The coming piece of the prompt, for both models; for the target only where nothing can be drafted now."""
        target = self.tokens[self.target.length : -1][:most]
        end = self.target.length + len(target)
        may_draft = self.draft.length < end and self._decision(self.costs).may_draft  # which may skip the text's beginning
        return Reading(self._request, target, self.tokens[self.draft.length : end][:most] if may_draft else [])

    def step(self) -> Step:
        """Run one step. Call while `finish_reason` is None, after `prefill`."""
        outcome = decode([self])[self]
        if isinstance(outcome, Step):
            return outcome
        assert isinstance(outcome, Exception), "a step was asked for, not a reading"
        raise outcome

    def rewind(self) -> None:
        """Undo what a step that failed has read and drawn: run again, it gives what it would have given."""
        for backend in (self.target, self.draft):
            backend.rollback(min(backend.length, len(self.tokens) - 1))
        for stream in self._uniforms:
            stream.rewind()

    def release(self) -> None:
        """Keep the caches for requests that begin with this text; the session cannot go on then."""
        kept, self._kept = self._kept, None
        if kept is not None:
            self.rewind()
            kept.put(self.tokens, self.target, self.draft)

    def _mark(self) -> None:
        for stream in self._uniforms:
            stream.mark()

    def plan(self) -> Plan:
        """The coming step, for the engine."""
        costs = self.costs
        return Plan(self._request, self.tokens, self._decision(costs), costs, self.watch is not None)

    def _decision(self, costs: Costs | None) -> Decision:
        """Limit and rule of the coming step; one token of the room is kept for the correction or bonus."""
        room = self.num_tokens_left - 1
        if self.draft.max_length is not None:  # the draft reads all draft tokens but the last
            room = min(room, self.draft.max_length - len(self.tokens) + 1)
        decision = decide(self.policy, self._memory, costs, max(0, room))
        if self._tail is not None and decision.may_draft:
            draft, start = cast(Skips, self.draft), len(self.tokens) - 1 - self._tail  # asking its class takes .04 ms
            if draft.length == draft.num_skipped < start:  # it has read nothing yet
                draft.skip(start)
        return decision

    def commit(self, plan: Plan, result: Result) -> tuple[Piece, ...]:
        """Append what was decided, until the answer ends; cut both caches to what was kept. `watch` sees it first."""
        if self.watch is not None:
            self.watch(plan, result)
        self._mark()
        own: Origin = "bonus" if result.num_accepted == result.num_drafted else "correction"
        accepted: list[tuple[int, Origin]] = [(t, "accepted") for t in result.tokens[: result.num_accepted]]
        pieces = []
        for token, origin in [*accepted, (result.next_token, own)]:
            pieces.append(Piece(token=token, text=self._push(token), origin=origin))
            if self.finish_reason:
                return tuple(pieces)
        self.target.rollback(len(self.tokens) - 1)
        self.draft.rollback(min(self.draft.length, len(self.tokens) - 1))
        return tuple(pieces)

    def learn(self, result: Result, pieces: tuple[Piece, ...], other_s: float) -> Step:
        """Make the `Step` of a result; the policy and the clock learn from it, which is part of the time of the next step."""
        started, costs, num = perf_counter(), self.costs, result.num_drafted
        num_accepted = sum(p.origin == "accepted" for p in pieces)
        num_tested = num_accepted + (pieces[-1].origin == "correction")
        expected_s = result.expected_s
        if is_chain := expected_s is None:  # not a step of an engine that a policy brings
            expected_s = 0.0 if costs is None else costs.step_s(num) + costs.switch_s * is_switch(self._num_before, num)
            is_alike = self._num_steps and (num > 0) is (self._num_before > 0)
            self._num_before, self._num_alike = num, self._num_alike + 1 if is_alike else 0
        outcome = Step(
            pieces=pieces,
            num_drafted=num,
            num_accepted=num_accepted,
            num_tested=num_tested,
            stop=result.stop,
            judged=tuple(result.judged),
            finish_reason=self.finish_reason,
            draft_s=result.draft_s,
            head_s=result.head_s,
            verify_s=result.verify_s,
            other_s=other_s + self._learning_s,
            forward_s=result.forward_s,
            expected_s=expected_s,
            costs=costs,
            extra=result.extra,
            tv=sum(result.tv[: len(pieces)], 0.0),
            overlaps=tuple(result.overlaps[:num_tested] if result.extra is None else result.overlaps),
        )
        self._memory = self.policy.learn(self._memory, outcome)
        if isinstance(self._costs, CostClock) and is_chain:
            self._costs.update(outcome, num_before=self._num_steps, num_alike=self._num_alike)
        self._num_steps += 1
        if self.tally is not None:
            self.tally.add(outcome)
        if self.finish_reason:
            if self._experience is not None:
                self._experience.add(self._memory)
            self.release()
        self._learning_s = perf_counter() - started
        return outcome

    def _push(self, token: int) -> str:
        """Append a token: the text it releases. Sets `finish_reason` where the answer ends with it."""
        text, is_stopped = "", False
        self.tokens.append(token)
        if self._request.seen is not None:
            self._request.seen[token] = True
        if token in self.ends:
            self.finish_reason = "eos"
        elif self._detokenizer:
            text, is_stopped = self._detokenizer.push(token)
        if is_stopped:
            self.finish_reason = "stop"
        if self.finish_reason is None and (grammar := self._request.grammar) is not None:
            grammar.push(token)
            self.finish_reason = "grammar" if grammar.is_over else None
        if self.finish_reason is None and self.num_tokens_left <= 0:
            self.finish_reason = "length"
        if self._detokenizer and self.finish_reason not in (None, "stop"):
            text += self._detokenizer.flush()
        return text


def _check_prompt(prompt: Sequence[int], *, max_tokens: int, max_length: int | None) -> None:
    if not (isinstance(max_tokens, Integral) and max_tokens >= 0):
        raise ValueError(f"max_tokens must be a whole number, at least 0, got {max_tokens}")
    if not prompt:
        raise PromptError(
            "the prompt has no tokens, and the tokenizer has no start token to begin with. Give at least one token."
        )
    if max_length is not None and len(prompt) > max_length:
        raise PromptError(f"the prompt has {len(prompt)} tokens, the target's context holds {max_length}. Shorten the prompt.")
