"""The acceptance head: a small residual network on the draft's hidden state that says how likely a candidate is accepted.

There are two forms. They differ in when a candidate Y_t can be judged:

lagged       from e_t, the draft's state *at* Y_t: D_h residual blocks x + SiLU(W x + b), then a linear output, the logit of
             acceptance (method.md 3; Huang et al. 2025, section 3.2). The forward pass on Y_t has then been paid for.
look-ahead   from e_{t-1}, the state that gave q_t, from Y_t's row of a small table, and from scalars such as log q(Y_t):
             as soon as Y_t is drawn (policies.md 4). The table is the head's own, so every runner can feed it.

The published reference has two outputs under a softmax, which is the same function of their difference, and all of its
blocks share one weight; `AcceptanceHead.from_pretrained` reads that form too.

On disk a head is a folder: `head.safetensors` and `head.json`, its card (`head_files`).
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from specdecpp.errors import HeadError
from specdecpp.loading.fingerprints import OLD_DIGITS

WEIGHTS, CARD = "head.safetensors", "head.json"
DIGEST = "weights_sha256"
"""The key of `head.json` that is about the other file."""
SCALARS = ("log_q", "entropy", "gap", "depth")
"""What may stand beside the hidden state: log q(Y) and the entropy of q in nats, the gap between its two largest
probabilities, the candidate's place in the round (from 1)."""


class Estimate(NamedTuple):
    """What a head says of one candidate: P(accepted), and the acceptance it expects of the next one if it has that output."""

    accept: float
    next: float | None = None


class Arrays(NamedTuple):
    """A head's weights as float32 arrays: what reads one row at a time without torch."""

    weight: np.ndarray | None
    """[W, D + S] of the layer in front of the blocks, None where there is none."""
    table: np.ndarray
    """[V or 1, W]: what a token adds to it, its bias included."""
    blocks: np.ndarray
    """[L, W, W]"""
    biases: np.ndarray
    """[L, W]"""
    output: np.ndarray
    """[O, W]: accept and, where the head has it, next."""
    output_bias: np.ndarray


