"""Training a head on collected labels: the paper's objective as one flat loop, and what goes beyond it as fields of a plan.

    records -> batches of answers -> evidence and soft labels -> head -> weighted cross-entropy -> AdamW, cosine -> head, card

The paper's head (Huang et al. 2025, section 3.2) is `HeadPlan.paper()`: it reads the state at the draft token on
the mixed text, -w_acc P log s - w_rej (1 - P) log(1 - s), normalised by the sum of the weights. The draft is frozen, so all
of its states are read from the labels: no epoch and no head of a grid runs a model again.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from specdecpp.errors import DataError
from specdecpp.head import CARD, AcceptanceHead, Calibration, HeadCard
from specdecpp.training.checkpoints import Epoch, Training
from specdecpp.training.folders import claimed
from specdecpp.training.labels import Record
from specdecpp.training.measures import auroc, kl
from specdecpp.training.recipe import HeadPlan
from specdecpp.training.scores import ScoreInputs, head_logits, raw, token_evidence
from specdecpp.training.shards import COLLECTION

Tell = Callable[[Epoch], None]


def train(
    plan: HeadPlan,
    records: Sequence[Record],
    dev: Sequence[Record],
    about: Mapping[str, Any],
    folder: Path,
    *,
    tell: Tell = lambda epoch: None,
) -> AcceptanceHead:
    """Train one head and save it in `folder`, with `metrics.jsonl`: a line for each epoch.

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
        return _trained(plan, records, dev, about, folder, tell)


def _trained(
    plan: HeadPlan, records: Sequence[Record], dev: Sequence[Record], about: Mapping[str, Any], folder: Path, tell: Tell
) -> AcceptanceHead:
    """`train`, in a folder that is this run's own."""
    origin = {"plan": json.loads(json.dumps(asdict(plan))), "labels": about.get("digest")}
    run = Training.opened(plan, AcceptanceHead(_card(plan, records[0], about)), folder, origin, -(-len(records) // plan.batch))
    if run.epoch == plan.epochs and (folder / CARD).exists():
        head = AcceptanceHead.from_pretrained(folder)
        return head if "epochs" in head.card.notes else head.with_card(notes=head.card.notes | run.notes(origin))
    started = perf_counter()
    for epoch in range(run.epoch + 1, plan.epochs + 1):
        total, weight = 0.0, 0.0
        for batch in batches(len(records), plan, epoch):
            loss, size = step(run, [records[i] for i in batch], plan)
            total, weight = total + loss * size, weight + size
        run.keep(epoch, _epoch(run.head, plan, epoch, total / weight, records, dev, perf_counter() - started), origin)
        tell(run.epochs[-1])
    run.head.eval()
    finished = run.head.with_card(notes=run.notes(origin))
    run.write_lines()  # a run may have been killed between these and the state
    finished.save_pretrained(folder)
    return finished


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


def step(run: Training, records: Sequence[Record], plan: HeadPlan) -> tuple[float, int]:
    """One update; the loss before it, and the number of labels it stands on."""
    evidence, targets = examples(records, plan)
    logit = raw(run.head, evidence, targets["depth"])
    loss = acceptance_loss(logit, targets["accept"], rejection_weight=plan.rejection_weight)
    loss.backward()
    run.optimiser.step()
    run.optimiser.zero_grad(set_to_none=True)
    run.schedule.step()
    return float(loss.detach()), len(logit)


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


def examples(records: Sequence[Record], plan: HeadPlan) -> tuple[ScoreInputs, dict[str, Tensor]]:
    """Inputs of the head for M draft tokens of these answers, and their labels: accept, and depth."""
    evidence, targets = [], []
    for record in records:
        source = "clean" if plan.is_ahead else "leaf" if plan.text == "leaf" else "mixed"
        found = token_evidence(record, source)
        labels = {"accept": record.accept, "depth": record.depth[:, None].expand_as(record.accept)}
        if not plan.is_ahead:
            kept = record.is_mixed if source == "mixed" and record.is_mixed is not None else slice(None)
            labels = {name: values[kept, :1] for name, values in labels.items()}
        evidence.append(_flat(found))
        targets.append({name: values.reshape(-1) for name, values in labels.items()})
    return _joined(evidence), {name: torch.cat([t[name] for t in targets]) for name in targets[0]}


def _flat(evidence: ScoreInputs) -> ScoreInputs:
    """Rows of [N] or [N, C] as [M]."""
    flat = {f.name: getattr(evidence, f.name) for f in fields(evidence)}
    width = flat["hidden"].shape[-1]
    return ScoreInputs(**{name: v.reshape(-1, width) if name == "hidden" else v.reshape(-1) for name, v in flat.items()})


def _joined(parts: Sequence[ScoreInputs]) -> ScoreInputs:
    return ScoreInputs(**{f.name: torch.cat([getattr(p, f.name) for p in parts]) for f in fields(ScoreInputs)})


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
    """The line of an epoch, with figures on the dev answers in the evidence that the plan trains on."""
    draws = 1 if not plan.is_ahead else records[0].candidate.shape[1]
    values: dict[str, Any] = {"dev_auroc": None, "dev_kl": None}
    if dev:
        head.eval()
        judged = [head_logits(head, r, sources=("leaf", "mixed") if plan.text == "leaf" else ("mixed", "leaf")) for r in dev]
        score, label = (torch.cat([torch.from_numpy(getattr(j, n)) for j in judged]) for n in ("score", "label"))
        probability = torch.sigmoid(score + math.log(plan.rejection_weight))
        values = {"dev_auroc": auroc(score.numpy(), label.numpy()), "dev_kl": kl(probability.numpy(), label.numpy())}
        head.train()
    num = sum(len(r.answer) for r in records) * draws
    return Epoch(epoch=epoch, epochs=plan.epochs, loss=loss, num_labels=num, elapsed_s=elapsed_s, **values)
