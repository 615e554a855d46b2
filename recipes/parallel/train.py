"""Parallel heads on the state of the reference pair's draft: trained on the target's own text, then set beside the draft alone.

    python train.py --prompts gsm8k_train.jsonl --prompt gsm8k --prompts dolly_2k.jsonl --prompt field:instruction \\
        --test gsm8k_test.jsonl --test-prompt gsm8k --test HumanEval.jsonl.gz --test-prompt humaneval --out ../../runs/parallel

The target answers the prompts at temperature 1, the draft reads the answers once, and the heads are trained on its states, in a
few minutes. Then unseen prompts are answered with four draft tokens a step by the draft with a pass for each, and by the draft
with heads. `measured.json` has acceptance by place: counts, no times, so other work on the machine changes nothing.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import specdecpp as sd
from specdecpp.decoder import run
from specdecpp.lab.parallel import ParallelDraft, ParallelHeads
from specdecpp.policies import Fixed
from specdecpp.policy_spec import as_prompt
from specdecpp.training import prompts

BATCH, RATE = 512, 2e-3


def read(files: Sequence[str], builders: Sequence[str], rows: int) -> list[str]:
    """The user messages of some rows of each file."""
    sources = (replace(source, rows=rows) for source in prompts.sources(files, builders))
    return [prompt.text for source in sources for prompt in source.prompts()]


def answers(pair: sd.Pair, texts: Sequence[str], num_tokens: int) -> Iterator[tuple[list[int], int]]:
    """(Tokens of prompt and answer, how many are the prompt's) of each text, by the target alone."""
    decoder = sd.Decoder(pair, policy=Fixed(k=0))
    for text in texts:
        session = decoder.start(as_prompt(pair, text), max_tokens=num_tokens, temperature=1.0, seed=len(text))
        for _ in run(session):
            pass
        yield session.tokens, session.num_prompt_tokens


def trained(draft: Any, texts: Sequence[tuple[list[int], int]], num_heads: int, epochs: int) -> ParallelHeads:
    """Heads that say what the target wrote some places on."""
    heads, output = ParallelHeads(draft.hidden_size, num_heads), draft.model.get_output_embeddings().requires_grad_(False)
    states, later = [], []
    for tokens, num_prompt in texts:
        hidden = draft.new_cache().extend(tokens, rows=len(tokens))[1]
        first = max(0, num_prompt - 2)
        for at in range(first, len(tokens) - 1 - num_heads):
            states.append(hidden[at])
            later.append(tokens[at + 2 : at + 2 + num_heads])
    hidden, wanted = torch.tensor(torch.stack(states).numpy()), torch.tensor(later)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=epochs * (len(hidden) // BATCH))
    generator = torch.Generator().manual_seed(0)
    for epoch in range(epochs):
        losses: list[list[float]] = []
        for chosen in torch.randperm(len(hidden), generator=generator).split(BATCH)[: len(hidden) // BATCH]:
            each = heads.loss(hidden[chosen], wanted[chosen], output)
            optimizer.zero_grad()
            each.mean().backward()
            optimizer.step()
            schedule.step()
            losses.append(each.tolist())
        means = " ".join(f"{sum(of) / len(of):.3f}" for of in zip(*losses, strict=True))
        print(f"epoch {epoch + 1}: cross-entropy {means}", flush=True)
    return heads.eval()


def accepted_by_place(pair: sd.Pair, texts: Sequence[str], places: int, num_tokens: int) -> list[float]:
    """Of the draft tokens at each place that were tested, the share that was accepted."""
    tested, accepted = [0] * places, [0] * places
    decoder = sd.Decoder(pair, policy=Fixed(k=places))
    for text in texts:
        for outcome in decoder.generate(as_prompt(pair, text), max_tokens=num_tokens, temperature=1.0, seed=1).steps:
            for i in range(min(outcome.num_accepted + 1, outcome.num_drafted)):
                tested[i] += 1
                accepted[i] += i < outcome.num_accepted
    return [round(a / max(t, 1), 3) for a, t in zip(accepted, tested, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompts", action="append", required=True)
    parser.add_argument("--prompt", action="append", required=True)
    parser.add_argument("--test", action="append", required=True)
    parser.add_argument("--test-prompt", action="append", required=True)
    parser.add_argument("--rows", type=int, default=600, help="of each file of prompts")
    parser.add_argument("--count", type=int, default=8, help="prompts of each test file")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    started = time.perf_counter()
    pair, eager = sd.load_pair(), sd.load_pair(backend="eager")
    draft: Any = eager.draft
    texts = list(answers(pair, read(args.prompts, args.prompt, args.rows), args.tokens))
    print(
        f"{sum(len(tokens) - num for tokens, num in texts)} tokens written, {time.perf_counter() - started:.0f} s", flush=True
    )
    heads = trained(draft, texts, args.heads, args.epochs)
    trained_s = time.perf_counter() - started

    parallel = replace(
        pair, draft=ParallelDraft(pair.draft, heads, draft.model.get_output_embeddings()), draft_fingerprint=None, head=None
    )
    plain = replace(pair, head=None)
    found: dict[str, Any] = {"seconds_to_train": round(trained_s), "num_heads": args.heads, "sets": {}}
    for path, builder in zip(args.test, args.test_prompt, strict=True):
        asked = read([path], [builder], args.count)
        found["sets"][builder] = {
            "accepted_by_place": {
                "a pass each": accepted_by_place(plain, asked, 4, args.tokens),
                "heads": accepted_by_place(parallel, asked, 4, args.tokens),
            }
        }
        print(json.dumps(found["sets"][builder], indent=2), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "measured.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
