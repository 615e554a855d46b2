"""A world for our speculator of vLLM's second model runner on a CPU: its classes, without its kernels.

The speculator is the real one, on vLLM's own base classes. What needs a GPU has its meaning in torch here: the slots of tokens
(`BlockTables`), the batch (`InputBatch`) and the request states. The draft is a network of this library that is asked for whole
contexts: its cache holds, at every slot, the token that was written there and what stood before it, so that a token that was
not read, or read behind other tokens, is noticed at once. The world plays scheduler and target: greedy verification.
"""

from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from test_vllm_plugin import configuration
from torch import nn

BLOCK, NUM_BLOCKS = 4, 512


class Blocks:
    """`BlockTables` with one cache group."""

    num_kv_cache_groups, cp_size = 1, 1

    def __init__(self, max_num_reqs: int, max_model_len: int, max_num_tokens: int):
        self.by_slot = torch.zeros(max_num_reqs, -(-max_model_len // BLOCK), dtype=torch.int32)
        self.input_block_tables = [torch.zeros_like(self.by_slot)]
        self.slot_mappings = torch.full((1, max_num_tokens), -1)

    def gather(self, idx_mapping: torch.Tensor) -> None:
        self.input_block_tables[0][: len(idx_mapping)] = self.by_slot[idx_mapping]

    def compute_slot_mappings(self, idx_mapping: Any, starts: Any, positions: Any, num_tokens: int, out: Any = None) -> Any:
        out = self.slot_mappings if out is None else out
        out.fill_(-1)
        for row, slot in enumerate(idx_mapping.tolist()):
            for i in range(int(starts[row]), int(starts[row + 1])):
                place = int(positions[i])
                out[0, i] = -1 if slot < 0 else int(self.by_slot[slot, place // BLOCK]) * BLOCK + place % BLOCK
        return out[:, :num_tokens]


class ContextDraft(nn.Module):
    """Logits of `network` for the context that the cache holds; `passes` lists how many tokens each request read in each."""

    def __init__(self, network: Any):
        super().__init__()
        self.network = network
        self.cache: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.passes: list[list[int]] = []
        self.context: Any = None

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        at, maps = self.context
        rows = torch.zeros(len(input_ids), self.network.num_ids)
        starts = at.query_start_loc.tolist()
        self.passes.append([sum(int(slot) >= 0 for slot in maps[a:b]) for a, b in pairwise(starts)])
        for row, (begin, end) in enumerate(pairwise(starts)):
            for i in range(begin, end):
                if (slot := int(maps[i])) < 0:
                    continue
                place = int(positions[i])
                assert int(at.seq_lens[row]) - (end - 1 - i) == place + 1, "a token sees the keys up to its own place"
                before = self._before(at.block_table[row], place)
                self.cache[slot] = int(input_ids[i]), before
                rows[i] = self.network((*before, int(input_ids[i])))
        return rows

    def _before(self, blocks: torch.Tensor, place: int) -> tuple[int, ...]:
        """The tokens before `place` as the cache has them, each of which must have been read behind the others."""
        tokens: tuple[int, ...] = ()
        for p in range(place):
            token, before = self.cache[int(blocks[p // BLOCK]) * BLOCK + p % BLOCK]
            assert before == tokens, f"place {p} was read behind other tokens"
            tokens += (token,)
        return tokens

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class Recorded:
    """A graph manager: passes over a number of requests that is padded to a power of two, with metadata made once.

    What a graph holds are the addresses of buffers, so the pass must find all it reads there.
    """

    def __init__(self, speculator: Any, run: Any, width: int):
        self._speculator, self._run, self._width = speculator, run, width

    def dispatch(self, num_reqs: int, num_tokens: int, uniform_token_count: int, num_active_loras: int) -> Any:
        from vllm.config.compilation import CUDAGraphMode
        from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

        assert (num_tokens, uniform_token_count) == (num_reqs * self._width, self._width)
        padded = 1 << (num_reqs - 1).bit_length()
        return BatchExecutionDescriptor(cg_mode=CUDAGraphMode.FULL, num_tokens=padded * self._width, num_reqs=padded)

    def specialize_spec_tokens(self, chosen: Any, length: int) -> Any:
        from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorBatchDescriptor

        return SpeculatorBatchDescriptor(**vars(chosen), num_speculative_tokens=length)

    def run_fullgraph(self, chosen: Any) -> None:
        num, buffers, tables = chosen.num_reqs, self._speculator.input_buffers, self._speculator.block_tables
        metadata = SimpleNamespace(
            query_start_loc=buffers.query_start_loc[: num + 1],
            seq_lens=buffers.seq_lens[:num],
            block_table=tables.input_block_tables[0][:num],
        )
        length = getattr(chosen, "num_speculative_tokens", 1)
        self._run(num, chosen.num_tokens, metadata, tables.slot_mappings[0], None, None, num_speculative_steps=length)


@dataclass
class Request:
    slot: int
    tokens: list[int]
    num_prompt: int
    num_computed: int = 0
    draft: list[int] = field(default_factory=list)
    num_slots: int = 0
    steps: list[tuple[int, int]] = field(default_factory=list)


class World:
    """Requests that one speculator drafts for."""

    def __init__(self, network: Any, target: Any, *, ours: dict[str, Any], most: int = 4, max_num_reqs: int = 4, **sizes: Any):
        from vllm.v1.worker.gpu.spec_decode import speculator as base
        from vllm.v1.worker.gpu.spec_decode.standalone_ar import speculator as standalone

        from specdecpp.integrations.vllm import speculator as ours_of

        self.target, self.most = target, most
        max_model_len, max_num_tokens = sizes.get("max_model_len", 64), sizes.get("max_num_tokens", 64)
        self.draft = ContextDraft(network)
        base._target_feeds_hc_residual = lambda config: False
        base.build_attn_metadata = self._metadata
        standalone.set_forward_context = self._in_context
        ours_of.build_slot_mappings_by_layer = lambda maps, config: maps[0]
        self.states = SimpleNamespace(
            total_len=SimpleNamespace(gpu=torch.zeros(max_num_reqs, dtype=torch.int32)),
            all_token_ids=SimpleNamespace(gpu=torch.zeros(max_num_reqs, max_model_len, dtype=torch.int32)),
        )
        model = SimpleNamespace(
            model="none", dtype=torch.float32, head_dtype=torch.float32, use_fp64_gumbel=False, max_model_len=max_model_len,
            hf_config=SimpleNamespace(), get_hidden_size=lambda: network.num_ids, get_vocab_size=lambda: network.num_ids,
        )  # fmt: skip
        config = configuration(
            additional_config={"specdecpp": ours},
            model_config=model,
            speculative_config__draft_model_config=model,
            speculative_config__num_speculative_tokens=most,
            speculative_config__draft_sample_method="probabilistic" if sizes.get("draws") else "greedy",
            scheduler_config__max_num_seqs=max_num_reqs,
            scheduler_config__max_num_batched_tokens=max_num_tokens,
        )
        self.speculator = ours_of.AdaptiveSpeculator(config, torch.device("cpu"), self.states)
        self.speculator.model = self.draft
        self.speculator.block_tables = Blocks(max_num_reqs, max_model_len, max_num_tokens + max_num_reqs)
        self.speculator.kv_cache_config = None
        self.speculator.attn_groups = []
        self.speculator.expanded_slot_mappings = torch.zeros(1, max_num_tokens + max_num_reqs, dtype=torch.int64)
        if sizes.get("graphs"):
            self.speculator._first_graphs = Recorded(self.speculator, self.speculator._first, ours_of.FIRST)
            self.speculator._rest_graphs = Recorded(self.speculator, self.speculator._rest, 1)
        self.temperature, self.seeds = torch.zeros(max_num_reqs), torch.zeros(max_num_reqs, dtype=torch.int64)
        self.requests: dict[str, Request] = {}
        self._free = list(range(max_num_reqs))
        self._next_block = 1

    def _metadata(self, **given: Any) -> Any:
        return SimpleNamespace(
            query_start_loc=given["query_start_loc_gpu"],
            seq_lens=given["seq_lens"],
            block_table=given["block_tables"][0],
        )

    @contextmanager
    def _in_context(self, metadata: Any, config: Any, *, slot_mapping: Any, **_: Any) -> Any:
        self.draft.context = metadata, slot_mapping
        yield

    def add(self, name: str, prompt: list[int]) -> None:
        slot = self._free.pop()
        self.requests[name] = Request(slot, list(prompt), len(prompt))
        blocks = self.speculator.block_tables.by_slot
        blocks[slot] = torch.arange(self._next_block, self._next_block + blocks.shape[1])
        self._next_block += blocks.shape[1]
        self.states.total_len.gpu[slot] = len(prompt)
        self.states.all_token_ids.gpu[slot, : len(prompt)] = torch.tensor(prompt)

    def remove(self, name: str) -> None:
        self._free.append(self.requests.pop(name).slot)

    def verify(self, request: Request, draft: list[int]) -> list[int]:
        """The tokens that come out, the draft's and one of the target's: greedy."""
        new: list[int] = []
        for token in [*draft, -1]:
            new.append(int(self.target((*request.tokens, *new)).argmax()))
            if new[-1] != token:
                break
        return new

    def step(self, length: int, chunk: int = 64) -> None:
        """One step of all requests: prompts are read by chunks, others verified; then up to `length` tokens are drafted."""
        rows = list(self.requests.values())
        prefilling, computed, scheduled, upper, sampled = [], [], [], [], []
        for r in rows:
            is_prefilling = r.num_computed < r.num_prompt
            num = min(chunk, r.num_prompt - r.num_computed) if is_prefilling else 1 + r.num_slots
            prefilling.append(is_prefilling)
            computed.append(min(r.num_computed, r.num_prompt))
            scheduled.append(num)
            upper.append(num + (computed[-1] if is_prefilling else len(r.tokens)))
            if is_prefilling and r.num_computed + num < r.num_prompt:
                r.num_computed += num
                sampled.append(0)
                continue
            slots = [] if is_prefilling else r.draft[: r.num_slots]
            new = self.verify(r, slots)
            if slots:
                r.steps.append((sum(t >= 0 for t in slots), len(new) - 1))
            r.tokens += new
            r.num_computed = len(r.tokens) - 1
            sampled.append(len(new))
            self.states.total_len.gpu[r.slot] = len(r.tokens)
            self.states.all_token_ids.gpu[r.slot, : len(r.tokens)] = torch.tensor(r.tokens)
        slots = np.array([r.slot for r in rows])
        batch = SimpleNamespace(
            num_reqs=len(rows),
            idx_mapping=torch.tensor(slots),
            idx_mapping_np=slots,
            num_scheduled_tokens=np.array(scheduled, dtype=np.int32),
            is_prefilling_np=np.array(prefilling),
            num_computed_prefill_tokens_np=np.array(computed, dtype=np.int32),
            prefill_len_np=np.array([r.num_prompt for r in rows], dtype=np.int32),
            seq_lens_cpu_upper_bound=torch.tensor(upper, dtype=torch.int32),
        )
        self.speculator.block_tables.gather(batch.idx_mapping)
        none = torch.zeros(0)
        found = self.speculator.propose(
            batch, {}, {}, none, None, torch.tensor(sampled), torch.zeros(len(rows)), none, none,
            self.temperature, self.seeds, num_speculative_tokens=length,
        )  # fmt: skip
        for i, (r, row, p, s) in enumerate(zip(rows, found.tolist(), prefilling, sampled, strict=True)):
            r.draft = row
            r.num_slots = self.admitted(r, i, length) if s or not p else 0

    def admitted(self, request: Request, row: int, length: int) -> int:
        """How many places of a request's draft are verified in the next step."""
        return length
