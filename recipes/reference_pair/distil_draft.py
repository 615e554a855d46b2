"""Distil the reference draft (about 2 M parameters) from the target on text the target sampled (DistillSpec, Zhou et al. 2024).

    python distil_draft.py --target runs/reference/target --gsm8k gsm8k_train.jsonl --dolly dolly_2k.jsonl \\
        --samples runs/reference/samples.jsonl --out runs/reference

Two phases in one pass: the corpus first (broad), the target's own samples after it (what the draft meets in use). The loss
is the forward KL at every position of an answer, plus the total variation with a weight that grows, since
1 - TV is the acceptance probability. Only answers count: prompts are never drafted. The target reads everything once,
before the first step; the epochs share what it said.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from batches import encode, tensors
from corpus import load, read_jsonl
from models import DRAFT, Optimiser, build, mixed_precision
from train_target import save_rounded
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


def divergences(p_logits: torch.Tensor, q_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(KL(p||q), TV(p, q)) per row of [N, V] logits, in nats and in [0, 1]."""
    log_p, log_q = p_logits.float().log_softmax(-1), q_logits.float().log_softmax(-1)
    p = log_p.exp()
    return (p * (log_p - log_q)).sum(-1), 0.5 * (p - log_q.exp()).abs().sum(-1)


@dataclass
class Lesson:
    """A document `ids`, the position `start` from which the next token is the answer's, and what the target's output layer
    reads from there on: `hidden` [len(ids) - 1 - start, D]."""

    ids: list[int]
    start: int
    hidden: torch.Tensor | None = None

    @property
    def answer(self) -> slice:
        return slice(self.start, len(self.ids) - 1)


def lessons(documents: list[list[int]], *, assistant: int, length: int) -> list[Lesson]:
    """Documents cut to `length`; those without an answer within it are left out."""
    cut = [d[:length] for d in documents]
    return [Lesson(d, d.index(assistant) + 1) for d in cut if assistant in d and d.index(assistant) < len(d) - 2]


def rows_of(documents: list[Lesson], *, length: int) -> list[list[Lesson]]:
    """Packed into rows of `length` tokens, in order."""
    rows: list[list[Lesson]] = [[]]
    free = length
    for document in documents:
        if len(document.ids) > free:
            rows.append([])
            free = length
        rows[-1].append(document)
        free -= len(document.ids)
    return rows


