"""Training a head on collected labels: the paper's objective as one flat loop, and what goes beyond it as fields of a plan.

    records -> batches of answers -> evidence and soft labels -> head -> weighted cross-entropy -> AdamW, cosine -> head, card

The paper's head (Huang et al. 2025, section 3.2) is `HeadPlan.paper()`: it reads the state at the draft token on
the mixed text, -w_acc P log s - w_rej (1 - P) log(1 - s), normalised by the sum of the weights. The draft is frozen, so all
of its states are read from the labels: no epoch and no head of a grid runs a model again.
"""

import json
import math
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from specdecpp import cache_dir
from specdecpp.errors import DataError, first_line
from specdecpp.head import CARD, AcceptanceHead, Calibration, HeadCard
from specdecpp.training.evaluate import joined
from specdecpp.training.folders import claimed
from specdecpp.training.labels import Record
from specdecpp.training.measures import auroc, kl
from specdecpp.training.recipe import HeadPlan
from specdecpp.training.scores import ScoreInputs, head_logits, raw, token_inputs
from specdecpp.training.shards import COLLECTION

STATE = "state.pt"


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


def train(
    plan: HeadPlan,
    records: Sequence[Record],
    dev: Sequence[Record],
    about: Mapping[str, Any],
    folder: Path,
    *,
    tell: Callable[[Epoch], None] = lambda epoch: None,
) -> AcceptanceHead:
    """Train one head and save it in `folder`; its card has the figures of each epoch.

    `about` is what `shards.about` says of the collection. A run that was killed goes on after its last finished epoch and
    ends with the same weights; one that is finished is read back. Raises `DataError` when there are no answers, when they
    lack what the plan reads, when the folder holds a head of another plan or collection or a damaged state, when another run
    works in it, and when it cannot be written into.
    """
    _check(plan, records)
    if lacking := [key for key in ("pair", "sampling", "vocab_size") if key not in about]:
        raise DataError(
            f"the labels do not say their {lacking[0]}, which a head's card needs: {COLLECTION} is missing beside the shards, "
            "or damaged. Put it back, or collect into another folder."
        )
    with claimed(folder):
        run = _Training(plan, _card(plan, records[0], about), folder, about.get("digest"), -(-len(records) // plan.batch))
        if len(run.epochs) == plan.epochs and (folder / CARD).exists():
            return AcceptanceHead.from_pretrained(folder)
        started = perf_counter()
        for epoch in range(len(run.epochs) + 1, plan.epochs + 1):
            total, weight = 0.0, 0.0
            for batch in batches(len(records), plan, epoch):
                loss, size = run.step([records[i] for i in batch])
                total, weight = total + loss * size, weight + size
            run.keep(_epoch(run.head, plan, epoch, total / weight, records, dev, perf_counter() - started))
            tell(run.epochs[-1])
        finished = run.head.with_card(notes={"train": run.origin, "epochs": [asdict(e) for e in run.epochs]})
        finished.save_pretrained(folder)
        return finished


class _Training:
    """A training between two epochs: what it takes to go on is in `state.pt`, replaced whole after each."""

    def __init__(self, plan: HeadPlan, card: HeadCard, folder: Path, labels: str | None, num_batches: int):
        """A new run, or the one that was killed in this folder."""
        self.plan, self.folder, self.epochs = plan, folder, list[Epoch]()
        self.origin = {"plan": json.loads(json.dumps(asdict(plan))), "labels": labels}
        self.head = AcceptanceHead(card)
        _initialise(self.head, plan.seed)
        self.optimiser = torch.optim.AdamW(self.head.parameters(), lr=plan.lr, weight_decay=0.0)
        num_steps = plan.epochs * num_batches
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimiser, lambda at: rate(at, steps=num_steps, warmup=plan.warmup)
        )
        self._parts = {"head": self.head, "optimiser": self.optimiser, "schedule": self.schedule}
        if (folder / STATE).exists():
            with saved(folder / STATE, otherwise="the head is trained from its beginning") as state:
                self._go_on(state)

    def _go_on(self, state: dict[str, Any]) -> None:
        """Take up what `keep` has written. Raises `DataError` for the state of another plan."""
        plan, own = state["origin"]["plan"], self.origin["plan"]
        if state["origin"] != self.origin:
            changed = [k for k in own | plan if plan.get(k) != own.get(k)] or ["the labels"]
            raise DataError(
                f"{self.folder} holds a head of another plan: {', '.join(changed)} changed. Give this head another name, or "
                "remove that folder."
            )
        self.epochs = [Epoch(**line) for line in state["epochs"]]
        for name, part in self._parts.items():
            part.load_state_dict(state[name])

    def step(self, records: Sequence[Record]) -> tuple[float, int]:
        """One update; the loss before it, and the number of labels it stands on."""
        evidence, label, depth = examples(records, self.plan)
        logit = raw(self.head, evidence, depth)
        loss = acceptance_loss(logit, label, rejection_weight=self.plan.rejection_weight)
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.schedule.step()
        return float(loss.detach()), len(logit)

    def keep(self, line: Epoch) -> None:
        """Write the state after an epoch, whole or not at all. Raises `DataError` where that cannot be done."""
        self.epochs.append(line)
        state = {"origin": self.origin, "epochs": [asdict(e) for e in self.epochs]}
        state |= {name: part.state_dict() for name, part in self._parts.items()}
        try:
            with cache_dir.whole(self.folder / STATE) as part:
                torch.save(state, part)
        except (OSError, RuntimeError) as error:  # torch has an error of its own for a full disk
            reason = error.strerror if isinstance(error, OSError) else first_line(error)
            raise DataError(
                f"{self.folder} cannot be written into ({reason}). The epochs before this one are safe: mend that and run the "
                "same command again."
            ) from error


def _card(plan: HeadPlan, first: Record, about: Mapping[str, Any]) -> HeadCard:
    """The card of the untrained head: what the labels say of the pair."""
    return HeadCard(
        hidden_size=first.states.shape[1],
        num_layers=plan.num_layers,
        form=plan.form,
        scalars=plan.scalars,
        width=plan.width,
        vocab_size=about["vocab_size"] if plan.is_ahead else None,
        target=about["pair"]["target"],
        draft=about["pair"]["draft"],
        sampling=about["sampling"],
        calibration=Calibration(rejection_weight=plan.rejection_weight),
    )


def acceptance_loss(
    logit: Float[Tensor, " M"], label: Float[Tensor, " M"], *, rejection_weight: float = 1.0
) -> Float[Tensor, ""]:
    """sum(-P log s - w (1 - P) log(1 - s)) / sum(P + w (1 - P)): its minimiser is s = P/(P + w (1 - P))."""
    rejected = rejection_weight * (1 - label)
    return -(label * F.logsigmoid(logit) + rejected * F.logsigmoid(-logit)).sum() / (label + rejected).sum()


def batches(num: int, plan: HeadPlan, epoch: int) -> Iterator[list[int]]:
    """`num` answers in an order of this epoch's own, cut into batches."""
    generator = torch.Generator().manual_seed(plan.seed * 1_000_003 + epoch)
    yield from (chosen.tolist() for chosen in torch.randperm(num, generator=generator).split(plan.batch))


def examples(records: Sequence[Record], plan: HeadPlan) -> tuple[ScoreInputs, Float[Tensor, " M"], Tensor]:
    """Inputs of the head for M draft tokens of these answers, how likely each is accepted, and its depth."""
    inputs, labels, depths = zip(*(token_inputs(r, "clean" if plan.is_ahead else plan.text) for r in records), strict=True)
    return ScoreInputs.joined(inputs), torch.cat(labels), torch.cat(depths)


def _check(plan: HeadPlan, records: Sequence[Record]) -> None:
    if not records:
        raise DataError("there are no answers to train on. Collect some in the split train.")
    if not plan.is_ahead and getattr(records[0], plan.text) is None:
        raise DataError(
            f"a lagged head on the {plan.text} text reads the states of the feature {plan.text!r}, and the labels have none. "
            f"Add {plan.text} to collect.features and collect again, or train a look-ahead head."
        )


def _epoch(
    head: AcceptanceHead,
    plan: HeadPlan,
    epoch: int,
    loss: float,
    records: Sequence[Record],
    dev: Sequence[Record],
    elapsed_s: float,
) -> Epoch:
    """The line of an epoch, with figures on the dev answers."""
    draws = 1 if not plan.is_ahead else records[0].candidate.shape[1]
    values: dict[str, Any] = {"dev_auroc": None, "dev_kl": None}
    if dev:
        score, label, _ = joined([head_logits(head, record) for record in dev])
        probability = 1 / (1 + np.exp(-score) / plan.rejection_weight)
        values = {"dev_auroc": auroc(score, label), "dev_kl": kl(probability, label)}
    num = sum(len(r.answer) for r in records) * draws
    return Epoch(epoch=epoch, epochs=plan.epochs, loss=loss, num_labels=num, elapsed_s=elapsed_s, **values)


@contextmanager
def saved(path: Path, *, otherwise: str) -> Iterator[Any]:
    """The state of a training that torch has saved, to go on from. Raises `DataError` for a damaged file or contents that
    cannot be used; `otherwise` says what a run without it does."""
    try:
        with zipfile.ZipFile(path) as archive:  # torch does not look at the checksums
            if (bad := archive.testzip()) is not None:
                raise ValueError(f"{bad} is not what was written")
        yield torch.load(path, weights_only=True)
    except DataError:
        raise
    except Exception as error:  # zip, pickle and torch each have errors of their own
        raise DataError(
            f"{path} is damaged ({first_line(error)}), so this training cannot go on from it. Delete that file and run the "
            f"same command again: {otherwise}."
        ) from error


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
