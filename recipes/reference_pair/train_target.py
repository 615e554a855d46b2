"""Train the reference target on GSM8K train, dolly and the standard library; keep the best validation loss.

    python train_target.py --gsm8k gsm8k_train.jsonl --dolly dolly_2k.jsonl --layers 10 --out runs/shallow
    python train_target.py --gsm8k gsm8k_train.jsonl --dolly dolly_2k.jsonl --layers 14 --init runs/shallow/target \\
        --epochs gsm8k=2,dolly=1,python=1 --lr-matrix 0.01 --lr-rest 1e-3 --out runs/reference

`--init` goes on from a target; a shallower one is grown first, by blocks that begin as the identity.
"""

import argparse
import copy
import itertools
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from batches import IGNORED, encode, pack, stream, tensors
from corpus import load
from models import CONTEXT, TARGET, Optimiser, build, mixed_precision
from tokenizer import train_tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

EPOCHS = "gsm8k=5,dolly=4,python=3,module=1"
PHASES = [(0.80, 256), (0.12, 512), (0.08, 1024)]
STEP_TOKENS = 8192


def validation_loss(model: LlamaForCausalLM, documents: list[list[int]], *, length: int = 512) -> float:
    """Mean negative log-likelihood in nats per token over whole documents."""
    total, count = 0.0, 0
    rows = pack(documents, length=length)
    with torch.no_grad(), mixed_precision():
        for start in range(0, len(rows), 8):
            inputs, labels = tensors(rows[start : start + 8], length=length, pad=0)
            logits = model(input_ids=inputs, use_cache=False).logits.float()
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
            total, count = total + float(loss), count + int((labels != IGNORED).sum())
    return total / count


def save_rounded(model: LlamaForCausalLM, folder: Path) -> None:
    """Write the weights in bfloat16, as they ship: the draft and the head are then trained against what is served."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)


def grown(shallow: LlamaForCausalLM, deep: LlamaForCausalLM) -> LlamaForCausalLM:
    """`deep` computing exactly what `shallow` computes: copies of blocks in between, their outputs zero (LLaMA Pro)."""
    few, many = len(shallow.model.layers), len(deep.model.layers)
    deep.model.embed_tokens.load_state_dict(shallow.model.embed_tokens.state_dict())
    deep.model.norm.load_state_dict(shallow.model.norm.state_dict())
    source = [i * few // many for i in range(many)]
    for i, block in enumerate(deep.model.layers):
        block.load_state_dict(shallow.model.layers[source[i]].state_dict())
        if i and source[i] == source[i - 1]:
            block.self_attn.o_proj.weight.data.zero_()
            block.mlp.down_proj.weight.data.zero_()
    return deep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--dolly", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=TARGET["num_hidden_layers"])
    parser.add_argument("--init", type=Path, help="go on from this target")
    parser.add_argument("--epochs", default=EPOCHS, help=f"of each kind of document (default: {EPOCHS})")
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--lr-matrix", type=float, default=0.02)
    parser.add_argument("--lr-rest", type=float, default=3e-3)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    documents = load(gsm8k_train=args.gsm8k, dolly_sample=args.dolly, module_share=0.35)
    training = [d for d in documents if not d.is_validation]
    if args.init:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.init)
    else:
        tokenizer = train_tokenizer([d.render() for d in training if d.domain != "module"], context=CONTEXT)
    count = {k: int(v) for k, v in (part.split("=") for part in args.epochs.split(","))}
    encoded = {name: encode([d for d in training if d.domain == name], tokenizer) for name in count}
    held_out = {
        name: encode([d for d in documents if d.is_validation and d.domain == name], tokenizer)[:120]
        for name in ("gsm8k", "dolly", "python")
    }
    # Epoch e holds every domain with more than e epochs: what is served most (word problems) lasts to the end.
    epochs = [
        list(itertools.chain.from_iterable(encoded[n] for n in count if e < count[n])) for e in range(max(count.values()))
    ]
    tokens = sum(len(d) for epoch in epochs for d in epoch)
    steps = args.max_steps or tokens // STEP_TOKENS
    print(f"{tokens:,} training tokens, about {steps} steps", flush=True)

    model = build(TARGET | {"num_hidden_layers": args.layers}, vocabulary=len(tokenizer), seed=0)
    if args.init:
        model = grown(LlamaForCausalLM.from_pretrained(args.init, dtype=torch.float32), model)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    compiled = torch.compile(model, dynamic=False)
    optimiser = Optimiser(model, steps=steps, lr_matrix=args.lr_matrix, lr_rest=args.lr_rest)
    best, start, running = float("inf"), time.perf_counter(), 0.0
    batches = stream(epochs, phases=PHASES, step_tokens=STEP_TOKENS, pad=0, seed=1)
    for step, (length, inputs, labels) in enumerate(itertools.islice(batches, steps), 1):
        halves = zip(inputs.split(4096 // length), labels.split(4096 // length), strict=True)
        for half, half_labels in halves:
            with mixed_precision():
                logits = compiled(input_ids=half, use_cache=False).logits
                loss = F.cross_entropy(logits.flatten(0, 1), half_labels.flatten(), ignore_index=IGNORED) / 2
            loss.backward()
            running += float(loss.detach())
        optimiser.step()
        if step % 20 == 0:
            rate = step * STEP_TOKENS / (time.perf_counter() - start)
            print(f"step {step}/{steps} length {length} loss {running / 20:.3f} {rate:.0f} tokens/s", flush=True)
            running = 0.0
        if step % 200 == 0 or step == steps:
            losses = {name: validation_loss(model, rows) for name, rows in held_out.items()}
            mean = sum(losses.values()) / len(losses)
            print("validation", step, {k: round(v, 3) for k, v in losses.items()}, round(mean, 4), flush=True)
            if mean < best:
                best = mean
                save_rounded(model, args.out / "target")
                tokenizer.save_pretrained(args.out / "target")
                (args.out / "target.json").write_text(json.dumps({"step": step, "validation_nats": losses}, indent=1))
    print(f"best mean validation loss {best:.4f} after {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
