"""Route B: vLLM's draft-model proposer with our policy at every draft step. For vLLM's first model runner.

vLLM's own `propose` runs the draft; it calls `_sample_draft_tokens` once a step, with the hidden states that gave q. There
the candidates are handed to `rounds.Rounds`, and once no request goes on the loop is left by an exception that `propose`
catches. What it then returns is ragged, and with `draft_sample_method="probabilistic"` the distributions are kept, so that
vLLM runs the ratio test on as many candidates as each request has.

Where no request wants a candidate the draft is not run; vLLM by itself has it read along. What it has missed (`unread`) it
reads in passes of their own when somebody wants one again.

The first rank of a tensor-parallel group decides, and tells the others: one broadcast of a byte per request and step. Every
rank makes the same number of passes whatever its arithmetic.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group  # pyright: ignore[reportMissingImports]
from vllm.forward_context import set_forward_context  # pyright: ignore[reportMissingImports]
from vllm.v1.attention.backend import CommonAttentionMetadata  # pyright: ignore[reportMissingImports]
from vllm.v1.spec_decode.draft_model import DraftModelProposer  # pyright: ignore[reportMissingImports]

from specdecpp.integrations.vllm.clock import StepClock
from specdecpp.integrations.vllm.heads import fitting_head
from specdecpp.integrations.vllm.log import logger
from specdecpp.integrations.vllm.meters import meters
from specdecpp.integrations.vllm.policy import policy_of
from specdecpp.integrations.vllm.rounds import Rounds, Seen, parameter_ratio
from specdecpp.integrations.vllm.settings import Settings
from specdecpp.integrations.vllm.unread import Span, Unread, portions
from specdecpp.request import spec_of


class AllStopped(Exception):
    """No request of the batch goes on."""


class AdaptiveProposer(DraftModelProposer):
    """Draws as many candidates for each request as its policy asks for, at most `num_speculative_tokens`."""

    _rounds: Rounds | None = None
    """Kept by the rank that decides."""

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None):
        super().__init__(vllm_config, device, runner)
        settings = Settings.of(vllm_config)
        assert settings is not None, "this class is in place only where it is configured"
        self._settings = settings
        self._max_tokens: int = self.num_speculative_tokens
        self._batch: list[tuple[Any, int, tuple[int, ...]]] = []
        self._num_sampled: list[int] = []
        self._num_drafted: list[int] = []
        self._num_rows = 0
        self._goes_on: list[bool] = []
        self._q: list[Tensor] = []
        self._is_proposing = False
        self._unread: Unread | None = None
        self._input_batch: Any = None

    def initialize_attn_backend(self, kv_cache_config: Any, kernel_block_sizes: list[int] | None = None) -> None:
        """With the draft's layers, the slots that it has not read."""
        super().initialize_attn_backend(kv_cache_config, kernel_block_sizes)
        if not (self.supports_mm_inputs or self.uses_mrope):  # whose inputs are more than tokens
            num_slots = kv_cache_config.num_blocks * self.block_size
            self._unread = Unread(num_slots, block_size=self.block_size, device=self.device)

    def load_model(self, target_model: Any) -> None:
        """The draft as vLLM loads it, then the head, checked against the pair. Raises `HeadError`."""
        super().load_model(target_model)
        if get_tp_group().rank_in_group != 0:
            return
        spec = self.speculative_config
        draft, target = spec.draft_model_config, spec.target_model_config
        sizes = {"hidden_size": draft.get_hidden_size(), "vocab_size": target.get_vocab_size()}
        head = fitting_head(self._settings.head, target=target.model, draft=draft.model, **sizes)
        policy = policy_of(self._settings.policy, head, draft=draft.model)
        ratio = parameter_ratio(*(sum(p.numel() for p in m.parameters()) for m in (self.model, target_model)))
        self._rounds = Rounds.of(
            policy,
            device=self.device,
            max_tokens=self._max_tokens,
            costs=self._settings.costs,
            clock=StepClock(ratio=ratio, max_tokens=self._max_tokens),
            meters=meters(),
        )
        logger.info("drafts under %s, at most %d candidates a round", spec_of(policy), self._max_tokens)

    def prepare_next_token_ids_padded(
        self, sampled_token_ids: Tensor, requests: Any, gpu_input_batch: Any, discard_request_mask: Tensor, *args: Any
    ) -> Any:
        """Called first in a step: what came out of the target pass."""
        prepared = super().prepare_next_token_ids_padded(
            sampled_token_ids, requests, gpu_input_batch, discard_request_mask, *args
        )
        self._input_batch = gpu_input_batch
        if self._rounds is not None:
            states = [requests[req_id] for req_id in gpu_input_batch.req_ids[: gpu_input_batch.num_reqs]]
            lengths = gpu_input_batch.num_tokens_no_spec[: len(states)].tolist()
            self._batch = [(state, n, _ends(state)) for state, n in zip(states, lengths, strict=True)]
            sampled, discarded = prepared[1].tolist(), discard_request_mask[: len(states)].tolist()
            self._num_sampled = [0 if is_discarded else n for n, is_discarded in zip(sampled, discarded, strict=True)]
            self._num_drafted = [0] * len(states)
        return prepared

    def prepare_inputs_padded(self, common_attn_metadata: Any, spec_decode_metadata: Any, *args: Any) -> Any:
        """Called second, if candidates were verified: how many of each request."""
        if self._rounds is not None:
            self._num_drafted = list(spec_decode_metadata.num_draft_tokens)
        return super().prepare_inputs_padded(common_attn_metadata, spec_decode_metadata, *args)

    def propose(self, num_speculative_tokens: int, *args: Any, **kwargs: Any) -> list[list[int]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Candidates for every request, as many as each has."""
        self._q, self._last_draft_probs = [], None
        metadata = kwargs["common_attn_metadata"]
        self._num_rows = metadata.batch_size()
        goes_on = []
        if self._rounds is not None:
            self._rounds.settle(self._seen())
            self._batch = []  # the states in it are the engine's to drop
            goes_on = self._rounds.open(num_speculative_tokens)
        self._goes_on = self._agreed(goes_on)
        is_idle = self._unread is not None and not any(self._goes_on)
        if self._unread is not None:
            if not is_idle:
                self._catch_up(self._unread, metadata)
            self._unread.mark(metadata.slot_mapping[: metadata.num_actual_tokens], unread=is_idle)
        if not is_idle:
            self._is_proposing = True
            try:
                super().propose(num_speculative_tokens, *args, **kwargs)
            except AllStopped:
                pass
            finally:
                self._is_proposing = False
        self._last_draft_probs = torch.stack(self._q, dim=1).contiguous() if self._q else None
        return [[] for _ in range(self._num_rows)] if self._rounds is None else self._rounds.close()

    def _sample_draft_tokens(self, hidden_states: Tensor, sampling_metadata: Any) -> tuple[Tensor, Tensor | None]:
        """One draft step: vLLM's own draw, then whether anybody goes on."""
        if not self._is_proposing:
            return super()._sample_draft_tokens(hidden_states, sampling_metadata)
        if not any(self._goes_on):
            raise AllStopped
        logits = self.model.compute_logits(hidden_states)
        tokens, q = self._sample_from_logits(logits, sampling_metadata)
        if q is not None:
            self._q.append(q)
        goes_on = []
        if self._rounds is not None:
            seen = logits.softmax(-1, dtype=torch.float32) if q is None else q
            goes_on = self._rounds.advance(hidden_states, tokens, seen)
        self._goes_on = self._agreed(goes_on)
        if not any(self._goes_on):
            raise AllStopped
        return tokens, q

    def _catch_up(self, unread: Unread, metadata: CommonAttentionMetadata) -> None:
        """Let the draft read what it has missed before the tokens of this step."""
        starts = metadata.query_start_loc
        lengths = metadata.seq_lens - (starts[1:] - starts[:-1])
        spans = unread.spans(metadata.block_table_tensor[: self._num_rows], lengths[: self._num_rows])
        for portion in portions(spans, self.max_num_tokens):
            self._read(portion, metadata.block_table_tensor)
        for span in spans:
            unread.mark(span.slots, unread=False)
        if spans and self._rounds is not None:
            self._rounds.caught_up()

    def _read(self, spans: Sequence[Span], blocks: Tensor) -> None:
        """A pass of the draft for the sake of its cache; at most `max_num_tokens` positions."""
        known, num_tokens = self._input_batch.token_ids_cpu, sum(map(len, spans))
        tokens = [known[span.row, span.start : span.stop] for span in spans]
        ends = torch.tensor([0, *accumulate(map(len, spans))], dtype=torch.int32)
        lengths = torch.tensor([span.stop for span in spans], dtype=torch.int32)
        metadata = CommonAttentionMetadata(
            query_start_loc=ends.to(self.device),
            query_start_loc_cpu=ends,
            seq_lens=lengths.to(self.device),
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=len(spans),
            num_actual_tokens=num_tokens,
            max_query_len=max(map(len, spans)),
            max_seq_len=max(span.stop for span in spans),
            block_table_tensor=blocks[[span.row for span in spans]],
            slot_mapping=torch.cat([span.slots for span in spans]),
        )
        _, per_layer = self.build_per_group_and_layer_attn_metadata(metadata)
        mode, num_padded, num_across = self._determine_batch_execution_and_padding(num_tokens)
        self.input_ids[:num_tokens] = torch.from_numpy(np.concatenate(tokens)).to(self.device)
        positions = [torch.arange(span.start, span.stop, device=self.device) for span in spans]
        self._set_positions(num_tokens, torch.cat(positions))
        inputs, num_slots = self.build_model_inputs_first_pass(num_tokens, num_padded, None)
        with set_forward_context(
            per_layer,
            self.vllm_config,
            num_tokens=num_padded,
            num_tokens_across_dp=num_across,
            cudagraph_runtime_mode=mode,
            slot_mapping=self._get_slot_mapping(num_slots, metadata.slot_mapping),
        ):
            self.model(**inputs)

    def _agreed(self, goes_on: list[bool]) -> list[bool]:
        """The first rank's answer, on every rank."""
        group = get_tp_group()
        if group.world_size == 1:
            return goes_on
        told = torch.tensor(goes_on or [False] * self._num_rows, dtype=torch.uint8, device=self.device)
        return [bool(x) for x in group.broadcast(told, src=0).tolist()]

    def _seen(self) -> list[Seen]:
        return [
            Seen(
                state=state,
                num_context=n,
                num_drafted=drafted,
                num_sampled=sampled,
                ends=ends,
                is_greedy=_is_greedy(state),
                sampling=_sampling(state),
            )
            for (state, n, ends), drafted, sampled in zip(self._batch, self._num_drafted, self._num_sampled, strict=True)
        ]


def _is_greedy(state: Any) -> bool:
    """Whether a request takes argmaxes: vLLM does below a temperature of 1e-5."""
    return getattr(state.sampling_params, "temperature", 1.0) < 1e-5


def _sampling(state: Any) -> tuple[Any, ...]:
    """What tells requests that sample alike."""
    return tuple(getattr(state.sampling_params, name, None) for name in ("temperature", "top_p", "top_k", "min_p"))


def _ends(state: Any) -> tuple[int, ...]:
    """The tokens after which nothing can follow in a request."""
    return tuple(getattr(state.sampling_params, "all_stop_token_ids", ()))
