"""The halves of a round as one call of compiled code each (`native.cpp`), where what happens between the forward passes would
otherwise take longer than it may: on a small pair the steps of Python and torch are a fifth of a round.

    propose   forward, draw, the head's estimate, the stop test, for each candidate
    verify    the target's pass and the acceptance test

What is decided is what `drafting.propose` and `verification` decide, with the same uniforms of the same streams, so that an
answer does not depend on which of the two decoded a round (up to the rounding of exponentials). A stop rule is followed by its
`floors`, which are known when a round begins. What cannot be decoded so, `compiled_round` says; it is left to the host's loop.
"""

import ctypes
import math
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool
from torch import Tensor

from specdecpp.drafting import Draft, Room
from specdecpp.head import RowEstimator
from specdecpp.policies import Costs, Policy
from specdecpp.policies.head import judge_of
from specdecpp.policies.protocol import Evidence, says_its_floors
from specdecpp.runners.native import Drafting, Filters, Head, NativeRunner, Verifying
from specdecpp.runners.protocol import Runner
from specdecpp.sampling import Dice, Sampling
from specdecpp.verification import BlockVerification, Coins, GreedyVerification, TokenVerification, Verdict, Verification

_KINDS = {"log_q": 0, "entropy": 1, "gap": 2, "depth": 3}
"""The scalars of a head, as the compiled code counts them."""
_EVIDENCE = {Evidence.NOTHING: 0, Evidence.LAST_Q: 1, Evidence.PRODUCT_OF_Q: 2, Evidence.SURVIVAL: 3}
_OF_Q = Evidence.LAST_Q, Evidence.PRODUCT_OF_Q
_STOPPED, _ENDED = 1, 2


def compiled_round(
    *,
    target: Runner,
    draft: Runner,
    policy: Policy,
    verification: Verification,
    sampling: Sampling,
    coins: tuple[Coins, Coins],
    ends: Sequence[int] = (),
    seen: Bool[Tensor, " V"] | None = None,
) -> "CompiledRound | None":
    """Rounds in compiled code; None where the host has to run them:

    other runners; a verification by comparison; a rule that does not say its `floors`; a lagged head; coins that are not
    `Dice`.
    `seen` are the tokens of the context, which the caller marks as they come, for a repetition penalty.
    """
    if not (type(target) is NativeRunner and type(draft) is NativeRunner and all(type(c) is Dice for c in coins)):
        return None
    is_marked = seen is not None or not sampling.needs_seen
    is_known = type(verification) in ((GreedyVerification,) if sampling.is_greedy else (TokenVerification, BlockVerification))
    if not is_marked or not is_known or not says_its_floors(policy):
        return None
    rule = judge_of(policy)
    judge = rule and rule.estimator(is_greedy=sampling.is_greedy)
    if judge is not None and not _is_readable(judge):
        return None
    head = judge and _compiled(judge)  # pyright: ignore[reportArgumentType]
    is_block = isinstance(verification, BlockVerification)
    return CompiledRound(target, draft, policy, head, sampling, coins, tuple(ends), is_block=is_block, seen=seen)  # pyright: ignore[reportArgumentType]


def _is_readable(judge: Any) -> bool:
    return isinstance(judge, RowEstimator) and judge.card.form == "look_ahead"


class _CompiledHead:
    """A head as the compiled code reads it, and the arrays that its addresses are of."""

    def __init__(self, judge: RowEstimator):
        card, self._arrays, calibration = judge.card, judge.arrays, judge.calibration
        weight, table, block, block_bias, output, output_bias = self._arrays
        assert weight is not None, "a head that looks ahead has a layer in front of its blocks"
        self.told = Head(
            input=card.hidden_size,
            scalars=len(card.scalars),
            width=len(output),
            blocks=len(block),
            kinds=(ctypes.c_int32 * 4)(*(_KINDS[name] for name in card.scalars)),
            weight=weight.ctypes.data,
            table=table.ctypes.data,
            block=block.ctypes.data,
            block_bias=block_bias.ctypes.data,
            output=output.ctypes.data,
            shift=output_bias + math.log(calibration.rejection_weight),
            slope=1 / calibration.temperature,
            bias=calibration.bias,
        )


_COMPILED: WeakKeyDictionary[RowEstimator, _CompiledHead] = WeakKeyDictionary()


def _compiled(judge: RowEstimator) -> _CompiledHead:
    if judge not in _COMPILED:
        _COMPILED[judge] = _CompiledHead(judge)
    return _COMPILED[judge]


def _filters(sampling: Sampling, seen: Bool[Tensor, " V"] | None) -> Filters:
    return Filters(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        penalty=sampling.repetition_penalty,
        top_k=sampling.top_k or 0,
        seen=seen.data_ptr() if seen is not None and sampling.needs_seen else None,
    )


