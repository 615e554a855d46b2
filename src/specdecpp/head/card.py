"""The purpose of a head, and how its score becomes a probability: the card that lies beside its weights."""

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from jaxtyping import Float
from torch import Tensor

from specdecpp.errors import HeadError
from specdecpp.head.features import SCALARS

WEIGHTS, CARD = "head.safetensors", "head.json"
DIGEST = "weights_sha256"
"""The key of `head.json` that is about the other file."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """From the raw score s to a probability P, in logits: logit P = (logit s + log w) / temperature + bias.

    A loss that weighs rejections by w is minimised by s = P/(P + w(1 - P)); adding log w undoes it exactly
    (P = w s / (1 + (w - 1) s)). Temperature and bias come from held-out labels.
    """

    rejection_weight: float = 1.0
    temperature: float = 1.0
    bias: float = 0.0
    num_labels: int = 0
    """How many held-out labels temperature and bias were fitted on; 0: they were not."""

    def __post_init__(self) -> None:
        is_finite = all(map(math.isfinite, (self.rejection_weight, self.temperature, self.bias)))
        if not (is_finite and self.rejection_weight > 0 and self.temperature > 0):
            raise ValueError(
                "a calibration needs finite numbers with rejection_weight > 0 and temperature > 0, got "
                f"{self.rejection_weight}, {self.temperature}, {self.bias}"
            )

    def apply(self, logit: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Logits of the raw score to logits of the calibrated probability."""
        return (logit + math.log(self.rejection_weight)) / self.temperature + self.bias


@dataclass(frozen=True, kw_only=True)
class HeadCard:
    """The purpose of a head and its making. `target` and `draft` are fingerprints (`loading.fingerprints`), None when
    unknown."""

    hidden_size: int
    num_layers: int = 3
    form: str = "lagged"
    """`lagged` or `look_ahead`: whether it reads the state at the draft token, or the one before and the draft token."""
    scalars: tuple[str, ...] = ()
    width: int | None = None
    """Of the blocks; None: `hidden_size`, and without scalars no layer stands before them."""
    vocab_size: int | None = None
    """Rows of the token table of the look-ahead form."""
    target: str | None = None
    draft: str | None = None
    sampling: dict[str, Any] | None = None
    calibration: Calibration = field(default_factory=Calibration)
    greedy: Calibration | None = None
    """That of temperature 0, where a draft token is accepted for sure or not at all; None: as when sampling."""
    stopping: dict[str, Any] = field(default_factory=dict)
    """How `SpecDecPP` stops best with this head, tuned on a development split; empty when nobody tuned it."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Provenance and figures: command, versions, seeds, data, losses."""

    def __post_init__(self) -> None:
        if self.hidden_size < 1 or self.num_layers < 0 or (self.width is not None and self.width < 1):
            raise HeadError(
                "a head needs width and hidden_size of at least 1 and num_layers of at least 0, got "
                f"width={self.width}, hidden_size={self.hidden_size} and num_layers={self.num_layers}"
            )
        if unknown := [name for name in self.scalars if name not in SCALARS]:
            raise HeadError(f"scalars: {unknown[0]!r} is not one of {', '.join(SCALARS)}")
        if self.form not in ("lagged", "look_ahead"):
            raise HeadError(f"a head is lagged or look_ahead, got {self.form!r}")
        if self.form == "look_ahead" and not self.vocab_size:
            raise HeadError("a look-ahead head has a row for each token: its card needs vocab_size")

    @property
    def is_calibrated(self) -> bool:
        """Tell whether the calibrated score is a probability that held-out labels have checked."""
        return self.calibration.num_labels > 0

    def calibration_at(self, *, is_greedy: bool) -> Calibration:
        """The calibration of sampled or of greedy decoding."""
        return self.greedy if is_greedy and self.greedy else self.calibration

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "HeadCard":
        """The inverse. `outputs` of earlier versions is passed over: the first was always that of acceptance (`files`)."""
        values = {name: value for name, value in json.loads(text).items() if name not in (DIGEST, "outputs")}
        values |= {name: tuple(values[name]) for name in ("scalars",) if name in values}
        values |= {name: Calibration(**values[name]) for name in ("calibration", "greedy") if values.get(name) is not None}
        return cls(**values)
