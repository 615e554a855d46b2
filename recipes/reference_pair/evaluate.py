"""How much the pair agrees on prompts nobody trained on: mean acceptance 1 - TV at T = 1, and how it spreads over tokens.

    python evaluate.py --pair runs/reference --gsm8k-test gsm8k_test.jsonl --humaneval HumanEval.jsonl.gz \\
        --alpaca alpaca_1k.jsonl --out benchmarks/results/reference_pair.json
"""

import argparse
import json
import platform
from pathlib import Path

import torch
import transformers
from batches import tensors
from corpus import Document, gsm8k_prompt, instruction_prompt, python_prompt, read_jsonl
from distil_draft import divergences
from sample import prompt_ids, sample
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


@torch.no_grad()
def agreement(target: LlamaForCausalLM, draft: LlamaForCausalLM, rows: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    """1 - TV(p, q) at every position of the sampled answers."""
    values = []
    for prompt, response in rows:
        inputs, _ = tensors([[prompt + response]], length=len(prompt) + len(response), pad=0)
        p, q = (m(input_ids=inputs, use_cache=False, logits_to_keep=len(response) + 1).logits[0, :-1] for m in (target, draft))
        values.append(1 - divergences(p, q)[1])
    return torch.cat(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pair", type=Path, required=True, help="folder with target/ and draft/")
    parser.add_argument("--gsm8k-test", type=Path, required=True)
    parser.add_argument("--humaneval", type=Path, required=True)
    parser.add_argument("--alpaca", type=Path, required=True)
    parser.add_argument("--count", type=int, default=160)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(11)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.pair / "target")
    target, draft = (
        LlamaForCausalLM.from_pretrained(args.pair / role, dtype=torch.float32).eval() for role in ("target", "draft")
    )
    prompts = {
        "gsm8k_test": [gsm8k_prompt(r) for r in read_jsonl(args.gsm8k_test)],
        "humaneval": [python_prompt(r["prompt"]) for r in read_jsonl(args.humaneval)],
        "alpaca": [instruction_prompt(r) for r in read_jsonl(args.alpaca)],
    }
    figures = {}
    for name, texts in prompts.items():
        documents = [Document(domain=name, prompt=t, answer="") for t in texts]
        ids = [i for i in (prompt_ids(d, tokenizer) for d in documents) if len(i) < 640][: args.count]
        responses = sample(target, tokenizer, ids, max_new_tokens=256)
        a = agreement(target, draft, list(zip(ids, responses, strict=True)))
        figures[name] = {
            "prompts": len(ids),
            "tokens": len(a),
            "mean_acceptance": round(float(a.mean()), 4),
            "share_above_0.95": round(float((a > 0.95).float().mean()), 4),
            "share_below_0.5": round(float((a < 0.5).float().mean()), 4),
            "quantiles_10_50_90": [round(float(x), 3) for x in a.quantile(torch.tensor([0.1, 0.5, 0.9]))],
        }
        print(name, json.dumps(figures[name]), flush=True)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"command": "evaluate.py", "versions": versions, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