def batch_of(rows: list[list[Lesson]], *, length: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids [B, T], additive mask [B, 1, T, T], answer positions [B, T]); documents of one row do not see each other."""
    ids, owner = torch.zeros(count, length, dtype=torch.long), torch.full((count, length), -1)
    is_answer = torch.zeros(count, length, dtype=torch.bool)
    for i, row in enumerate(rows):
        at = 0
        for n, lesson in enumerate(row):
            ids[i, at : at + len(lesson.ids)] = torch.tensor(lesson.ids)
            owner[i, at : at + len(lesson.ids)] = n
            is_answer[i, at + lesson.answer.start : at + lesson.answer.stop] = True
            at += len(lesson.ids)
    visible = (owner[:, None, :, None] == owner[:, None, None, :]).tril()
    return ids, torch.where(visible, 0.0, torch.finfo(torch.bfloat16).min).to(torch.bfloat16), is_answer


@torch.no_grad()
def teach(body: Callable, documents: list[Lesson], *, length: int, rows: int) -> None:
    """Fill in the target's hidden states, once for all epochs: its output layer is all that is left to run."""
    packed = rows_of(documents, length=length)
    for start in range(0, len(packed), rows):
        part = packed[start : start + rows]
        ids, mask, is_answer = batch_of(part, length=length, count=rows)
        with mixed_precision():
            hidden = body(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[is_answer]
        answers = [lesson for row in part for lesson in row]
        for lesson, own in zip(answers, hidden.split([d.answer.stop - d.answer.start for d in answers]), strict=True):
            lesson.hidden = own.clone()


@torch.no_grad()
def acceptance(target: LlamaForCausalLM, draft: LlamaForCausalLM, rows: list[dict], *, batch: int = 16) -> float:
    """Mean of 1 - TV(p, q) over the positions of sampled answers, in float32."""
    total, count = 0.0, 0
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        length = max(len(r["prompt"]) + len(r["response"]) for r in part)
        inputs, _ = tensors([[r["prompt"] + r["response"]] for r in part], length=length, pad=0)
        p, q = (m(input_ids=inputs, use_cache=False).logits for m in (target, draft))
        for i, r in enumerate(part):
            at = slice(len(r["prompt"]) - 1, len(r["prompt"]) + len(r["response"]) - 1)
            total += float((1 - divergences(p[i, at], q[i, at])[1]).sum())
            count += len(r["response"])
    return total / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--dolly", type=Path, required=True)
    parser.add_argument("--samples", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--corpus-epochs", type=int, default=1)
    parser.add_argument("--sample-epochs", type=int, default=4)
    parser.add_argument("--lr-matrix", type=float, default=0.02)
    parser.add_argument("--lr-rest", type=float, default=3e-3)
    parser.add_argument("--init", type=Path, help="go on from this draft")
    parser.add_argument("--length", type=int, default=384)
    args = parser.parse_args()

    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.target)
    target = LlamaForCausalLM.from_pretrained(args.target, dtype=torch.float32, attn_implementation="eager").eval()
    draft = build(DRAFT, vocabulary=len(tokenizer), seed=2)
    if args.init:
        draft.load_state_dict(LlamaForCausalLM.from_pretrained(args.init, dtype=torch.float32).state_dict())
    else:  # one vocabulary and one width: start from the target's embeddings, which are also its output layer
        draft.model.embed_tokens.weight.data.copy_(target.model.embed_tokens.weight.data)
    print(f"{sum(p.numel() for p in draft.parameters()):,} parameters", flush=True)

    corpus = [d for d in load(gsm8k_train=args.gsm8k, dolly_sample=args.dolly, module_share=0.0) if not d.is_validation]
    sampled = read_jsonl(args.samples)
    held_out = {
        domain: [r for r in sampled if r["validation"] and r["domain"] == domain][:64]
        for domain in ("gsm8k", "dolly", "python")
    }
    assistant = tokenizer.convert_tokens_to_ids("<|assistant|>")
    broad = lessons(encode(corpus, tokenizer), assistant=assistant, length=args.length)
    own = [r["prompt"] + r["response"] for r in sampled if not r["validation"]]
    own = lessons(own, assistant=assistant, length=args.length)
    shuffle = random.Random(3)
    micro = 4096 // args.length
    target_body, draft_body = (torch.compile(m.model, dynamic=False) for m in (target, draft))
    started = time.perf_counter()
    teach(target_body, [*broad, *own], length=args.length, rows=micro)
    answers = sum(d.answer.stop - d.answer.start for d in [*broad, *own])
    print(f"{answers:,} answer tokens taught in {time.perf_counter() - started:.0f} s", flush=True)
    rows = []
    for documents in [broad] * args.corpus_epochs + [own] * args.sample_epochs:
        packed = rows_of(shuffle.sample(documents, len(documents)), length=args.length)
        shuffle.shuffle(packed)
        rows += packed
    steps = len(rows) // (2 * micro)
    print(f"{len(rows)} rows, {steps} steps", flush=True)
    fused = torch.compile(divergences, dynamic=True)
    optimiser = Optimiser(draft, steps=steps, lr_matrix=args.lr_matrix, lr_rest=args.lr_rest)
    started, sums = time.perf_counter(), [0.0, 0.0]
    for step in range(1, steps + 1):
        tv_weight = 2.0 * step / steps
        for half in range(2):
            at = (2 * (step - 1) + half) * micro
            part = rows[at : at + micro]
            ids, mask, is_answer = batch_of(part, length=args.length, count=micro)
            taught = torch.cat([lesson.hidden for row in part for lesson in row if lesson.hidden is not None])
            with mixed_precision():
                with torch.no_grad():
                    p_logits = target.lm_head(taught)
                hidden = draft_body(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
                q_logits = draft.lm_head(hidden[is_answer])
            kl, tv = fused(p_logits, q_logits)
            ((kl.mean() + tv_weight * tv.mean()) / 2).backward()
            sums = [sums[0] + float(kl.mean().detach()) / 2, sums[1] + float(tv.mean().detach()) / 2]
        optimiser.step()
        if step % 20 == 0:
            rate = step * 2 * micro * args.length / (time.perf_counter() - started)
            print(f"step {step}/{steps} KL {sums[0] / 20:.3f} 1-TV {1 - sums[1] / 20:.3f} {rate:.0f} tokens/s", flush=True)
            sums = [0.0, 0.0]
        if step % 300 == 0 or step == steps:
            accepted = {k: round(acceptance(target, draft, v), 4) for k, v in held_out.items() if v}
            print("validation 1-TV", step, accepted, flush=True)
            save_rounded(draft, args.out / "draft")
            tokenizer.save_pretrained(args.out / "draft")
            (args.out / "draft.json").write_text(json.dumps({"step": step, "acceptance": accepted}, indent=1))


if __name__ == "__main__":
    main()
