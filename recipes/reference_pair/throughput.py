"""Training throughput of the target's shape on this machine: attention kernel x precision x row length.

    python throughput.py [--layers 10] [--steps 5]

One compiled forward and backward over 4,096 tokens of noise at a time, medians after warm-up. Nothing else should run.
"""

import argparse
import itertools
import statistics
import time

import torch
import torch.nn.functional as F
from models import TARGET, build

TOKENS, VOCABULARY = 4096, 4096


def tokens_per_second(layers: int, attention: str, dtype: torch.dtype, length: int, steps: int) -> float:
    """Of one configuration; bfloat16 is autocast over float32 weights."""
    torch.compiler.reset()
    model = build(TARGET | {"num_hidden_layers": layers}, vocabulary=VOCABULARY, seed=0)
    model.config._attn_implementation = attention
    compiled, seconds = torch.compile(model, dynamic=False), []
    ids = torch.randint(VOCABULARY, (TOKENS // length, length))
    for step in range(steps + 2):
        started = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits = compiled(input_ids=ids, use_cache=False).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        if step >= 2:
            seconds.append(time.perf_counter() - started)
    return TOKENS / statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    has_tiles = torch.cpu.get_capabilities().get("amx_bf16", False)
    print(f"{args.layers} layers, {torch.get_num_threads()} threads, AMX {'yes' if has_tiles else 'no'}; tokens/s")
    for length, attention, dtype in itertools.product((256, 512), ("sdpa", "eager"), (torch.float32, torch.bfloat16)):
        rate = tokens_per_second(args.layers, attention, dtype, length, args.steps)
        print(f"T {length}  {attention:5}  {str(dtype).removeprefix('torch.'):8}  {rate:7.0f}", flush=True)


if __name__ == "__main__":
    main()