class CompiledRound:
    """Runs the rounds of one session: `propose`, then `verify`, as a session's step does."""

    def __init__(
        self,
        target: NativeRunner,
        draft: NativeRunner,
        policy: Policy,
        head: _CompiledHead | None,
        sampling: Sampling,
        coins: tuple[Dice, Dice],
        ends: tuple[int, ...],
        *,
        is_block: bool,
        seen: Bool[Tensor, " V"] | None = None,
    ):
        self.target, self.draft, self.policy = target, draft, policy
        self._head, self._sampling, self._coins = head, sampling, coins
        self._ends, self._most = (ctypes.c_int64 * len(ends))(*ends), -1
        self._seen, filters = seen, _filters(sampling, seen)  # the tensor is kept, since its address is told
        self._drafting = Drafting(ends=ctypes.addressof(self._ends), num_ends=len(ends), sampling=filters)
        self._verifying = Verifying(sampling=filters, is_block=is_block)
        if head is not None:
            self._drafting.head = ctypes.addressof(head.told)

    def propose(self, tokens: list[int], *, memory: Any, room: Room, costs: Costs | None = None) -> Draft | None:
        """Draft candidates after `tokens`, the whole context; None where the policy has no floors for this round."""
        limit = min(self.policy.limit(memory), room.num_tokens)
        floors = self.policy.floors(memory, costs, limit)
        if floors is None:
            return None
        self._make_room(limit)
        draft = Draft(costs=costs, stop_reason="tokens left" if limit == room.num_tokens else "limit")
        least = [floor if k >= self.policy.min_tokens else -math.inf for k, floor in enumerate(floors.least[:limit])]
        least += [-math.inf] * (limit - len(least))
        if not limit or not least[0] <= 1.0:
            draft.stop_reason = (self.policy.stop(draft, memory) if limit else None) or draft.stop_reason
            return draft
        unread = tokens[self.draft.length :]
        if len(unread) > 2:
            self.draft.extend(unread[:-1], rows=1)
            unread = unread[-1:]
        points = [] if self._sampling.is_greedy else self._coins[0].peek(limit)
        given = (ctypes.c_int64 * len(unread))(*unread), (ctypes.c_double * limit)(*least), (ctypes.c_double * limit)(*points)
        told = self._drafting
        told.unread, told.least, told.uniforms = map(ctypes.addressof, given)
        told.num_unread, told.limit, told.evidence = len(unread), limit, _EVIDENCE[floors.evidence]
        num = self.draft.propose(told)
        if points:
            self._coins[0].take(num)
        self._fill(draft, num, memory, reads_q=self._head is not None or floors.evidence in _OF_Q)
        return draft

    def _make_room(self, limit: int) -> None:
        """Tensors for a round of so many candidates; what an earlier round wrote there is over."""
        if limit <= self._most:
            return
        self._most = limit
        self._rows = torch.empty(limit, self.draft.vocab_size)
        self._views: list[torch.Tensor | None] = list(self._rows)
        self._logits = torch.empty(limit + 1, self.target.vocab_size)
        self._states = torch.empty(limit + 1, self.target.hidden_size)
        self._tokens = (ctypes.c_int64 * limit)()
        self._confidence, self._accept = (ctypes.c_double * limit)(), (ctypes.c_double * limit)()
        told = self._drafting
        told.tokens, told.confidence, told.accept = map(ctypes.addressof, (self._tokens, self._confidence, self._accept))
        told.rows = self._verifying.q = self._rows.data_ptr()
        self._verifying.logits, self._verifying.states = self._logits.data_ptr(), self._states.data_ptr()

    def _fill(self, draft: Draft, num: int, memory: Any, *, reads_q: bool) -> None:
        """What the host's loop would have written down."""
        told = self._drafting
        draft.tokens, draft.forward_s, draft.head_s = self._tokens[:num], told.forward_s, told.head_s
        rows: list[torch.Tensor | None] = self._views[:num]
        nothing: list[torch.Tensor | None] = [None] * num
        draft.q, draft._logits = (nothing, rows) if self._sampling.is_greedy else (rows, nothing)
        if reads_q or not self._sampling.is_greedy:
            draft._confidences = self._confidence[:num]
        if self._head is not None:
            draft.judged = self._accept[:num]
        if told.why == _ENDED:
            draft.stop_reason = "end of text"
        elif told.why == _STOPPED:
            draft.stop_reason = self.policy.stop(draft, memory) or "floor"  # equal up to rounding

    def verify(self, tokens: list[int], draft: Draft) -> Verdict:
        """One target pass over what it has not read and the candidates, and the acceptance test."""
        unread, num = tokens[self.target.length :], draft.num_tokens
        if len(unread) > 1:
            self.target.extend(unread[:-1], rows=1)
            unread = unread[-1:]
        points = [] if self._sampling.is_greedy else self._coins[1].take(num + 1)
        given = (ctypes.c_int64 * (num + 1))(*unread, *draft.tokens), (ctypes.c_double * (num + 1))(*points)
        told = self._verifying
        told.tokens, told.coins = map(ctypes.addressof, given)
        told.num_tokens, told.num = num + 1, num
        self.target.verify(told)
        draft.pass_s = told.forward_s
        return Verdict(num_accepted=told.num_accepted, next_token=told.next)
