"""Route A: a drafter behind vLLM's public interface for proposers of one's own (`method="custom_class"`). Nothing is replaced.

vLLM then hands over token ids and knows of no draft model, so the draft is run here, as the library always runs it, request
after request. There are no distributions to hand back: candidates are the draft's argmax and are verified as certain, which
keeps the target's distribution and accepts fewer when sampling. Route B does better wherever it is to be had.

vLLM names no requests here either. A row is known by its tokens: a draft that has read the longest beginning of it goes on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from specdecpp.integrations.vllm.clock import StepClock
from specdecpp.integrations.vllm.heads import fitting_head
from specdecpp.integrations.vllm.log import logger
from specdecpp.integrations.vllm.policy import policy_of
from specdecpp.integrations.vllm.rounds import Verified, parameter_ratio
from specdecpp.integrations.vllm.settings import Settings
from specdecpp.policies import Costs, Policy
from specdecpp.policies.protocol import decide
from specdecpp.request import spec_of
from specdecpp.rounds.draft import Draft
from specdecpp.rounds.host import propose
from specdecpp.runners import Runner
from specdecpp.sampling import Sampling, streams


@dataclass
class Thread:
    """A draft of one request: its cache, what the policy remembers, and its candidates that are being verified."""

    runner: Runner
    memory: Any
    tokens: list[int]
    """What the request had at the last round, and the candidates after that."""
    num_context: int = 0
    draft: Draft | None = None

    def shared(self, row: Sequence[int]) -> int:
        """How many tokens a row and this draft begin with in common."""
        both = min(len(self.tokens), len(row))
        differ = np.flatnonzero(np.asarray(self.tokens[:both]) != np.asarray(row[:both]))
        return int(differ[0]) if len(differ) else both


class Threads:
    """The drafts of a batch. At most `most` are kept; those that were unused for longest go first."""

    def __init__(self, runner: Runner, policy: Policy, *, max_tokens: int, costs: Costs | None, clock: StepClock, most: int):
        self._runner, self._policy, self._max_tokens, self._most = runner, policy, max_tokens, most
        self._costs, self._clock = costs, clock
        self._randomness, _ = streams(0)  # greedy drafting draws none
        self._threads: list[Thread] = []
        self._left_s: float | None = None

    def propose(self, rows: Sequence[list[int] | None]) -> list[list[int]]:
        """Candidates after each row; none for None."""
        verify_s = None if self._left_s is None else perf_counter() - self._left_s
        given = [row for row in rows if row is not None]
        threads = self._assign(given)
        for thread, row in zip(threads, given, strict=True):
            self._learn(thread, row, None if verify_s is None else verify_s / len(given))
        costs = self._costs or self._clock.costs(1)[0]
        drafts = iter([self._draft(thread, row, costs) for thread, row in zip(threads, given, strict=True)])
        unused = [t for t in self._threads if not any(t is u for u in threads)]
        self._threads = (unused + threads)[-self._most :]
        self._left_s = perf_counter()
        return [[] if row is None else list(next(drafts).tokens) for row in rows]

    def _assign(self, rows: Sequence[list[int]]) -> list[Thread]:
        """For each row the draft that shares most with it, if it shares all that the request had; else a new one."""
        free, taken = list(self._threads), []
        for row in rows:
            best = max(free, key=lambda t: t.shared(row), default=None)
            if best is not None and best.shared(row) >= best.num_context:
                free = [t for t in free if t is not best]
            else:
                memory = self._policy.begin(self._policy.start(), num_tokens=0, is_greedy=True)  # its candidates are argmaxes
                best = Thread(runner=self._runner.fresh(), memory=memory, tokens=[])
            taken.append(best)
        return taken

    def _learn(self, thread: Thread, row: list[int], verify_s: float | None) -> None:
        """What became of the last candidates: as many were accepted as the request has grown by, less one."""
        draft, thread.draft = thread.draft, None
        num_new = len(row) - thread.num_context
        if draft is None or not 1 <= num_new <= draft.num_tokens + 1:
            return
        if verify_s is not None:
            self._clock.verified(1, draft.num_tokens + 1.0, verify_s)
        outcome = Verified(
            num_tokens=num_new,
            num_drafted=draft.num_tokens,
            num_accepted=num_new - 1,
            expected_s=draft.costs.round_s(draft.num_tokens) if draft.costs else 0.0,
            costs=draft.costs,
            draft_s=draft.forward_s,
            head_s=draft.head_s,
            verify_s=verify_s or 0.0,
            judged=draft.judged,
        )
        thread.memory = self._policy.learn(thread.memory, outcome)

    def _draft(self, thread: Thread, row: list[int], costs: Costs) -> Draft:
        runner = thread.runner
        runner.rollback(min(runner.length, thread.shared(row), len(row) - 1))
        room = self._max_tokens if runner.max_length is None else min(self._max_tokens, runner.max_length - len(row) + 1)
        started = perf_counter()
        draft = propose(
            runner,
            row[runner.length :],
            decision=decide(self._policy, thread.memory, costs, max(0, room)),
            sampling=Sampling(temperature=0.0),
            randomness=self._randomness,
            costs=costs if self._policy.needs_costs else None,
        )
        if draft.num_tokens and thread.num_context:
            self._clock.drafted(1, (perf_counter() - started) / draft.num_tokens)
        thread.tokens, thread.num_context, thread.draft = [*row, *draft.tokens], len(row), draft
        return draft


class Proposer:
    """What vLLM makes and calls: `{"method": "custom_class", "model": "specdecpp.integrations.vllm.custom.Proposer", ...}`."""

    _threads: Threads | None = None
    """Kept by the rank whose candidates vLLM takes."""

    def __init__(self, vllm_config: Any):
        settings = Settings.of(vllm_config)
        if settings is None:
            raise ValueError('this proposer is configured in additional_config["specdecpp"], which is missing.')
        self._config, self._settings = vllm_config, settings

    def load_model(self, target_model: Any) -> None:
        """Load the draft by transformers, and the head, checked against the pair. Raises `PairError` or `HeadError`."""
        from vllm.distributed.parallel_state import get_tp_group  # pyright: ignore[reportMissingImports]

        from specdecpp.loading.models import load_model
        from specdecpp.runners import EagerRunner, LeanRunner

        if get_tp_group().rank_in_group != 0:
            return
        name, target = self._settings.draft, self._config.model_config
        assert name is not None, "the route was chosen because there is one"
        model = load_model(name, dtype=target.dtype, device=next(target_model.parameters()).device, device_map=None)
        kind = LeanRunner if LeanRunner.refusal(model) is None else EagerRunner
        runner = kind(model, vocab_size=target.get_vocab_size())
        sizes = {"hidden_size": runner.hidden_size, "vocab_size": runner.vocab_size}
        head = fitting_head(self._settings.head, target=target.model, draft=name, **sizes)
        policy = policy_of(self._settings.policy, head, draft=name)
        num_tokens = self._config.speculative_config.num_speculative_tokens
        ratio = parameter_ratio(*(sum(p.numel() for p in m.parameters()) for m in (model, target_model)))
        self._threads = Threads(
            runner,
            policy,
            max_tokens=num_tokens,
            costs=self._settings.costs,
            clock=StepClock(ratio=ratio, max_tokens=num_tokens),
            most=2 * self._config.scheduler_config.max_num_seqs,
        )
        logger.info("drafts under %s, at most %d candidates a round", spec_of(policy), num_tokens)

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Candidates for every row of the batch; none where no token came out, as while a prompt is being read."""
        if self._threads is None:
            return [[] for _ in sampled_token_ids]
        lengths = num_tokens_no_spec[: len(sampled_token_ids)].tolist()
        rows = [
            token_ids_cpu[i, :length].tolist() if new else None
            for i, (new, length) in enumerate(zip(sampled_token_ids, lengths, strict=True))
        ]
        return self._threads.propose(rows)