Estimator = Callable[[Tensor, int, tuple[float, ...]], Estimate]
"""(hidden [D], token, scalars) -> estimate."""
OUTPUTS = ("accept", "next", "log_ratio")
"""What a head may say: the logit of P(Y accepted); the logit of the expected acceptance 1 - TV of the position after Y;
log p(Y) - log q(Y)."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """From the raw score s to a probability P, in logits: logit P = (logit s + log w) / temperature + bias.

    A loss that weighs rejections by w is minimised by s = P/(P + w(1 - P)); adding log w undoes it exactly
    (P = w s / (1 + (w - 1) s), method.md 4). Temperature and bias come from held-out labels.
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
    """What a head was made for and how. `target` and `draft` are fingerprints (`loading.fingerprints`), None when unknown."""

    hidden_size: int
    num_layers: int = 3
    form: str = "lagged"
    """`lagged` or `look_ahead`: whether it reads the state at the candidate, or the one before and the candidate."""
    scalars: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("accept",)
    width: int | None = None
    """Of the blocks; None: `hidden_size`, and without scalars no layer stands before them."""
    vocab_size: int | None = None
    """Rows of the token table of the look-ahead form."""
    target: str | None = None
    draft: str | None = None
    sampling: dict[str, Any] | None = None
    calibration: Calibration = field(default_factory=Calibration)
    greedy: Calibration | None = None
    """That of temperature 0, where a candidate is accepted for sure or not at all; None: as when sampling."""
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
        for name, given, known in (("scalars", self.scalars, SCALARS), ("outputs", self.outputs, OUTPUTS)):
            if unknown := [x for x in given if x not in known]:
                raise HeadError(f"{name}: {unknown[0]!r} is not one of {', '.join(known)}")
        if self.outputs[:1] != ("accept",):
            raise HeadError(f"the first output of a head is accept, got {', '.join(self.outputs) or 'none'}")
        if self.form not in ("lagged", "look_ahead"):
            raise HeadError(f"a head is lagged or look_ahead, got {self.form!r}")
        if self.form == "look_ahead" and not self.vocab_size:
            raise HeadError("a look-ahead head has a row for each token: its card needs vocab_size")

    @property
    def is_calibrated(self) -> bool:
        """Whether the calibrated score is a probability that held-out labels have checked."""
        return self.calibration.num_labels > 0

    def calibration_at(self, *, is_greedy: bool) -> Calibration:
        """The calibration of sampled or of greedy decoding."""
        return self.greedy if is_greedy and self.greedy else self.calibration

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "HeadCard":
        values = {name: value for name, value in json.loads(text).items() if name != DIGEST}
        values |= {name: tuple(values[name]) for name in ("scalars", "outputs") if name in values}
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
    """P(candidate accepted) from the draft's side of it. Always float32; rows are any leading axes.

    >>> head = AcceptanceHead(HeadCard(hidden_size=8, num_layers=1))
    >>> head(torch.zeros(5, 8)).shape
    torch.Size([5, 1])
    >>> ahead = AcceptanceHead(HeadCard(hidden_size=8, form="look_ahead", vocab_size=64, scalars=("log_q",), width=4))
    >>> ahead(torch.zeros(5, 8), torch.arange(5), torch.zeros(5, 1)).shape
    torch.Size([5, 1])
    """

    def __init__(self, card: HeadCard):
        super().__init__()
        self.card = card
        width = card.width or card.hidden_size
        has_input = card.width is not None or card.form == "look_ahead" or bool(card.scalars)
        self.input = nn.Linear(card.hidden_size + len(card.scalars), width) if has_input else None
        self.token = nn.Embedding(card.vocab_size or 0, width) if card.form == "look_ahead" else None
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(card.num_layers)))
        self.output = nn.Linear(width, len(card.outputs))

    def forward(
        self,
        hidden: Float[Tensor, "*rows D"],
        token: Int[Tensor, "*rows"] | None = None,
        scalars: Float[Tensor, "*rows S"] | None = None,
    ) -> Float[Tensor, "*rows O"]:
        """Raw outputs, a column for each of `card.outputs`; the first is the logit that the training loss sees.

        hidden is the state at the candidate (lagged) or the one that gave its q (look-ahead); `token` the candidate, read
        by the look-ahead form only; `scalars` a column for each of `card.scalars`.
        """
        x = hidden.float()
        if self.input is not None:
            x = self.input(x if scalars is None else torch.cat([x, scalars.float()], -1))
        if self.token is not None:
            assert token is not None, "the look-ahead form judges a token"
            x = x + self.token(token)
        return self.output(self.blocks(x))

    def estimate(
        self, hidden: Float[Tensor, " D"], token: int = 0, scalars: tuple[float, ...] = (), *, calibrated: bool = True
    ) -> Estimate:
        """What the head says of one candidate; P(accepted) raw (biased by the training weight) or calibrated."""
        return self.estimator(calibrated=calibrated)(hidden, token, scalars)

    def estimator(self, *, calibrated: bool = True, is_greedy: bool = False) -> Estimator:
        """`estimate` for many candidates, one at a time, with the weights as they are now; `is_greedy` at temperature 0.

        On a CPU it is written in numpy: for a single row of a small network most of torch's time is dispatch.
        """
        calibration = self.card.calibration_at(is_greedy=is_greedy) if calibrated else Calibration()
        if self.output.weight.device.type == "cpu":
            return RowEstimator(self, calibration)

        ahead = self.card.outputs.index("next") if "next" in self.card.outputs else None

        @torch.inference_mode()
        def estimate(hidden: Tensor, token: int, scalars: tuple[float, ...]) -> Estimate:
            of = torch.tensor(token, device=hidden.device)
            out = self(hidden, of, torch.tensor(scalars, device=hidden.device) if scalars else None)
            out[0] = calibration.apply(out[0])
            said = torch.sigmoid(out).tolist()
            return Estimate(said[0], None if ahead is None else said[ahead])

        return estimate

    def arrays(self) -> Arrays:
        """The weights as they are now, copied."""

        def array(of: Tensor) -> np.ndarray:
            return of.detach().float().cpu().numpy().copy()

        width = self.output.in_features
        rows = [self.card.outputs.index(name) for name in ("accept", "next") if name in self.card.outputs]
        blocks = cast(list[_Block], list(self.blocks))
        bias = np.zeros(width, np.float32) if self.input is None else array(self.input.bias)
        return Arrays(
            weight=None if self.input is None else array(self.input.weight),
            table=bias[None] if self.token is None else array(self.token.weight) + bias,
            blocks=np.array([array(b.linear.weight) for b in blocks], np.float32).reshape(-1, width, width),
            biases=np.array([array(b.linear.bias) for b in blocks], np.float32).reshape(-1, width),
            output=array(self.output.weight)[rows],
            output_bias=array(self.output.bias)[rows],
        )

    def with_card(self, **changes: Any) -> "AcceptanceHead":
        """The same weights under a changed card."""
        other = AcceptanceHead(replace(self.card, **changes))
        other.load_state_dict(self.state_dict())
        return other.eval()

    def check(
        self, *, hidden_size: int, vocab_size: int | None = None, target: str | None = None, draft: str | None = None
    ) -> None:
        """Raise `HeadError` unless the head is of this width and, where its card says so, made for this pair."""
        if self.card.hidden_size != hidden_size:
            raise HeadError(
                f"the head reads hidden states of width {self.card.hidden_size}, the draft has width {hidden_size}. "
                "Use the draft the head was trained on, or train a head for this one."
            )
        if None not in (self.card.vocab_size, vocab_size) and self.card.vocab_size != vocab_size:
            raise HeadError(
                f"the head has a row for each of {self.card.vocab_size} tokens, the pair has {vocab_size}. "
                "Use the pair the head was trained on, or train a head for this one."
            )
        for role, made_for, given in (("draft", self.card.draft, draft), ("target", self.card.target, target)):
            if made_for is not None and given is not None and len(made_for) == OLD_DIGITS != len(given):
                raise HeadError(
                    f"the head's card tells its {role} by {made_for}, which an earlier version made of a few weights; this "
                    f"{role} is {given}, of all of them. If it is the model the head was made for, write that as {role!r} into "
                    "its head.json."
                )
            if made_for is not None and given is not None and made_for != given:
                raise HeadError(
                    f"the head was made for another {role}: its card says {made_for}, this {role} is {given}. "
                    "Train a head for this pair, or load the pair it was made for."
                )

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `head.safetensors` and `head.json` into a folder, made if it is missing.

        Each is written whole or not at all, and the card has the digest of the weights: a run that is killed leaves what was
        there, or two files that are refused together. Raises `HeadError` for a folder that cannot be written.
        """
        from specdecpp import head_files

        head_files.write(self, Path(folder))

    @classmethod
    def from_pretrained(cls, source: str | Path) -> "AcceptanceHead":
        """Read a head: a folder of ours, a folder in the published reference form, or a hub name of either.

        Raises `HeadError` when nothing is there, the files are not a head, or the weights are not those that the card was
        written with. A card without their digest, of an earlier version or written by hand, is taken at its word.
        """
        from specdecpp import head_files

        return head_files.read(source)


class RowEstimator:
    """A head for one row, in numpy: P(accepted), and the output `next` where it has one. The weights are those of now."""

    def __init__(self, head: AcceptanceHead, calibration: Calibration):
        self.card, self.arrays, self.calibration = head.card, head.arrays(), calibration
        half = np.float32(0.5)  # x sigmoid(x) is h + h tanh(h) with h = x/2
        self._blocks = [(half * w, half * b) for w, b in zip(self.arrays.blocks, self.arrays.biases, strict=True)]
        self._shift, self._slope = math.log(calibration.rejection_weight), 1 / calibration.temperature

    @np.errstate(invalid="ignore")  # a BLAS may compute with what lies beside a short row, and numpy warns of that
    def __call__(self, hidden: Tensor, token: int, scalars: tuple[float, ...]) -> Estimate:
        weight, table, _, _, output, output_bias = self.arrays
        x = hidden.numpy() if hidden.dtype == torch.float32 and not hidden.requires_grad else hidden.detach().float().numpy()
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
        logit, *ahead = (output @ x + output_bias).tolist()
        accept = _sigmoid((logit + self._shift) * self._slope + self.calibration.bias)
        return Estimate(accept, _sigmoid(ahead[0]) if ahead else None)


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-min(max(logit, -700.0), 700.0)))
