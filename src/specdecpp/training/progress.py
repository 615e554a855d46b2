"""A training between two epochs: the head, its optimiser and what was measured, kept on disk so that a kill costs an epoch."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from specdecpp.errors import DataError
from specdecpp.head import AcceptanceHead
from specdecpp.training.plan import HeadPlan

STATE, METRICS = "state.pt", "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """Where a training stands after an epoch. The figures of the dev split are per token; None without dev answers."""

    epoch: int
    epochs: int
    loss: float
    dev_auroc: float | None
    dev_kl: float | None
    num_labels: int
    elapsed_s: float


@dataclass
class Training:
    """A training between two epochs: what it takes to go on is in `state.pt`, replaced whole after each."""

    head: AcceptanceHead
    optimiser: torch.optim.AdamW
    schedule: torch.optim.lr_scheduler.LambdaLR
    folder: Path
    epoch: int
    epochs: list[Epoch]

    @classmethod
    def opened(cls, plan: HeadPlan, head: AcceptanceHead, folder: Path, origin: dict[str, Any], num_batches: int) -> "Training":
        """A new run, or the one that was killed in this folder."""
        folder.mkdir(parents=True, exist_ok=True)
        _initialise(head, plan.seed)
        optimiser = torch.optim.AdamW(head.parameters(), lr=plan.lr, weight_decay=0.0)
        steps = plan.epochs * num_batches
        schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda s: _rate(s, steps=steps, warmup=plan.warmup))
        run = cls(head, optimiser, schedule, folder, 0, [])
        if (folder / STATE).exists():
            saved = torch.load(folder / STATE, weights_only=True)
            if saved["origin"] != origin:
                changed = [k for k in origin["plan"] if saved["origin"]["plan"].get(k) != origin["plan"][k]] or ["the labels"]
                raise DataError(
                    f"{folder} holds a head of another plan: {', '.join(changed)} changed. Give this head another name, or "
                    "remove that folder."
                )
            head.load_state_dict(saved["head"])
            optimiser.load_state_dict(saved["optimiser"])
            schedule.load_state_dict(saved["schedule"])
            run.epoch, run.epochs = saved["epoch"], [Epoch(**e) for e in saved["epochs"]]
        head.train()
        return run

    def keep(self, epoch: int, line: Epoch, origin: dict[str, Any]) -> None:
        """Write the state after an epoch, and the lines so far; each file is replaced whole."""
        self.epoch, self.epochs = epoch, [*self.epochs, line]
        state = {
            "origin": origin,
            "epoch": epoch,
            "epochs": [asdict(e) for e in self.epochs],
            "head": self.head.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "schedule": self.schedule.state_dict(),
        }
        torch.save(state, self.folder / f"{STATE}.part")
        (self.folder / f"{STATE}.part").replace(self.folder / STATE)
        lines = self.folder / f"{METRICS}.part"
        lines.write_text("".join(json.dumps(asdict(e)) + "\n" for e in self.epochs), encoding="utf-8")
        lines.replace(self.folder / METRICS)


def _rate(at: int, *, steps: int, warmup: float) -> float:
    """The learning rate as a share of its highest: a line up, then half a cosine down."""
    rising = max(1, round(warmup * steps))
    return (at + 1) / rising if at < rising else 0.5 + 0.5 * math.cos(math.pi * (at - rising) / max(1, steps - rising))


def _initialise(head: AcceptanceHead, seed: int) -> None:
    """The usual start of linear layers, from a generator of its own; blocks begin as the identity, the table at zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in (head.input, head.output):
            if layer is not None:
                bound = layer.in_features**-0.5
                layer.weight.uniform_(-bound, bound, generator=generator)
                layer.bias.zero_()
        for name, bias in head.blocks.named_parameters():
            if name.endswith("bias"):
                bias.uniform_(-(len(bias) ** -0.5), len(bias) ** -0.5, generator=generator)
        if head.token is not None:
            head.token.weight.zero_()
