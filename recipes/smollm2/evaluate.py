"""How often a target accepts what its drafts propose, on prompts that nobody trained on: 1 - TV along the target's own answers.

    python evaluate.py --target SmolLM2-135M-Instruct.Q4_1.gguf --draft ../../runs/smollm2/draft.gguf \\
        --gsm8k gsm8k_test.jsonl --humaneval HumanEval.jsonl.gz --alpaca alpaca_1k.jsonl

The answers to the first prompts of each set (in an order of hashes) are sampled as named and judged under the same sampling;
all drafts are measured along the same ones. What a draft was trained on is read from the card beside it.
"""

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

import specdecpp
from specdecpp.decoder import encode
from specdecpp.distillation.measuring import SETTINGS, by_source
from specdecpp.distillation.target import Target
from specdecpp.distillation.text import answered
from specdecpp.loading.pair import Pair, short_name
from specdecpp.policy_spec import as_prompt
from specdecpp.training.prompts import Source, gather

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from peers.provenance import provenance  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).parents[2]
NAMES = {"gsm8k": "GSM8K", "humaneval": "HumanEval", "alpaca": "Alpaca"}
SETS = tuple(NAMES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="the target's file")
    parser.add_argument("--draft", action="append", required=True, help="a draft's file or folder; repeatable")
    for name in SETS:
        parser.add_argument(f"--{name}", required=True, metavar="FILE", help=f"prompts of {name}, JSON lines")
    parser.add_argument("--count", type=int, default=40, help="prompts of each set (default: 40)")
    parser.add_argument("--max-tokens", type=int, default=128, help="the most tokens of an answer (default: 128)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/smollm2_draft.json")
    args = parser.parse_args()
    target = Target(args.target)
    prompts = [(name, ids) for name in SETS for ids in encoded(target, getattr(args, name), name)[: args.count]]
    drafts = [Target(name) for name in args.draft]
    found: list[dict[str, dict[str, float]]] = [{name: {} for name in SETS} for _ in drafts]
    for at, (setting, sampling) in enumerate(SETTINGS.items()):
        asked = [ids for _, ids in prompts]
        pieces = answered(target, asked, sampling, max_tokens=args.max_tokens, layer=0, seed=(0, at))
        for draft, figures in zip(drafts, found, strict=True):
            of = by_source(target.model, draft.model, [name for name, _ in prompts], pieces, settings={setting: sampling})
            for name in SETS:
                figures[name] |= {setting: round(of[name][setting], 4)}
    rows = [row(draft, figures) for draft, figures in zip(drafts, found, strict=True)]
    args.out.write_text(json.dumps(about(target, args) | {"drafts": rows}, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(found[-1])))


def table(figures: dict[str, dict[str, float]]) -> list[str]:
    """A draft's figures as the lines of docs/your-pair.md."""
    lines = [f"| prompts | {' | '.join(SETTINGS)} |", f"|---|{'---:|' * len(SETTINGS)}"]
    return lines + [f"| {NAMES[name]} | {' | '.join(f'{by[s]:.2f}' for s in SETTINGS)} |" for name, by in figures.items()]


def encoded(target: Target, path: str, name: str) -> list[list[int]]:
    """The prompts of a set as ids."""
    pair = Pair(target=target.writer, draft=target.writer, tokenizer=target.tokenizer)
    return [encode(pair, as_prompt(pair, prompt.text)) for prompt in gather([Source(path=path, prompt=name)], seed=0)]


def row(draft: Target, figures: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Facts about a draft."""
    card = Path(draft.name).parent / "card.json"
    told = json.loads(card.read_text(encoding="utf-8")) if card.exists() else {}
    return {
        "draft": short_name(draft.name),
        "fingerprint": draft.source.fingerprint,
        "shape": told.get("draft", {}).get("shape"),
        "tokens": told.get("data", {}).get("tokens"),
        "acceptance": figures,
    }


def about(target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """Where the figures come from."""
    return {
        **provenance("python", "evaluate.py"),
        "versions": {"python": platform.python_version(), "specdecpp": specdecpp.__version__, "torch": torch.__version__},
        "target": {"name": short_name(args.target), "fingerprint": target.source.fingerprint},
        "prompts": args.count,
        "max_tokens": args.max_tokens,
    }


if __name__ == "__main__":
    main()
