"""Where greedy speculative decoding in bfloat16 leaves the target's own greedy text, and how close the call was.

    python benchmarks/bf16_flips.py [--backend eager] [--out benchmarks/results/bf16_flips.json]

Verifying several rows at once steps differently from one row at a time, so a tie may break differently. For each answer
the first differing token is a flip; its gap is the distance of the two largest logits of the target there, computed in
float32 from the same bfloat16 weights, and in bfloat16 units in the last place of the larger one.
"""

import argparse
import json
import math
from pathlib import Path

import torch

import specdecpp as sd
from specdecpp.decoder import encode
from specdecpp.testing import practice_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--backend", default="eager", help="native sums in float32, and has no flips")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pair, wide = sd.load_pair(dtype="bfloat16", backend=args.backend), sd.load_pair()
    own = sd.Decoder(pair, policy=sd.Fixed(k=0))
    speculative = sd.Decoder(pair, policy=sd.Fixed(k=4))
    prompts = [[{"role": "user", "content": text}] for text in practice_prompts()]
    flips = []
    for i, prompt in enumerate(prompts):
        a, b = (d.generate(prompt, max_tokens=args.max_tokens, temperature=0).tokens for d in (own, speculative))
        at = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if at is not None:
            logits, _ = wide.target.new_cache().extend(encode(pair, prompt) + list(a[:at]), rows=1)
            first, second = logits[0].topk(2).values.tolist()
            unit = 2.0 ** (math.floor(math.log2(abs(first))) - 7)
            flips.append(
                {"prompt": i, "token": at, "gap": round(first - second, 5), "gap_in_ulp": round((first - second) / unit, 2)}
            )
    tokens = len(prompts) * args.max_tokens
    worst = max((f["gap_in_ulp"] for f in flips), default=0)
    print(f"{len(flips)} of {len(prompts)} answers of up to {args.max_tokens} tokens flip; widest gap {worst} ulp of bfloat16")
    if args.out:
        result = {
            "command": f"python benchmarks/bf16_flips.py --backend {args.backend}",
            "torch": torch.__version__,
            "tokens_at_most": tokens,
            "flips": flips,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
