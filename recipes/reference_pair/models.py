"""The two shapes of the reference pair, and the optimiser both are trained with."""

import math

import torch
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT = 1024
TARGET = {"num_hidden_layers": 14, "intermediate_size": 640}
DRAFT = {"num_hidden_layers": 2, "intermediate_size": 320}


def build(shape: dict[str, int], *, vocabulary: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **shape,
    )
    # Materialised attention scores are faster than the fused kernel here: torch's CPU flash backward is slow.
    config._attn_implementation = "eager"
    return LlamaForCausalLM(config)


def mixed_precision() -> torch.autocast:
    """bfloat16 where the CPU has AMX tiles for it; elsewhere float32, which is then the faster one (LOG.md)."""
    has_tiles = bool(torch.cpu.get_capabilities().get("amx_bf16", False))
    return torch.autocast("cpu", torch.bfloat16, enabled=has_tiles)


class Optimiser:
    """Muon for the matrices inside the blocks, AdamW for embeddings and norms; one warm-up and cosine for both."""

    def __init__(self, model: LlamaForCausalLM, *, steps: int, lr_matrix: float, lr_rest: float, warmup: int = 60):
        matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in n]
        rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed_tokens" in n]
        self.parts = [
            torch.optim.Muon(matrices, lr=lr_matrix, momentum=0.95, weight_decay=0.05),
            torch.optim.AdamW(rest, lr=lr_rest, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(
                part,
                lambda s: min((s + 1) / warmup, 1.0) * (0.05 + 0.95 * (1 + math.cos(math.pi * min(s / steps, 1))) / 2),
            )
            for part in self.parts
        ]

    def step(self) -> None:
        for part, schedule in zip(self.parts, self.schedules, strict=True):
            part.step()
            part.zero_grad(set_to_none=True)
            schedule.step()
