"""The acceptance head: its card, the torch module for any rows at once, and an estimator of one row in numpy."""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors.torch import save
from torch import Tensor, nn

from specdecpp import cache_dir
from specdecpp.errors import HeadError
from specdecpp.head.features import SCALARS

WEIGHTS, CARD, DIGEST = "head.safetensors", "head.json", "weights_sha256"
"""The files of a head, and the key of the card with the SHA-256 of the weights: a byte that was changed or lost is seen."""
Estimator = Callable[[Tensor, int, tuple[float, ...]], float]
"""(hidden [D], token, scalars) -> P(accepted)."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Map of the raw score s to a probability P, in logits: logit P = (logit s + log w) / temperature + bias.

    A loss that weighs rejections by w is minimised by s = P/(P + w(1 - P)); adding log w undoes it exactly
    (P = w s / (1 + (w - 1) s)). Temperature and bias come from held-out labels.
    """

    rejection_weight: float = 1.0
    temperature: float = 1.0
    bias: float = 0.0
    num_labels: int = 0
    """Held-out labels that temperature and bias were fitted on; 0: they were not."""

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
    """The purpose of a head and its making: `head.json`."""

    hidden_size: int
    num_layers: int = 3
    form: str = "lagged"
    """`lagged` or `look_ahead`: reads the state at the draft token, or the one before and the draft token."""
    scalars: tuple[str, ...] = ()
    width: int | None = None
    """Width of the blocks; None: `hidden_size`, and without scalars no layer stands before them."""
    vocab_size: int | None = None
    """Rows of the token table that a look-ahead head may have; None: it has none."""
    target: str | None = None
    """Fingerprint of the target (`loading.fingerprints`); None when unknown."""
    draft: str | None = None
    sampling: dict[str, Any] | None = None
    calibration: Calibration = field(default_factory=Calibration)
    greedy: Calibration | None = None
    """Calibration at temperature 0, where a draft token is accepted for sure or not at all; None: as when sampling."""
    stopping: dict[str, Any] = field(default_factory=dict)
    """How `SpecDecPP` stops best with this head, tuned on a development split; empty when nobody tuned it."""
    by_default: bool = True
    """False where the default rule is as quick by q alone: the head is asked by rules that are named."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Provenance and figures: command, versions, seeds, data, losses."""

    def __post_init__(self) -> None:
        if self.hidden_size < 1 or self.num_layers < 0 or (self.width is not None and self.width < 1):
            raise HeadError(
                "a head needs width and hidden_size of at least 1 and num_layers of at least 0, got "
                f"width={self.width}, hidden_size={self.hidden_size} and num_layers={self.num_layers}"
            )
        for name in self.scalars:
            if name not in SCALARS:
                raise HeadError(f"scalars: {name!r} is not one of {', '.join(SCALARS)}")
        if self.form not in ("lagged", "look_ahead"):
            raise HeadError(f"a head is lagged or look_ahead, got {self.form!r}")
        if self.form == "lagged" and self.vocab_size:
            raise HeadError("a lagged head has no row for each token: its card has vocab_size all the same")

    @property
    def is_calibrated(self) -> bool:
        """Tell whether held-out labels have checked that the calibrated score is a probability."""
        return self.calibration.num_labels > 0

    def calibration_at(self, *, is_greedy: bool) -> Calibration:
        """The calibration of sampled or of greedy decoding."""
        return self.greedy if is_greedy and self.greedy else self.calibration

    def to_json(self, **more: str) -> str:
        return json.dumps(asdict(self) | more, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "HeadCard":
        """The inverse. `outputs` of version 0.2 is passed over: the first was always that of acceptance."""
        values = {name: value for name, value in json.loads(text).items() if name not in (DIGEST, "outputs")}
        values |= {name: tuple(values[name]) for name in ("scalars",) if name in values}
        values |= {name: Calibration(**values[name]) for name in ("calibration", "greedy") if values.get(name) is not None}
        return cls(**values)


class _Block(nn.Module):
    """x + SiLU(W x + b)."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)  # starts as the identity, as the reference does

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


class AcceptanceHead(nn.Module):
    """P(draft token accepted) from the draft's side of it, as a logit. Always float32; rows are any leading axes.

    >>> head = AcceptanceHead(HeadCard(hidden_size=8, num_layers=1))
    >>> head(torch.zeros(5, 8)).shape
    torch.Size([5])
    >>> ahead = AcceptanceHead(HeadCard(hidden_size=8, form="look_ahead", vocab_size=64, scalars=("log_q",), width=4))
    >>> ahead(torch.zeros(5, 8), torch.arange(5), torch.zeros(5, 1)).shape
    torch.Size([5])
    """

    def __init__(self, card: HeadCard):
        super().__init__()
        self.card = card
        width = card.width or card.hidden_size
        has_input = card.width is not None or card.form == "look_ahead" or bool(card.scalars)
        self.input = nn.Linear(card.hidden_size + len(card.scalars), width) if has_input else None
        self.token = nn.Embedding(card.vocab_size, width) if card.vocab_size else None
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(card.num_layers)))
        self.output = nn.Linear(width, 1)

    def forward(
        self,
        hidden: Float[Tensor, "*rows D"],
        token: Int[Tensor, "*rows"] | None = None,
        scalars: Float[Tensor, "*rows S"] | None = None,
    ) -> Float[Tensor, "*rows"]:
        """The raw logit of acceptance, which the training loss sees.

        hidden is the state at the token (lagged) or the one that gave its q (look-ahead); `token` is read with a token table
        only; `scalars` has a column for each of `card.scalars` (`features.rows`).
        """
        x = hidden.float()
        if self.input is not None:
            x = self.input(x if scalars is None else torch.cat([x, scalars.float()], -1))
        if self.token is not None:
            assert token is not None, "there is a row for each token"
            x = x + self.token(token)
        return self.output(self.blocks(x)).squeeze(-1)

    def estimator(self, *, calibrated: bool = True, is_greedy: bool = False) -> "RowEstimator":
        """P(accepted) token by token by the weights of now, raw (biased as in training) or calibrated, sampled or greedy."""
        return RowEstimator(self, self.card.calibration_at(is_greedy=is_greedy) if calibrated else Calibration())

    def with_card(self, **changes: Any) -> "AcceptanceHead":
        """A head with these weights under a changed card."""
        other = AcceptanceHead(replace(self.card, **changes))
        other.load_state_dict(self.state_dict())
        return other.eval()

    def check(
        self, *, hidden_size: int, vocab_size: int | None = None, target: str | None = None, draft: str | None = None
    ) -> None:
        """Raise `HeadError` unless the head is of this width and, where its card says so, made for this pair."""
        card = self.card
        if card.hidden_size != hidden_size:
            raise HeadError(
                f"the head reads hidden states of width {card.hidden_size}, the draft has width {hidden_size}. "
                "Use the draft the head was trained on, or train a head for this one."
            )
        if None not in (card.vocab_size, vocab_size) and card.vocab_size != vocab_size:
            raise HeadError(
                f"the head has a row for each of {card.vocab_size} tokens, the pair has {vocab_size}. "
                "Use the pair the head was trained on, or train a head for this one."
            )
        for role, made_for, given in (("draft", card.draft, draft), ("target", card.target, target)):
            if None not in (made_for, given) and made_for != given:
                raise HeadError(
                    f"the head was made for another {role}: its card says {made_for}, this {role} is {given}. Train a head for "
                    "this pair, or load the pair it was made for."
                )

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `head.safetensors` and `head.json` into a folder, made if it is missing.

        Each is written whole or not at all, and the card has the digest of the weights: a run that is killed leaves what was
        there, or two files that are refused together. Raises `HeadError` for a folder that cannot be written.
        """
        weights = save({k: v.detach().float().cpu().contiguous() for k, v in self.state_dict().items()})
        card = self.card.to_json(**{DIGEST: digest(weights)})
        try:
            cache_dir.write(Path(folder) / WEIGHTS, weights)
            cache_dir.write(Path(folder) / CARD, card)
        except OSError as error:
            raise HeadError(f"the head cannot be written into {folder} ({error.strerror}). Name another folder.") from error

    @classmethod
    def from_pretrained(cls, source: str | Path) -> "AcceptanceHead":
        """Read a head: a folder of ours, a folder in the published reference form, or a hub name of either.

        Raises `HeadError` when nothing is there, the files are not a head, or the weights are not those that the card was
        written with. A card without their digest, of an earlier version or written by hand, is taken at its word.
        """
        from specdecpp.head.files import read

        return read(source)


def digest(weights: bytes) -> str:
    """The SHA-256 of a file of weights."""
    return hashlib.sha256(weights).hexdigest()


class RowEstimator:
    """P(accepted) of one row, in numpy, by a copy of a head's weights: for one row most of torch's time is dispatch.

    `arrays` are these weights in float32: weight [W, D + S] of the layer in front of the blocks or None, table [V or 1, W] of a
    token's row with that layer's bias, blocks [L, W, W], their biases [L, W], output [W], and the output's bias, a float.
    """

    def __init__(self, head: AcceptanceHead, calibration: Calibration):
        width, state = head.output.in_features, {name: _array(tensor) for name, tensor in head.state_dict().items()}
        bias = state.get("input.bias", np.zeros(width, np.float32))
        table = state["token.weight"] + bias if head.token else bias[None]

        def stacked(part: str, *shape: int) -> np.ndarray:
            layers = [state[f"blocks.{i}.linear.{part}"] for i in range(head.card.num_layers)]
            return np.array(layers, np.float32).reshape(-1, *shape)

        blocks, biases = stacked("weight", width, width), stacked("bias", width)
        output, output_bias = state["output.weight"][0], float(state["output.bias"][0])
        self.arrays = state.get("input.weight"), table, blocks, biases, output, output_bias
        self.card, self.calibration = head.card, calibration
        half = np.float32(0.5)  # x sigmoid(x) is h + h tanh(h) with h = x/2
        self._blocks = [(half * w, half * b) for w, b in zip(blocks, biases, strict=True)]
        self._shift, self._slope = math.log(calibration.rejection_weight), 1 / calibration.temperature

    @np.errstate(invalid="ignore")  # a BLAS may compute with what lies beside a short row, and numpy warns of that
    def __call__(self, hidden: Float[Tensor, " D"], token: int = 0, scalars: tuple[float, ...] = ()) -> float:
        weight, table, _, _, output, output_bias = self.arrays
        is_plain = hidden.dtype == torch.float32 and not hidden.requires_grad and hidden.device.type == "cpu"
        x = hidden.numpy() if is_plain else _array(hidden)
        if weight is not None:
            if scalars:
                x = np.concatenate((x, np.array(scalars, np.float32)))
            x = weight @ x
            x += table[token if len(table) > 1 else 0]
        for w, b in self._blocks:
            h = w @ x
            h += b
            gate = np.tanh(h)
            gate += 1
            gate *= h
            x = x + gate
        logit = (float(output @ x) + output_bias + self._shift) * self._slope + self.calibration.bias
        return 1 / (1 + math.exp(-min(max(logit, -700.0), 700.0)))


def _array(of: Tensor) -> np.ndarray:
    return of.detach().float().cpu().numpy().copy()
