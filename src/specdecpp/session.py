"""One request being decoded. `step()` is the round, and the whole library in one function:

    draft (the policy stops it) -> verify -> commit -> roll back

A session owns its two caches; several of them can share one pair, step by step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from specdecpp.drafting import Draft, Room, propose
from specdecpp.errors import PromptError, UnsoundError
from specdecpp.policies import CostClock, Costs, Policy
from specdecpp.policies.protocol import Floors
from specdecpp.runners import Runner
from specdecpp.runners.compiled_round import compiled_round
from specdecpp.runners.device_round import device_round
from specdecpp.sampling import Sampling, penalised, probabilities, seen_rows
from specdecpp.text import Detokenizer
from specdecpp.verification import Coins, Verdict, Verification

Origin = Literal["accepted", "correction", "bonus"]
FinishReason = Literal["eos", "stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One token of the answer: the text it releases (held-back text comes with a later piece) and where it came from.

    accepted: a candidate that passed. correction: the target's token after a rejection. bonus: the target's token after a
    round without one (also every token of a round without candidates).
    """

    token: int
    text: str
    origin: Origin


@dataclass(frozen=True, kw_only=True)
class Round:
    """One step: what came out, what it took, in seconds, and why drafting stopped.

    `num_accepted` counts the candidates that ended in the output. draft_s holds the draft's forwards and draws, head_s the
    head, verify_s the target's forward and the acceptance test, other_s everything else. forward_s of all that is within
    forward passes; 0 where a device runs them on its own. expected_s is what the cost model expects of such a round, 0 where
    no policy needs one.
    """

    pieces: tuple[Piece, ...]
    num_drafted: int
    num_accepted: int
    stop_reason: str
    judged: tuple[float, ...]
    finish_reason: FinishReason | None
    draft_s: float
    head_s: float
    verify_s: float
    other_s: float
    forward_s: float = 0.0
    expected_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.pieces)

    @property
    def text(self) -> str:
        return "".join(p.text for p in self.pieces)

    @property
    def tokens(self) -> list[int]:
        return [p.token for p in self.pieces]


Watch = Callable[[Draft, Float[Tensor, "K1 V"], Float[Tensor, "K1 V"]], None]
"""Sees what a round is decided on: the candidates, the target's raw logits, and p, the law they make for this request.

Row i is the target's at the i-th piece of the round.
"""


