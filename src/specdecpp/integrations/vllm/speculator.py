"""The standalone draft in vLLM's second model runner, with CUDA graphs: `StandaloneARSpeculator` as its eagle speculators run.

vLLM's own graph manager records the passes of a step for every batch size, the last ones as one graph for each length that the
scheduler chooses from, so that the host launches two graphs a step:

    catch up (eager, only where tokens are unread) -> first (graph, two tokens a request) -> rest (graph, one pass a token)

Two tokens are enough: the draft has read what it drafted, so after a verification it lacks the token that was sampled and, if
all were accepted, the last draft token. The pass does not depend on how many tokens were verified, as vLLM's own does.

A step of length 0 does nothing: no pass, no copy, no wait. What the draft then lacks, prompts included, it reads before it
drafts again; the host counts those tokens from above, and places before the first token are padding.

The scheduler (`scheduler.AdaptiveScheduler`) chooses the length before the step, for the whole batch. A threshold may end a
step earlier (`stopping`): the further passes are then launched one by one, and left out where no request wants them.
Draft tokens that were drawn are all verified, and a place without one holds -1, which vLLM's rejection sampler never accepts
and takes as the end (the next token is then the target's own), so the output keeps the target's distribution.

With `enable_adaptive_verification` vLLM leaves out the draft tokens of a batch whose survival is not worth their rows, places
without a token among them. Its estimate does not read the token that was drawn, so that is lossless too.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode  # pyright: ignore[reportMissingImports]
from vllm.utils.torch_utils import async_tensor_h2d  # pyright: ignore[reportMissingImports]
from vllm.v1.kv_cache_interface import FullAttentionSpec  # pyright: ignore[reportMissingImports]
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer  # pyright: ignore[reportMissingImports]
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor  # pyright: ignore[reportMissingImports]
from vllm.v1.worker.gpu.spec_decode import init_speculator as vllm_init_speculator  # pyright: ignore[reportMissingImports]
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import (  # pyright: ignore[reportMissingImports]
    StandaloneARSpeculator,
)
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import (  # pyright: ignore[reportMissingImports]
    SpeculatorCudaGraphManager,
)

from specdecpp.errors import BackendError
from specdecpp.integrations.vllm.configuring import logger, policy_of
from specdecpp.integrations.vllm.stopping import StopRule, stop_rule

FIRST = 2
"""Tokens of each request that the first pass of a step reads."""
ALL = 1 << 30
"""Unread tokens of a request that has just come: as many as it has."""
PAD = -1
"""A request of no meaning, and a slot that is not written."""


class AdaptiveSpeculator(StandaloneARSpeculator):
    """Drafts as long as the scheduler says, by graphs, and reads what it has missed only when it drafts."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any):
        super().__init__(vllm_config, device)
        self._states = req_states
        self._first_graphs: Any = None
        self._rest_graphs: Any = None
        self._unread = np.full(self.max_num_reqs, ALL, dtype=np.int64)
        places = torch.arange(self.max_num_reqs + 1, dtype=torch.int32, device=device)
        self._starts = {width: width * places for width in (1, FIRST)}
        self._logits: Tensor | None = None
        asked = policy_of(vllm_config)
        rule = None if asked is None else stop_rule(asked, self.num_speculative_steps)
        self._rule = None if rule is None else StopRule(rule, self.max_num_reqs, self.num_speculative_steps, device)

    def set_attn(
        self,
        model_state: Any,
        kv_cache_config: Any,
        block_tables: Any,
        target_input_buffers: Any,
        target_attn_groups: Any,
    ) -> None:
        super().set_attn(model_state, kv_cache_config, block_tables, target_input_buffers, target_attn_groups)
        self.check_attention()

    def check_attention(self) -> None:
        """Raise `BackendError` unless all of a text stays in the draft's cache: what was missed is read and written late."""
        kinds = {type(group.kv_cache_spec) for groups in self.attn_groups for group in groups}
        if unfit := sorted(kind.__name__ for kind in kinds if not issubclass(kind, FullAttentionSpec)):
            raise BackendError(f"specdecpp drafts with full attention only, and this draft's cache is {', '.join(unfit)}.")

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Graphs for decoding batches, if the target has them and the attention's metadata can be renewed inside of them."""
        is_full = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL and self.supports_decode_metadata_update
        mode = CUDAGraphMode.FULL_DECODE_ONLY if is_full else CUDAGraphMode.NONE
        self._first_graphs, self._rest_graphs = (
            SpeculatorCudaGraphManager(self.vllm_config, self.device, mode, decode_query_len=width) for width in (FIRST, 1)
        )

    def capture(self) -> None:
        self.idx_mapping.fill_(PAD)
        parts = ((self._first_graphs, self._first, "first pass"), (self._rest_graphs, self._rest, "further passes"))
        for graphs, run, name in parts if self.num_speculative_steps > 1 else parts[:1]:
            graphs.capture(
                run,
                self.model_state,
                self.input_buffers,
                self.block_tables,
                self.attn_groups,
                self.kv_cache_config,
                progress_bar_desc=f"Capturing the {name} of drafting",
                specialize_spec_tokens=graphs is self._rest_graphs and self._has_lengths,
            )
        logger.info("specdecpp drafts by %d + %d CUDA graphs", len(self._first_graphs.graphs), len(self._rest_graphs.graphs))

    @property
    def _has_lengths(self) -> bool:
        """True where each length has a graph; a step that a threshold may end has one for a single pass."""
        return self._rule is None and self.speculative_config.uses_dynamic_speculative_decoding()

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> Tensor:
        """Draft tokens of a batch, [requests, most of a step]; -1 where there is none."""
        if dummy_run and skip_attn_for_dummy_run:  # memory is measured, and there is no cache yet
            return super().propose(
                input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled, num_rejected,
                last_sampled, next_prefill_tokens, temperature, seeds, dp_sync_state, dummy_run, skip_attn_for_dummy_run,
            )  # fmt: skip
        num = input_batch.num_reqs
        length = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        tokens = self.draft_tokens[:num]
        unread = None if dummy_run else self._count_unread(input_batch, drafts=length > 0)
        if not length:
            return tokens.fill_(PAD)
        self._copy_request_inputs(num, input_batch.idx_mapping, temperature, seeds)
        if dummy_run:
            self.idx_mapping.fill_(PAD)
        elif unread is not None:
            if (reading := _reading(input_batch)).any():  # prompts that go on in the next step: nothing is drafted
                self.idx_mapping[:num].masked_fill_(async_tensor_h2d(reading, device=self.device), PAD)
            if unread.any():
                self._catch_up(input_batch, unread)
        if self._rule is not None:
            self._rule.start()
        num_drawn = 1
        for group in (group for groups in self.attn_groups for group in groups):
            group.map_to_kernel_block_table(self.block_tables.input_block_tables[group.kv_cache_group_id])
        self._launch(self._first_graphs, self._first, FIRST, num, eager=is_profile)
        while num_drawn < length and not (self._rule is not None and self._rule.ends(num_drawn)):
            further = 1 if self._rule is not None else length - 1
            self._launch(self._rest_graphs, self._rest, 1, num, eager=is_profile, length=1 + further)
            num_drawn += further
        tokens[:, num_drawn:] = PAD
        if self.acceptance_estimator is not None:
            self.draft_token_confidence_probs[:num, num_drawn:] = 0
        return tokens

    def _count_unread(self, batch: Any, *, drafts: bool) -> np.ndarray | None:
        """Tokens before a request's last two that the draft has not read, or more; where to count from. None if it lacks none.

        `_unread` is 0 after a step with draft tokens: then nothing is missing but what the first pass reads anyway.
        """
        slots, num = batch.idx_mapping_np[: batch.num_reqs], batch.num_reqs
        if drafts and not batch.is_prefilling_np[:num].any() and not self._unread[slots].any():
            return None
        since = np.where(self._unread[slots] > 0, self._unread[slots] + batch.num_scheduled_tokens[:num], FIRST)
        unread = np.where(batch.is_prefilling_np[:num], ALL, since)
        reading = _reading(batch)
        self._unread[slots] = 0 if drafts else unread
        length = batch.seq_lens_cpu_upper_bound[:num].numpy() + 1
        return np.where(reading, 0, np.maximum(np.minimum(unread, length) - FIRST, 0))

    def _catch_up(self, batch: Any, unread: np.ndarray) -> None:
        """Read the tokens before the last two, oldest first, in passes of at most `max_num_tokens`."""
        num, left = batch.num_reqs, unread.astype(np.int64)
        slots = self.idx_mapping[:num]
        last = self._states.total_len.gpu[slots.clamp(min=0)] - 1
        while left.any():
            now = np.minimum(left, np.maximum(0, self.max_num_tokens - np.concatenate(([0], np.cumsum(left)[:-1]))))
            ends = np.concatenate(([0], np.cumsum(now))).astype(np.int32)
            total = int(ends[-1])
            rows = np.repeat(np.arange(num), now)
            back = left[rows] + 1 - (np.arange(total) - ends[rows])  # places before the last token
            rows, back = (async_tensor_h2d(x.astype(np.int64), device=self.device) for x in (rows, back))
            places = last[rows] - back
            positions = places.clamp(min=0, max=self.max_model_len - 1)
            ids = self._states.all_token_ids.gpu[slots[rows].clamp(min=0), positions].int()
            starts = async_tensor_h2d(ends, out=self.input_buffers.query_start_loc[: num + 1])
            end = last - 1 - async_tensor_h2d(left - now, device=self.device)
            self.input_buffers.seq_lens[:num].copy_(end.masked_fill(slots < 0, FIRST).clamp(min=1))
            maps = self.block_tables.compute_slot_mappings(slots, starts, positions, total, out=self.expanded_slot_mappings)
            maps = maps.masked_fill(places < 0, PAD)
            description = BatchExecutionDescriptor(cg_mode=CUDAGraphMode.NONE, num_tokens=total, num_reqs=num)
            metadata = self._build_attn_metadata(
                num, description, ends, batch.seq_lens_cpu_upper_bound, step=0, slot_mappings=maps
            )
            self._run_model(ids, positions, metadata, build_slot_mappings_by_layer(maps, self.kv_cache_config), None)
            left = left - now

    def _launch(self, graphs: Any, run: Any, width: int, num: int, *, eager: bool, length: int = 1) -> None:
        """Passes of `width` tokens a request, by a graph where there is one; the rest of a step of that length is one."""
        torch.clamp(self._starts[width], max=width * num, out=self.input_buffers.query_start_loc)
        if not eager and graphs is not None:
            chosen = graphs.dispatch(num, width * num, width, 0)
            if width == 1 and self._has_lengths:
                chosen = graphs.specialize_spec_tokens(chosen, length)
            if chosen.cg_mode == CUDAGraphMode.FULL:
                graphs.run_fullgraph(chosen)
                return
        run(num, width * num, num_speculative_steps=length)

    def _first(
        self, num: int, num_tokens: int, attn_metadata: Any = None, slot_mappings: Any = None, *_: Any, **__: Any
    ) -> None:
        """The pass over the last two tokens of each request, and its draft token."""
        slots = self.idx_mapping[:num]
        known = slots.clamp(min=0)
        last = self._states.total_len.gpu[known].long() - 1
        places = torch.stack((last - 1, last), -1).clamp(min=0, max=self.max_model_len - 1)
        buffers = self.input_buffers
        buffers.positions[:num_tokens].copy_(places.view(-1))
        buffers.input_ids[:num_tokens].copy_(self._states.all_token_ids.gpu[known.unsqueeze(-1), places].view(-1))
        buffers.seq_lens[:num].copy_((last + 1).clamp(max=self.max_model_len).masked_fill(slots < 0, FIRST))
        self.current_draft_step.zero_()
        hidden = self._pass(num, num_tokens, FIRST, attn_metadata, slot_mappings)
        self._draw(num, hidden[FIRST - 1 : num_tokens : FIRST], places[:, 1])

    def _rest(
        self,
        num: int,
        num_tokens: int,
        attn_metadata: Any = None,
        slot_mappings: Any = None,
        *_: Any,
        num_speculative_steps: int,
    ) -> None:
        """The passes over the draft token of each request, and the next ones."""
        for _step in range(1, 2 if self._rule is not None else num_speculative_steps):
            hidden = self._pass(num, num_tokens, 1, attn_metadata, slot_mappings)
            self._draw(num, hidden[:num], self.input_buffers.positions[:num])

    def _pass(self, num: int, num_tokens: int, width: int, attn_metadata: Any, slot_mappings: Any) -> Tensor:
        """Hidden states of the tokens in the buffers. Without metadata, that of a graph being recorded, it is built here."""
        buffers = self.input_buffers
        slots, starts = self.idx_mapping[:num], buffers.query_start_loc[: num + 1]
        maps = self.block_tables.compute_slot_mappings(slots, starts, buffers.positions[:num_tokens], num_tokens)
        if attn_metadata is None:
            slot_mappings = build_slot_mappings_by_layer(maps, self.kv_cache_config)
            description = BatchExecutionDescriptor(
                cg_mode=CUDAGraphMode.NONE, num_tokens=num_tokens, num_reqs=num, uniform_token_count=width
            )
            longest = torch.full((num,), self.max_model_len, dtype=torch.int32)
            attn_metadata = self._build_uniform_attn_metadata(description, num, width, longest, step=0)
        else:
            self._update_draft_decode_metadata(attn_metadata, num)
        return self._run_model(
            buffers.input_ids[:num_tokens], buffers.positions[:num_tokens], attn_metadata, slot_mappings, None
        )

    def _draw(self, num: int, hidden: Tensor, positions: Tensor) -> None:
        """Draw a token of each request, and put it where the next pass reads it."""
        slots, step, buffers = self.idx_mapping[:num], self.current_draft_step, self.input_buffers
        tokens = self.sample_draft(hidden, positions, slots, self.temperature, self.seeds, step, self.draft_logits)
        self.draft_tokens[:num].index_copy_(1, step.view(1), tokens.long().unsqueeze(-1))
        if self._rule is not None:
            assert self._logits is not None
            self._rule.judge(self._logits, tokens, step, self.temperature[slots.clamp(min=0)], slots >= 0)
        step.add_(1).remainder_(self.num_speculative_steps)
        buffers.input_ids[:num].copy_(tokens)
        buffers.positions[:num].copy_((positions + 1).clamp(max=self.max_model_len - 1))
        buffers.seq_lens[:num].add_(1).clamp_(max=self.max_model_len)

    def _maybe_predict_acceptance(self, logits: Tensor, *args: Any) -> None:
        self._logits = logits if self._rule is not None else None
        super()._maybe_predict_acceptance(logits, *args)


def _reading(batch: Any) -> np.ndarray:
    """Requests whose prompt is not read to its end by this step."""
    num = batch.num_reqs
    read = batch.num_computed_prefill_tokens_np[:num] + batch.num_scheduled_tokens[:num]
    return batch.is_prefilling_np[:num] & (read < batch.prefill_len_np[:num])


def init_speculator(vllm_config: Any, device: torch.device, req_states: Any) -> Any:
    """Makes the speculator, in place of vLLM's own function, which still makes those of other methods than a draft model."""
    if not vllm_config.speculative_config.uses_draft_model() or policy_of(vllm_config) is None:
        return vllm_init_speculator(vllm_config, device, req_states)
    return AdaptiveSpeculator(vllm_config, device, req_states)
