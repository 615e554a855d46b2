"""Train the reference pair's acceptance head in its simplest form: the paper's objective on cached features (method.md 4).

    python train_head.py --target runs/reference/target --draft runs/reference/draft \\
        --samples runs/reference/head_samples.jsonl --out runs/reference/head

Y_i ~ q at every position of a sampled answer X by one teacher-forced pass, labelled P_i = min(1, p(Y_i)/q(Y_i)). The head
reads the draft's state on the mixed text Z (X_i with probability 0.15, else Y_i), at the positions where Z_i is Y_i.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from batches import tensors
from corpus import read_jsonl
from transformers import LlamaForCausalLM

from specdecpp import AcceptanceHead, Calibration, HeadCard
from specdecpp.pair import fingerprint

MIX = 0.15


@torch.no_grad()
def collect(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, rows: list[dict], *, seed: int, batch: int = 16
) -> dict[str, torch.Tensor]:
    """Per judged candidate: hidden [N, D], label P [N], log q [N], and the answer it belongs to [N]."""
    coins = torch.Generator().manual_seed(seed)
    parts: dict[str, list[torch.Tensor]] = {"hidden": [], "label": [], "log_q": [], "answer": []}
    rows = sorted(rows, key=lambda r: len(r["prompt"]) + len(r["response"]))
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        length = max(len(r["prompt"]) + len(r["response"]) for r in part)
        inputs, _ = tensors([[r["prompt"] + r["response"]] for r in part], length=length, pad=0)
        p, q = (m(input_ids=inputs, use_cache=False).logits.softmax(-1) for m in (target, draft))
        drawn = torch.multinomial(q.flatten(0, 1), 1, generator=coins).view(inputs.shape)
        ratio = (p.gather(-1, drawn[..., None]) / q.gather(-1, drawn[..., None])).squeeze(-1).clamp(max=1)
        log_q = q.gather(-1, drawn[..., None]).squeeze(-1).log()
        mixed, judged = inputs.clone(), torch.zeros_like(inputs, dtype=torch.bool)
        for i, r in enumerate(part):
            first, last = len(r["prompt"]), len(r["prompt"]) + len(r["response"])
            keep = torch.rand(last - first, generator=coins) < MIX
            mixed[i, first:last] = torch.where(keep, inputs[i, first:last], drawn[i, first - 1 : last - 1])
            judged[i, first:last] = ~keep
        hidden = draft.model(input_ids=mixed, use_cache=False).last_hidden_state
        row, at = judged.nonzero(as_tuple=True)
        parts["hidden"].append(hidden[row, at])
        parts["label"].append(ratio[row, at - 1])
        parts["log_q"].append(log_q[row, at - 1])
        parts["answer"].append(row + start)
    return {name: torch.cat(values) for name, values in parts.items()}


def auroc(score: torch.Tensor, label: torch.Tensor) -> float:
    """Area under the ROC curve against soft labels: each position counts as P accepted and 1 - P rejected."""
    weight = label[score.argsort(stable=True)]
    rejected_below = (1 - weight).cumsum(0) - 0.5 * (1 - weight)
    return float((weight * rejected_below).sum() / (weight.sum() * (1 - weight).sum()))


def fit(data: dict[str, torch.Tensor], *, card: HeadCard, epochs: int, lr: float, seed: int) -> AcceptanceHead:
    """Weighted soft binary cross-entropy, AdamW, cosine with 3 % warm-up."""
    torch.manual_seed(seed)
    head, weight = AcceptanceHead(card), card.calibration.rejection_weight
    num, size = len(data["label"]), 1024
    optimiser = torch.optim.AdamW(head.parameters(), lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, lr, total_steps=epochs * (num // size), pct_start=0.03, anneal_strategy="cos"
    )
    for _ in range(epochs):
        for chosen in torch.randperm(num)[: num // size * size].split(size):
            logit, label = head(data["hidden"][chosen]), data["label"][chosen]
            w = label + weight * (1 - label)
            loss = -(label * F.logsigmoid(logit) + weight * (1 - label) * F.logsigmoid(-logit)).sum() / w.sum()
            loss.backward()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            schedule.step()
    return head.eval()


@torch.no_grad()
def report(head: AcceptanceHead, data: dict[str, torch.Tensor]) -> dict[str, float]:
    """AUROC of head and log q, and the calibrated head's expected calibration error over ten bins of equal mass."""
    logit = torch.cat([head(part) for part in data["hidden"].split(8192)])
    probability = head.card.calibration.apply(logit).sigmoid()
    order = probability.argsort()
    bins = torch.tensor_split(order, 10)
    error = sum(float((probability[b].mean() - data["label"][b].mean()).abs()) * len(b) for b in bins) / len(order)
    return {
        "auroc_head": round(auroc(logit, data["label"]), 4),
        "auroc_log_q": round(auroc(data["log_q"], data["label"]), 4),
        "ece": round(error, 4),
        "mean_label": round(float(data["label"].mean()), 4),
        "num_labels": len(logit),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--samples", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rejection-weight", type=float, default=6.0)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    target, draft = (LlamaForCausalLM.from_pretrained(m, dtype=torch.float32).eval() for m in (args.target, args.draft))
    rows = read_jsonl(args.samples)
    data = {
        split: collect(target, draft, [r for r in rows if r["validation"] == (split == "validation")], seed=5)
        for split in ("train", "validation")
    }
    print({split: len(values["label"]) for split, values in data.items()}, flush=True)
    best: tuple[float, AcceptanceHead | None] = (0.0, None)
    for layers in args.layers:
        card = HeadCard(
            hidden_size=draft.config.hidden_size,
            num_layers=layers,
            target=fingerprint(target),
            draft=fingerprint(draft),
            sampling={"temperature": 1.0, "top_k": None, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0},
            calibration=Calibration(rejection_weight=args.rejection_weight),
        )
        head = fit(data["train"], card=card, epochs=args.epochs, lr=args.lr, seed=layers)
        figures = report(head, data["validation"])
        print(layers, json.dumps(figures), "train", json.dumps(report(head, data["train"])), flush=True)
        # A layer must pay for itself: it costs time at every candidate.
        if figures["auroc_head"] > best[0] + 0.003:
            notes = {
                "data": "labels on answers the target sampled for GSM8K train and dolly prompts",
                "objective": f"weighted soft BCE, w_rej {args.rejection_weight:g}, mixing {MIX}",
                "epochs": args.epochs,
                "lr": args.lr,
                "validation": figures,
            }
            best = (figures["auroc_head"], head.with_card(notes=notes))
    assert best[1] is not None
    best[1].save_pretrained(args.out)


if __name__ == "__main__":
    main()