class Session:
    """Decode one prompt, round by round, until `finish_reason` is set.

    `target` and `draft` are empty runners; `coins` are two independent streams, one to draft and one to verify. `ends` are
    the ids that end the text. Raises `PromptError` for an empty prompt or one longer than the target's context, and
    `UnsoundError` for temperature 0 under a verification that needs q.

    `costs` is for policies that weigh steps. A `CostClock` follows the times of the rounds, and stops then depend on them: it
    is for requests that nobody wants to repeat. `watch`, where it is set, sees every round before it is decided.
    """

    def __init__(
        self,
        *,
        target: Runner,
        draft: Runner,
        policy: Policy,
        verification: Verification,
        sampling: Sampling,
        prompt: Sequence[int],
        max_tokens: int,
        coins: tuple[Coins, Coins],
        ends: Sequence[int] = (),
        detokenizer: Detokenizer | None = None,
        costs: Costs | CostClock | None = None,
    ):
        if costs is None and policy.needs_costs:
            raise ValueError(
                f"{type(policy).__name__} weighs what steps cost, and no costs were given. Give costs=Costs(...), as the "
                "Decoder does once it has measured them."
            )
        _check_prompt(prompt, max_tokens=max_tokens, max_length=target.max_length)
        if sampling.is_greedy and not verification.allows_dropping:
            raise UnsoundError(
                f"at temperature 0 candidates have no distribution q, which {type(verification).__name__} compares with. "
                "Use GreedyVerification(), as the Decoder does."
            )
        self.target, self.draft = target, draft
        self.policy, self.verification, self.sampling = policy, verification, sampling
        self.tokens = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.max_tokens = max_tokens
        self.ends = frozenset(ends)
        self.finish_reason: FinishReason | None = None
        self.prefill_s = 0.0
        self.watch: Watch | None = None
        self._costs = costs
        self._draft_coins, self._verify_coins = coins
        parts = {"target": target, "draft": draft, "policy": policy, "verification": verification, "sampling": sampling}
        self._detokenizer = detokenizer
        self._memory = policy.start()
        self._seen = None
        if sampling.needs_seen:
            self._seen = torch.zeros(target.vocab_size, dtype=torch.bool, device=target.device)
            self._seen[self.tokens] = True
        self._whole = compiled_round(**parts, coins=coins, ends=ends, seen=self._seen)
        self._whole = self._whole or device_round(**parts, coins=coins, ends=ends)
        if self.num_tokens_left <= 0:
            self.finish_reason = "length"

    @property
    def costs(self) -> Costs | None:
        """What a step is taken to cost now."""
        return self._costs.now if isinstance(self._costs, CostClock) else self._costs

    @property
    def num_tokens_left(self) -> int:
        """How many more tokens may be emitted: by `max_tokens`, and by the target's context."""
        left = self.max_tokens - (len(self.tokens) - self.num_prompt_tokens)
        return left if self.target.max_length is None else min(left, self.target.max_length - len(self.tokens))

    def floors(self, limit: int) -> Floors | None:
        """What the policy asks of its evidence in a round of at most `limit` candidates, where it can be said beforehand.

        Nothing, 0, below its least number of candidates.
        """
        floors = self.policy.floors(self._memory, self.costs, limit)
        if floors is None:
            return None
        least = (floor if k >= self.policy.min_tokens else 0.0 for k, floor in enumerate(floors.least))
        return replace(floors, least=tuple(least))

    def prefill(self, most: int | None = None) -> bool:
        """Read the prompt but for its last token, which the first round reads; at most `most` tokens of it where others wait.

        Whether all of it has been read.
        """
        started = perf_counter()
        context = self.tokens[self.target.length : -1][:most]
        if context:
            self.target.extend(context, rows=1)
            if self.policy.limit(self._memory) > 0 and self._draft_room() > 0:
                self.draft.extend(context, rows=1)
        self.prefill_s += perf_counter() - started
        return self.target.length >= len(self.tokens) - 1

    def step(self) -> Round:
        """Run one round. Call while `finish_reason` is None, after `prefill`."""
        started = perf_counter()
        room = Room(num_tokens=max(0, min(self.num_tokens_left - 1, self._draft_room())), ends=self.ends)
        draft, verify = self._propose(room)
        drafted = perf_counter()
        verdict = verify(draft)
        verified = perf_counter()
        drafted += draft.late_s
        pieces = self._commit(draft, verdict)
        # The last piece is the target's own unless the answer ended before it.
        num_accepted = sum(p.origin == "accepted" for p in pieces)
        timing = {
            "draft_s": drafted - started - draft.head_s,
            "head_s": draft.head_s,
            "verify_s": verified - drafted,
            "other_s": perf_counter() - verified,
            "forward_s": draft.forward_s + draft.pass_s,
        }
        outcome = Round(
            pieces=tuple(pieces),
            num_drafted=draft.num_tokens,
            num_accepted=num_accepted,
            stop_reason=draft.stop_reason,
            judged=tuple(draft.judged),
            finish_reason=self.finish_reason,
            expected_s=self.costs.round_s(draft.num_tokens) if self.costs else 0.0,
            **timing,
        )
        self._memory = self.policy.learn(self._memory, outcome)
        if isinstance(self._costs, CostClock):
            self._costs.update(outcome)
        return outcome

    def _draft_room(self) -> int:
        """How many candidates the draft's own context admits: it reads all but the last of them."""
        return self.max_tokens if self.draft.max_length is None else self.draft.max_length - len(self.tokens) + 1

    def _propose(self, room: Room) -> tuple[Draft, Callable[[Draft], Verdict]]:
        """Candidates, and what verifies them: both without the host where runners and rule can, and nobody watches."""
        if self._whole is not None and self.watch is None:
            draft = self._whole.propose(self.tokens, memory=self._memory, room=room, costs=self.costs)
            if draft is not None:
                return draft, partial(self._whole.verify, self.tokens)
        draft = propose(
            self.draft,
            self.tokens[self.draft.length :],
            policy=self.policy,
            memory=self._memory,
            sampling=self.sampling,
            coins=self._draft_coins,
            room=room,
            seen=self._seen,
            costs=self.costs,
        )
        return draft, self._verify

    def _verify(self, draft: Draft) -> Verdict:
        """One target pass over what it has not read and the candidates, and the acceptance test."""
        unread = self.tokens[self.target.length :]
        started = perf_counter()
        logits, _ = self.target.extend(unread + draft.tokens, rows=draft.num_tokens + 1)
        draft.pass_s = perf_counter() - started
        tokens = torch.tensor(draft.tokens, device=logits.device, dtype=torch.long)
        seen = None if self._seen is None else seen_rows(self._seen, tokens)
        if self.verification.greedy_only and self.watch is None:
            p = penalised(logits, self.sampling, seen)  # whose argmax is all that counts
        else:
            p = probabilities(logits, self.sampling, seen)
        if self.watch is not None:
            self.watch(draft, logits, p)
        q = [row.to(p.device) for row in draft.q if row is not None]
        return self.verification(p, torch.stack(q) if q else p[:0], tokens, self._verify_coins)

    def _commit(self, draft: Draft, verdict: Verdict) -> list[Piece]:
        """Append what was decided, token by token until the answer ends; cut both caches to what was kept."""
        own: Origin = "bonus" if verdict.num_accepted == draft.num_tokens else "correction"
        kept: list[tuple[int, Origin]] = [(t, "accepted") for t in draft.tokens[: verdict.num_accepted]]
        pieces = []
        for token, origin in [*kept, (verdict.next_token, own)]:
            self.tokens.append(token)
            pieces.append(Piece(token=token, text=self._text_of(token), origin=origin))
            if self._seen is not None:
                self._seen[token] = True
            if self.finish_reason:
                return pieces
        self.target.rollback(len(self.tokens) - 1)
        self.draft.rollback(min(self.draft.length, len(self.tokens) - 1))
        return pieces

    def _text_of(self, token: int) -> str:
        """The text a token releases; sets `finish_reason` where the answer ends with it."""
        text, is_stopped = "", False
        if token in self.ends:
            self.finish_reason = "eos"
        elif self._detokenizer:
            text, is_stopped = self._detokenizer.push(token)
        if is_stopped:
            self.finish_reason = "stop"
        elif self.finish_reason is None and self.num_tokens_left <= 0:
            self.finish_reason = "length"
        if self._detokenizer and self.finish_reason in ("eos", "length"):
            text += self._detokenizer.flush()
        return text


def _check_prompt(prompt: Sequence[int], *, max_tokens: int, max_length: int | None) -> None:
    if max_tokens < 0:
        raise ValueError(f"max_tokens must be at least 0, got {max_tokens}")
    if not prompt:
        raise PromptError(
            "the prompt has no tokens, and the tokenizer has no start token to begin with. Give at least one token."
        )
    if max_length is not None and len(prompt) > max_length:
        raise PromptError(f"the prompt has {len(prompt)} tokens, the target's context holds {max_length}. Shorten the prompt.")
