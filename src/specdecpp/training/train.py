"""Training a head on collected labels: the paper's objective as one flat loop, and what goes beyond it as fields of a plan.

    records -> batches of answers -> evidence and soft labels -> head -> weighted cross-entropy -> AdamW, cosine -> head, card

The paper's head (Huang et al. 2025, section 3.2; lagged, three blocks, w_rej = 6, three epochs, batches of 32 answers, lr 5e-5)
reads the state at the draft token on the mixed text; its loss is -w_acc P log s - w_rej (1 - P) log(1 - s), normalised by the
sum of the weights. The draft is frozen, so all states are read from the labels: no epoch runs a model again.

Where a layer stands before the blocks, it is trained on inputs with mean 0 and deviation 1, a share of the state's entries left
out of each row; its weights are then scaled so that the saved head reads states as they are. (States of Qwen2.5 0.5B deviate by
.2 in one entry and 32 in another: trained on them directly, a head of 88 answers ranks worse than the log q that it reads.)
"""

import json
import math
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
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
from specdecpp.training.evaluate import joined, known
from specdecpp.training.folders import claimed, writing
from specdecpp.training.labels import Record
from specdecpp.training.measures import auroc, kl
from specdecpp.training.recipe import HeadPlan
from specdecpp.training.scores import ScoreInputs, head_logits, raw, scalars_of, token_inputs
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
    origin = {"plan": json.loads(json.dumps(asdict(plan))), "labels": about.get("digest")}
    with claimed(folder):
        head = AcceptanceHead(_card(plan, records[0], about))
        _initialise(head, plan.seed)
        optimiser = torch.optim.AdamW(head.parameters(), lr=plan.lr, weight_decay=0.0)
        num_steps = plan.epochs * -(-len(records) // plan.batch)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, partial(rate, steps=num_steps, warmup=plan.warmup))
        parts = {"head": head, "optimiser": optimiser, "schedule": schedule}
        epochs = _restored(folder, origin, parts)
        if len(epochs) == plan.epochs and (folder / CARD).exists():
            return AcceptanceHead.from_pretrained(folder)
        scale, started = None if head.input is None else Scale.of(records, plan), perf_counter()
        unscaled = deepcopy if scale is None else scale.folded
        for epoch in range(len(epochs) + 1, plan.epochs + 1):
            total, num_labels, generator = 0.0, 0, torch.Generator().manual_seed(plan.seed * 1_000_003 + epoch)
            for batch in batches(len(records), plan, generator):
                inputs, label, depth = examples([records[i] for i in batch], plan)
                seen = None if scale is None else scale.seen(plan.dropout, generator)
                logit = raw(head, inputs, depth, seen=seen)
                batch_loss = acceptance_loss(logit, label, rejection_weight=plan.rejection_weight)
                batch_loss.backward()
                optimiser.step()
                optimiser.zero_grad(set_to_none=True)
                schedule.step()
                total, num_labels = total + float(batch_loss.detach()) * len(label), num_labels + len(label)
            trained = {"loss": total / max(1, num_labels), "num_labels": num_labels, "elapsed_s": perf_counter() - started}
            epochs.append(Epoch(epoch=epoch, epochs=plan.epochs, **trained, **_figures(unscaled(head), plan, dev)))
            state = {"origin": origin, "epochs": [asdict(line) for line in epochs]}
            with writing(folder, safe="The epochs before this one"), cache_dir.whole(folder / STATE) as path:
                torch.save(state | {name: part.state_dict() for name, part in parts.items()}, path)
            tell(epochs[-1])
        finished = unscaled(head).with_card(notes={"train": origin, "epochs": [asdict(line) for line in epochs]})
        finished.save_pretrained(folder)
        return finished


def _restored(folder: Path, origin: Mapping[str, Any], parts: Mapping[str, Any]) -> list[Epoch]:
    """The epochs of a run that was killed in this folder, whose state `parts` take up; none of a new one."""
    if not (folder / STATE).exists():
        return []
    with saved(folder / STATE, otherwise="the head is trained from its beginning") as state:
        plan, own = state["origin"]["plan"], origin["plan"]
        if state["origin"] != origin:
            changed = [k for k in own | plan if plan.get(k) != own.get(k)] or ["the labels"]
            raise DataError(
                f"{folder} holds a head of another plan: {', '.join(changed)} changed. Give this head another name, or remove "
                "that folder."
            )
        for name, part in parts.items():
            part.load_state_dict(state[name])
        return [Epoch(**line) for line in state["epochs"]]


def _card(plan: HeadPlan, first: Record, about: Mapping[str, Any]) -> HeadCard:
    """The card of the untrained head: what the labels say of the pair."""
    return HeadCard(
        hidden_size=first.states.shape[1],
        num_layers=plan.num_layers,
        form=plan.form,
        scalars=plan.scalars,
        width=plan.width,
        vocab_size=about["vocab_size"] if plan.token_table else None,
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
    mass = (label + rejected).sum().clamp(min=1e-9)  # of an answer that kept all of its own tokens there is nothing to learn
    return -(label * F.logsigmoid(logit) + rejected * F.logsigmoid(-logit)).sum() / mass


@dataclass(frozen=True)
class Scale:
    """Mean and deviation of each input of a head's first layer, state then scalars [D + S], over draft tokens."""

    mean: Float[Tensor, " I"]
    deviation: Float[Tensor, " I"]

    @classmethod
    def of(cls, records: Sequence[Record], plan: HeadPlan) -> "Scale":
        num, sums = 0, torch.zeros(2, records[0].states.shape[1] + len(plan.scalars), dtype=torch.float64)
        for record in records:
            inputs, _, depth = examples([record], plan)
            x = torch.cat([inputs.hidden.float(), scalars_of(plan.scalars, inputs, depth)], -1).double()
            num, sums = num + len(x), sums + torch.stack([x.sum(0), x.square().sum(0)])
        mean, square = sums / max(1, num)
        deviation = (square - mean.square()).clamp(min=0).sqrt()
        return cls(mean.float(), torch.where(deviation > 1e-6, deviation, 1.0).float())

    def seen(self, dropout: float, generator: torch.Generator) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Change (states, scalars) to what a step of training reads."""

        def change(hidden: Tensor, scalars: Tensor) -> tuple[Tensor, Tensor]:
            x = (torch.cat([hidden.float(), scalars], -1) - self.mean) / self.deviation
            kept = torch.rand(hidden.shape, generator=generator) >= dropout
            return x[..., : hidden.shape[-1]] * kept / (1 - dropout), x[..., hidden.shape[-1] :]

        return change

    def folded(self, head: AcceptanceHead) -> AcceptanceHead:
        """A head that says of inputs as they are what `head` says of scaled ones."""
        head = deepcopy(head).eval()
        assert head.input is not None, "only a first layer is trained on scaled inputs"
        with torch.no_grad():
            head.input.weight.div_(self.deviation)
            head.input.bias.sub_(head.input.weight @ self.mean)
        return head


def batches(num: int, plan: HeadPlan, generator: torch.Generator) -> Iterator[list[int]]:
    """`num` answers in a random order, cut into batches."""
    yield from (chosen.tolist() for chosen in torch.randperm(num, generator=generator).split(plan.batch))


def examples(records: Sequence[Record], plan: HeadPlan) -> tuple[ScoreInputs, Float[Tensor, " M"], Tensor]:
    """Inputs of the head for M draft tokens of these answers, how likely each is accepted, and its depth."""
    inputs, labels, depths = zip(*(token_inputs(r, "clean" if plan.is_ahead else plan.text) for r in records), strict=True)
    return ScoreInputs.joined(inputs), torch.cat(labels), torch.cat(depths)


def _check(plan: HeadPlan, records: Sequence[Record]) -> None:
    if not records:
        raise DataError("there are no answers to train on. Collect some in the split train.")
    if plan.token_table and not plan.is_ahead:
        raise DataError("a lagged head has no token table: what it reads has read the token. Leave token_table out.")
    if not plan.is_ahead and getattr(records[0], plan.text) is None:
        raise DataError(
            f"a lagged head on the {plan.text} text reads the states of the feature {plan.text!r}, and the labels have none. "
            f"Add {plan.text} to collect.features and collect again, or train a look-ahead head."
        )


def _figures(head: AcceptanceHead, plan: HeadPlan, dev: Sequence[Record]) -> dict[str, Any]:
    """Figures of an epoch on the dev answers."""
    values: dict[str, Any] = {"dev_auroc": None, "dev_kl": None}
    if dev:
        score, label, _ = joined([head_logits(head, replace(record, branches=None)) for record in dev])
        probability = 1 / (1 + np.exp(-score) / plan.rejection_weight)
        values |= {"dev_auroc": known(auroc(score, label)), "dev_kl": kl(probability, label)}
    return values


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
