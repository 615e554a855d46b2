"""The plan of a distillation."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specdecpp.distillation.network import Shape
from specdecpp.distillation.training import Course
from specdecpp.sampling import Sampling
from specdecpp.training.prompts import Source

SHARD = 64
"""Prompts of a shard."""


@dataclass(frozen=True, kw_only=True)
class DistilPlan:
    """A draft for a target, from prompts. One of `minutes` (for all but the check at the end) and `tokens` (that the target
    writes) is the budget. Raises ValueError for what cannot be done."""

    target: str
    sources: tuple[Source, ...]
    out: Path
    minutes: float | None = None
    tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    """As it will be served: what the target writes is drawn so."""
    shape: Shape | None = None
    """None: chosen by predicted tokens/s (`shapes`)."""
    start: str | None = None
    """A small model with the target's tokenizer, trained instead of layers of the target; its shape is its own. Of a draft of
    this target `shape` may keep fewer layers than it has from the target: the others are trained too."""
    course: Course = field(default_factory=Course)
    max_tokens: int = 256
    seed: int = 0
    device: str | None = None
    licence: str | None = None
    """Of the prompts and the target, for the card."""

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.tokens is None):
            given = "both" if self.tokens is not None else "neither"
            raise ValueError(f"the budget is either minutes or tokens that the target writes, got {given}. Give one of them.")
        if (self.minutes is not None and not self.minutes > 0) or (self.tokens is not None and self.tokens < 1):
            raise ValueError(f"the budget must be positive, got {self.tokens if self.minutes is None else self.minutes:g}")
        if self.max_tokens < 2 or self.seed < 0:
            raise ValueError(f"max_tokens must be at least 2 and seed at least 0, got {self.max_tokens} and {self.seed}")

    def asked(self) -> dict[str, Any]:
        """All that a run depends on but for the target, the prompts and the budget, which may be raised."""
        told = asdict(self)
        return {key: told[key] for key in ("sampling", "shape", "start", "course", "max_tokens", "seed")}
