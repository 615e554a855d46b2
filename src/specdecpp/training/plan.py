"""The shape of a head and its training: the fields of `train` in a recipe, and the paper's grid of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from specdecpp.head import SCALARS, Calibration, HeadCard
from specdecpp.training.labels import Record

GRID = {"rejection_weight": (1.0, 3.0, 6.0, 12.0), "num_layers": (0, 1, 2, 3, 4)}
"""The paper's grid of 20 heads (section 4)."""


@dataclass(frozen=True, kw_only=True)
class HeadPlan:
    """One head: its form and how it is trained. The defaults are ours; `HeadPlan.paper()` is the paper's.

    `text` is where a lagged head finds the state at the draft token: `mixed` or `leaf` (exact). `batch` counts
    answers, of which every position has as many draft tokens as were drawn; the learning rate is reached after a share
    `warmup` of the steps and falls as a cosine. Raises ValueError for what cannot be trained.
    """

    form: str = "look_ahead"
    text: str = "mixed"
    num_layers: int = 2
    width: int | None = None
    scalars: tuple[str, ...] = ("log_q", "entropy", "gap")
    rejection_weight: float = 1.0
    epochs: int = 4
    batch: int = 8
    lr: float = 2e-3
    warmup: float = 0.03
    seed: int = 0

    def __post_init__(self) -> None:
        if self.form not in ("lagged", "look_ahead") or self.text not in ("mixed", "leaf"):
            raise ValueError(f"form is lagged or look_ahead and text mixed or leaf, got {self.form!r} and {self.text!r}")
        if unknown := [name for name in self.scalars if name not in SCALARS]:
            raise ValueError(f"scalars: {unknown[0]!r} is not one of {', '.join(SCALARS)}")
        if (
            min(self.epochs, self.batch) < 1
            or self.num_layers < 0
            or self.seed < 0
            or (self.width is not None and self.width < 1)
        ):
            raise ValueError(
                "epochs, batch and width must be at least 1, num_layers and seed at least 0, got "
                f"{self.epochs}, {self.batch}, {self.width}, {self.num_layers} and {self.seed}"
            )
        if not (self.lr > 0 and self.rejection_weight > 0 and 0 <= self.warmup < 1):
            raise ValueError(
                f"lr and rejection_weight must be positive and warmup in [0, 1), got {self.lr}, {self.rejection_weight}, "
                f"{self.warmup}"
            )

    @classmethod
    def paper(cls, **changes: Any) -> "HeadPlan":
        """The head of the paper: three blocks, w_rej = 6, three epochs of batches of 32 answers, lr 5e-5."""
        paper = {
            "form": "lagged",
            "num_layers": 3,
            "scalars": (),
            "rejection_weight": 6.0,
            "epochs": 3,
            "batch": 32,
            "lr": 5e-5,
        }
        return cls(**(paper | changes))

    @property
    def is_ahead(self) -> bool:
        return self.form == "look_ahead"

    def card(self, first: Record, about: Mapping[str, Any]) -> HeadCard:
        """The card of the untrained head: what the labels say of the pair."""
        pair = about["pair"]
        return HeadCard(
            hidden_size=first.states.shape[1],
            num_layers=self.num_layers,
            form=self.form,
            scalars=self.scalars,
            width=self.width,
            vocab_size=about["vocab_size"] if self.is_ahead else None,
            target=pair["target"],
            draft=pair["draft"],
            sampling=about["sampling"],
            calibration=Calibration(rejection_weight=self.rejection_weight),
        )


def grid(plan: HeadPlan, axes: Mapping[str, Sequence[Any]] = GRID) -> dict[str, HeadPlan]:
    """Every combination of the axes, by a name that says its values.

    >>> list(grid(HeadPlan.paper(), {"num_layers": (0, 1)}))
    ['num_layers=0', 'num_layers=1']
    """
    names = list(axes)
    combinations = [dict(zip(names, values, strict=True)) for values in product(*axes.values())]
    return {",".join(f"{k}={v:g}" for k, v in c.items()): replace(plan, **c) for c in combinations}
