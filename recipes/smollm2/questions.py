"""Prompts that the target writes itself: what it expects a user to ask, sampled where its chat template opens a user's message.

    python questions.py SmolLM2-135M-Instruct.Q4_1.gguf --num 8000 --out questions.jsonl

A model that was trained on conversations knows their first half too (Xu et al., "Magpie", 2024), so its own questions are of
the kinds that it was taught, without anybody's data. Questions that did not end, are very short or came twice are left out.
"""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

from specdecpp.distillation.target import Target
from specdecpp.distillation.text import answered
from specdecpp.sampling import Sampling

BATCH = 256
LEAST = 3
"""Words of a question."""


def questions(target: Target, *, max_tokens: int, sampling: Sampling, seed: int) -> Iterator[str]:
    """Without end, in an order of the seed's."""
    tokenizer = target.tokenizer
    opened = tokenizer.apply_chat_template([{"role": "user", "content": "\0"}], tokenize=False).split("\0")[0]
    prefix = tokenizer(opened, add_special_tokens=False)["input_ids"]
    seen: set[str] = set()
    batch = 0
    while True:
        for piece in answered(target, [prefix] * BATCH, sampling, max_tokens=max_tokens, layer=0, seed=(seed, 3, batch)):
            *asked, last = piece.ids[piece.num_prompt :].tolist()
            text = tokenizer.decode(asked).strip()
            if last in target.ends and len(text.split()) >= LEAST and text not in seen:
                seen.add(text)
                yield text
        batch += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="the target's file")
    parser.add_argument("--num", type=int, default=8000, help="questions (default: 8000)")
    parser.add_argument("--max-tokens", type=int, default=160, help="the most tokens of one (default: 160)")
    parser.add_argument("--temperature", type=float, default=1.0, help="default: 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="a .jsonl file")
    args = parser.parse_args()
    sampling = Sampling(temperature=args.temperature)
    asked = questions(Target(args.target), max_tokens=args.max_tokens, sampling=sampling, seed=args.seed)
    part = args.out.with_suffix(".part")
    with part.open("w", encoding="utf-8") as file:
        for _ in range(args.num):
            file.write(json.dumps({"source": "own", "text": next(asked)}) + "\n")
    os.replace(part, args.out)
    print(f"{args.out}: {args.num:,} questions")


if __name__ == "__main__":
    main()
