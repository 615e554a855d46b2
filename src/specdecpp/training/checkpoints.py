"""A training between two epochs: the head, its optimiser and what was measured, kept on disk so that a kill costs an epoch."""

import json
import math
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from specdecpp import cache_dir
from specdecpp.errors import DataError, first_line
from specdecpp.head import AcceptanceHead
from specdecpp.training.recipe import HeadPlan

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
        _initialise(head, plan.seed)
        optimiser = torch.optim.AdamW(head.parameters(), lr=plan.lr, weight_decay=0.0)
        steps = plan.epochs * num_batches
        schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda s: rate(s, steps=steps, warmup=plan.warmup))
        run = cls(head, optimiser, schedule, folder, 0, [])
        if (folder / STATE).exists():
            try:
                run._go_on(saved(folder / STATE), origin)
            except DataError:
                raise
            except Exception as error:  # zip, pickle and torch each have errors of their own
                raise DataError(
                    f"{folder / STATE} is damaged ({first_line(error)}), so this training cannot go on from it. Delete that "
                    "file and run the same command again: the head is trained from its beginning."
                ) from error
        head.train()
        return run

    def _go_on(self, saved: dict[str, Any], origin: dict[str, Any]) -> None:
        """Take up what `keep` has written. Raises `DataError` for the state of another plan."""
        plan, own = saved["origin"]["plan"], origin["plan"]
        if plan.get("outputs") == ["accept"]:  # of an earlier version, whose heads might have more of them
            del plan["outputs"]
        if saved["origin"] != origin:
            changed = [k for k in own | plan if plan.get(k) != own.get(k)] or ["the labels"]
            raise DataError(
                f"{self.folder} holds a head of another plan: {', '.join(changed)} changed. Give this head another name, or "
                "remove that folder."
            )
        self.epoch, self.epochs = int(saved["epoch"]), [Epoch(**e) for e in saved["epochs"]]
        self.head.load_state_dict(saved["head"])
        self.optimiser.load_state_dict(saved["optimiser"])
        self.schedule.load_state_dict(saved["schedule"])

    def keep(self, epoch: int, line: Epoch, origin: dict[str, Any]) -> None:
        """Write the state after an epoch, and the lines so far; each file is replaced whole.

        Raises `DataError` where that cannot be done.
        """
        self.epoch, self.epochs = epoch, [*self.epochs, line]
        state = {
            "origin": origin,
            "epoch": epoch,
            "epochs": [asdict(e) for e in self.epochs],
            "head": self.head.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "schedule": self.schedule.state_dict(),
        }
        try:
            with cache_dir.whole(self.folder / STATE) as part:
                torch.save(state, part)
            self.write_lines()
        except (OSError, RuntimeError) as error:  # torch has an error of its own for a full disk
            reason = error.strerror if isinstance(error, OSError) else first_line(error)
            raise DataError(
                f"{self.folder} cannot be written into ({reason}). The epochs before this one are safe: mend that and run the "
                "same command again."
            ) from error

    def notes(self, origin: dict[str, Any]) -> dict[str, Any]:
        """Notes on the training for a card."""
        return {"train": origin, "epochs": [asdict(e) for e in self.epochs]}

    def write_lines(self) -> None:
        """`metrics.jsonl`, as the epochs so far make it."""
        cache_dir.write(self.folder / METRICS, "".join(json.dumps(asdict(e)) + "\n" for e in self.epochs))


def saved(path: Path) -> Any:
    """Load what torch has saved. Raises whatever a damaged file makes zip, pickle or torch raise; torch alone does not look at
    the checksums."""
    with zipfile.ZipFile(path) as archive:
        if (bad := archive.testzip()) is not None:
            raise ValueError(f"{bad} is not what was written")
    return torch.load(path, weights_only=True)


def rate(at: int, *, steps: int, warmup: float, least: float = 0.0) -> float:
    """The learning rate as a share of its highest: a line up, then half a cosine down to `least`."""
    rising = max(1, round(warmup * steps))
    falling = 0.5 + 0.5 * math.cos(math.pi * min(1.0, (at - rising) / max(1, steps - rising)))
    return (at + 1) / rising if at < rising else least + (1 - least) * falling


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
