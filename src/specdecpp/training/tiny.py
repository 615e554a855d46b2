"""Training the tiny network of `policies.Classifier`: P(everything so far is accepted) from what the draft says for free.

    records with branches -> rounds (policies.md 9) -> (log prod q, entropy, depth), all accepted? -> Net

Every round of a record has its exact weight, so rows are drawn by weight and then count alike; the loss is the cross-entropy
of the outcome. There is nothing to tune and it takes seconds.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from specdecpp.errors import DataError
from specdecpp.policies.learned import FEATURES, Net
from specdecpp.training.labels import Record
from specdecpp.training.rounds import rounds
from specdecpp.training.scores import Judged, log_q, minus_entropy


def fit(records: Sequence[Record], *, units: int = 8, rows_per_answer: int = 200, steps: int = 600, seed: int = 0) -> Net:
    """Fit a net on the records that have branches. Raises `DataError` when none of them has.

    >>> net = fit(shards.read("runs/labels", split="train"))                                      # doctest: +SKIP
    """
    generator = np.random.default_rng(seed)
    examples = [_examples(record, rows_per_answer, generator) for record in records if record.branches is not None]
    if not examples:
        raise DataError(
            "a classifier learns from the rounds of an answer, and no label here has branches. Collect with --branches."
        )
    features, label = (torch.from_numpy(np.concatenate(column)) for column in zip(*examples, strict=True))
    mean, scale = features.mean(0), features.std(0).clamp(min=1e-6)
    (weight, biases, output, bias), loss = _descend((features - mean) / scale, label, units=units, steps=steps, seed=seed)
    weight = weight / scale
    figures = {"rows": len(label), "accepted": float(label.mean()), "loss": loss}
    return Net(
        weights=tuple(map(tuple, weight.tolist())),
        biases=tuple((biases - weight @ mean).tolist()),
        output=tuple(output.tolist()),
        bias=float(bias),
        notes={"answers": len(examples), "steps": steps, "seed": seed, **figures},
    )


def _descend(
    x: Float[Tensor, "R F"], label: Float[Tensor, " R"], *, units: int, steps: int, seed: int
) -> tuple[list[Tensor], float]:
    """Weights, biases, output and bias after that many steps of Adam on all rows, and the loss before the last of them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((units, len(FEATURES)), (units,), (units,), ())
    parameters = [0.5 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    weight, biases, output, bias = (p.requires_grad_() for p in parameters)
    optimizer = torch.optim.Adam(parameters, lr=0.02)
    loss = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(torch.tanh(x @ weight.T + biases) @ output + bias, label)
        loss.backward()
        optimizer.step()
    return [p.detach() for p in parameters], float(loss.detach())


def _examples(
    record: Record, num: int, generator: np.random.Generator
) -> tuple[Float[np.ndarray, "r F"], Float[np.ndarray, " r"]]:
    """Features and outcomes of `num` rounds at some depth, drawn by weight."""
    made = rounds(record)
    product, entropy = made.scores(log_q(record)), made.scores(_as_steps(minus_entropy(record)))
    chosen = generator.choice(len(made.weight), size=num, p=made.weight / made.weight.sum())
    features = np.stack([product, -entropy, made.depth.astype(float)], -1)[chosen]
    return np.maximum(features, [np.log(1e-30), 0.0, 0.0]), made.label[chosen]


def _as_steps(judged: Judged) -> Judged:
    """Scores whose sum over a round is the score of its last token: differences of neighbours."""
    answer, branch = judged.answer, judged.branch
    assert answer is not None, "a record with branches has been judged on them"
    assert branch is not None, "a record with branches has been judged on them"
    before = np.concatenate([np.zeros((1, answer.shape[1])), answer[:-1]])  # of the token before; a first candidate has none
    first = np.arange(answer.shape[1]) > 0
    steps = np.diff(branch, axis=1, prepend=0.0)
    steps[:, 0] -= before * first
    return Judged(
        score=judged.score,
        label=judged.label,
        weight=judged.weight,
        depth=judged.depth,
        source=judged.source,
        answer=answer - before * first,
        branch=steps,
    )
