"""What a draft loses that reads only the end of a prompt: acceptance along the target's greedy answers.

    python benchmarks/reading.py --target FILE --draft FILE --data FOLDER [--prompts 4] [--out benchmarks/results/reading.json]

The two files of real_pair.py, and its five kinds of prompts. The target answers greedily, 64 tokens; the draft reads the last N
tokens of the prompt and then the answer. Greedy: the share of tokens that are the draft's argmax too. At 0.7: the mean of
sum min(p, q) along the same text. Counts, no times: other work on the machine changes nothing.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from peers.environments import ROOT
from peers.provenance import provenance
from realpair.files import DRAFT, TARGET
from realpair.prompts import prompts

from specdecpp.backends import Cache
from specdecpp.loading.gguf import GGUF

TOKENS, TAILS, TEMPERATURE = 64, (8, 32, 64, 128, 256, None), 0.7


def answered(target: Cache, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """The prompt with the target's greedy answer behind it, and the logits [TOKENS, V] of the answer."""
    text, rows, new = list(prompt), [], prompt
    for _ in range(TOKENS):
        rows.append(target.extend(new, rows=1)[0][-1])
        new = [int(rows[-1].argmax())]
        text += new
    return text, torch.stack(rows)


def along(draft: Cache, text: list[int], logits: torch.Tensor, tail: int | None) -> tuple[float, float]:
    """Tokens that are the draft's argmax too, and the sum of the overlaps of p and q."""
    begin = 0 if tail is None else max(0, len(text) - TOKENS - tail)
    own, _ = draft.extend(text[begin:-1], rows=TOKENS)
    p, q = ((x / TEMPERATURE).softmax(-1) for x in (logits, own))
    return float((own.argmax(-1) == torch.tensor(text[-TOKENS:])).sum()), float(torch.minimum(p, q).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "draft", "data"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/reading.json")
    args = parser.parse_args()
    models = [GGUF(part.checked(path)) for part, path in ((TARGET, args.target), (DRAFT, args.draft))]
    target, draft = (m.backend("native", vocab_size=min(m.num_rows for m in models)) for m in models)
    tokenizer, rows = models[0].tokenizer(), []
    for kind, texts in prompts(args.data, args.prompts).items():
        sums = {tail: [0.0, 0.0] for tail in TAILS}
        lengths = []
        for messages in texts:
            rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            prompt = list(tokenizer(rendered, add_special_tokens=False).input_ids)
            lengths.append(len(prompt))
            text, logits = answered(target.new_cache(), prompt)
            for tail in TAILS:
                sums[tail] = [a + b for a, b in zip(sums[tail], along(draft.new_cache(), text, logits, tail), strict=True)]
        num = TOKENS * len(texts)
        row: dict[str, Any] = {"kind": kind, "prompt_tokens": sorted(lengths)}
        for i, name in enumerate(("greedy", "at_0.7")):
            row[name] = {"all" if tail is None else str(tail): round(sums[tail][i] / num, 3) for tail in TAILS}
        rows.append(row)
        print(json.dumps(row), flush=True)
    found = {"rows": rows, "tokens": TOKENS, "prompts": args.prompts, **provenance("python", "benchmarks/reading.py")}
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
