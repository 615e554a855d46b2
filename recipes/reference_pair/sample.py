"""Responses sampled from the target at temperature 1, in batches: the text the draft is distilled on, and the head's labels.

    python sample.py --model runs/reference/target --gsm8k gsm8k_train.jsonl --dolly dolly_2k.jsonl \\
        --counts gsm8k=6000,dolly=1800,python=2000 --seed 1 --out runs/reference/samples.jsonl
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
from corpus import Document, load
from models import mixed_precision
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from specdecpp.training.responses import roomy_cache


@torch.inference_mode()
def sample(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    batch: int = 128,
) -> list[list[int]]:
    """One response (ids, ending with </s> where it ended) for each prompt (ids), T = 1, sorted by length to waste little."""
    responses: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    started = time.perf_counter()
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        for i, response in zip(chosen, _batch(model, tokenizer, [prompts[i] for i in chosen], max_new_tokens), strict=True):
            responses[i] = response
        rate = sum(map(len, responses)) / (time.perf_counter() - started)
        print(f"{start + len(chosen)}/{len(order)} {rate:.0f} tokens/s", flush=True)
    return responses


def _batch(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[list[int]], max_new_tokens: int
) -> list[list[int]]:
    """Sample one left-padded batch; rows that have ended leave it once they are a quarter of it."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    responses: list[list[int]] = [[] for _ in prompts]
    rows, cache = torch.arange(len(prompts)), roomy_cache()
    for _ in range(max_new_tokens):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        with mixed_precision():
            logits = model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
            ).logits
        ids = torch.multinomial(logits[:, -1].float().softmax(-1), 1)
        is_open = torch.tensor([not r or r[-1] != tokenizer.eos_token_id for r in (responses[i] for i in rows.tolist())])
        for i, token, still in zip(rows.tolist(), ids[:, 0].tolist(), is_open.tolist(), strict=True):
            if still:
                responses[i].append(token)
        is_open &= ids[:, 0] != tokenizer.eos_token_id
        mask = torch.cat([mask, torch.ones_like(ids)], -1)
        if not is_open.any():
            break
        if is_open.float().mean() < 0.75:
            kept = is_open.nonzero().squeeze(-1)
            cache.batch_select_indices(kept)
            ids, mask, rows = ids[kept], mask[kept], rows[kept]
    return responses


def prompt_ids(document: Document, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    messages = [{"role": "user", "content": document.prompt}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False).input_ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--dolly", type=Path, required=True)
    parser.add_argument("--counts", required=True, help="prompts of each kind: gsm8k=6000,dolly=1800,python=2000")
    parser.add_argument("--max-new-tokens", type=int, default=288)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.model)
    model = LlamaForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    counts = {k: int(v) for k, v in (part.split("=") for part in args.counts.split(","))}
    documents = load(gsm8k_train=args.gsm8k, dolly_sample=args.dolly, module_share=0.0)
    random.Random(args.seed).shuffle(documents)
    rows = []
    for domain, count in counts.items():
        chosen = [d for d in documents if d.domain == domain]
        chosen = [c for c in ((d, prompt_ids(d, tokenizer)) for d in chosen) if len(c[1]) <= 640][:count]
        responses = sample(model, tokenizer, [ids for _, ids in chosen], max_new_tokens=args.max_new_tokens)
        rows += [
            {"domain": domain, "validation": d.is_validation, "prompt": ids, "response": r}
            for (d, ids), r in zip(chosen, responses, strict=True)
        ]
    args.out.write_text("".join(json.dumps(r) + "\n" for r in rows))
    print(f"{len(rows)} responses, {sum(len(r['response']) for r in rows):,} tokens", flush=True)


if __name__ == "__main__":
    main()
