"""A program: one round of vLLM's second model runner with our speculator, on a CPU. Each rank writes what came out, as JSON.

    torchrun --nproc-per-node 2 second_runner.py HEAD FOLDER        # FOLDER/0.json, FOLDER/1.json

The speculator is vLLM's own class with ours on top, made through the name that the runner looks up. The draft is a small
random network, and a dummy run leaves attention out, whose kernels need a GPU; everything else between the draft's hidden
states and the confidences is real.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

ROWS, STEPS, WIDTH, VOCABULARY = 3, 4, 8, 16
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class TableDraft(nn.Module):
    """A draft whose state depends on the last token only. Keeps the states it has been in."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.out.weight.data = self.table.weight.data.roll(-1, 0)  # likes the token before the last one best
        self.seen: list[torch.Tensor] = []

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.table(input_ids.long()) + 1e-3 * RANK
        self.seen.append(hidden)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.out(hidden)


def configuration(head: str) -> Any:
    """What the classes read of vLLM's."""
    model = SimpleNamespace(
        model="none",
        dtype=torch.float32,
        head_dtype=torch.float32,
        use_fp64_gumbel=False,
        max_model_len=64,
        hf_config=SimpleNamespace(),
        supports_multimodal_inputs=False,
        get_hidden_size=lambda: WIDTH,
        get_vocab_size=lambda: VOCABULARY,
    )
    return SimpleNamespace(
        additional_config={"specdecpp": {"head": head}},
        use_v2_model_runner=True,
        device_config=SimpleNamespace(device_type="cuda"),
        model_config=model,
        speculative_config=SimpleNamespace(
            method="draft_model",
            num_speculative_tokens=STEPS,
            draft_model_config=model,
            target_model_config=model,
            use_local_argmax_reduction=False,
            enable_adaptive_verification=True,
            draft_sample_method="greedy",
            uses_draft_model=lambda: True,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64),
        parallel_config=SimpleNamespace(data_parallel_size=1, data_parallel_rank=0, decode_context_parallel_size=1),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


def batch() -> Any:
    """Requests in slots 5, 2 and 7, two tokens each."""
    return SimpleNamespace(
        num_reqs=ROWS,
        num_tokens=2 * ROWS,
        input_ids=torch.arange(2 * ROWS),
        positions=torch.tensor([0, 1] * ROWS),
        query_start_loc=torch.arange(0, 2 * ROWS + 1, 2),
        seq_lens=torch.full((ROWS,), 2),
        idx_mapping=torch.tensor([5, 2, 7]),
        seq_lens_cpu_upper_bound=torch.full((ROWS,), 2),
    )


@contextmanager
def joined() -> Iterator[None]:
    """The ranks as vLLM has them."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    os.environ["VLLM_DIST_IDENT"] = os.environ["MASTER_PORT"]  # names the memory that ranks share on a CPU
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        parallel_state.init_distributed_environment(RANKS, RANK, "env://", RANK, "gloo")
        parallel_state.initialize_model_parallel(RANKS, backend="gloo")
        yield
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def main(head: str, folder: Path) -> None:
    from vllm.v1.worker.gpu.spec_decode import speculator as base
    from vllm.v1.worker.gpu.spec_decode.standalone_ar import speculator as standalone

    from specdecpp.integrations.vllm import routes

    torch.manual_seed(0)
    base._target_feeds_hc_residual = lambda config: False  # asks for the class of the target, and there is none
    standalone.StandaloneARSpeculator.load_draft_model = lambda self, *args: TableDraft()
    standalone.set_forward_context = lambda *args, **kwargs: nullcontext()  # attention's, which is left out
    config = configuration(head)
    route = routes.attach(config)
    from vllm.v1.worker.gpu import model_runner

    speculator = model_runner.init_speculator(config, torch.device("cpu"), None)
    speculator.load_model(nn.Linear(1, 1))
    none, zeros = torch.zeros(0), torch.zeros(ROWS, dtype=torch.int64)
    slots = torch.zeros(8), torch.zeros(8, dtype=torch.int64)
    options = {"dummy_run": True, "skip_attn_for_dummy_run": True}
    tokens = speculator.propose(batch(), {}, {}, none, None, zeros, zeros, zeros, zeros, *slots, **options)
    first, *others = speculator.model.seen
    states = torch.stack([first[1::2], *others], 1)  # the last token of each row, then one step after the other
    found = {
        "route": route.name,
        "estimates_online": speculator.acceptance_estimator is not None,
        "tokens": tokens.tolist(),
        "states": states.tolist(),
        "q": speculator.model.compute_logits(states).softmax(-1).tolist(),
        "confidences": speculator.draft_token_confidence_probs[:ROWS].tolist(),
    }
    (folder / f"{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    with torch.inference_mode(), joined():
        main(sys.argv[1], Path(sys.argv[2]))
