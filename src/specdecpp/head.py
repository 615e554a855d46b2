"""The acceptance head: a small residual network on the draft's hidden state that says how likely a candidate is accepted.

D_h residual blocks x + SiLU(W x + b), then one linear output, the logit of acceptance (method.md 3; Huang et al. 2025,
section 3.2). The published reference has two outputs under a softmax, which is the same function of their difference, and
all of its blocks share one weight; `AcceptanceHead.from_pretrained` reads that form too.

On disk a head is a folder: `head.safetensors` and `head.json`, its card.
"""

import json
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specdecpp.errors import HeadError

WEIGHTS, CARD = "head.safetensors", "head.json"
_REFERENCE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """From the raw score s to a probability P, in logits: logit P = (logit s + log w) / temperature + bias.

    A loss that weighs rejections by w is minimised by s = P/(P + w(1 - P)); adding log w undoes it exactly
    (P = w s / (1 + (w - 1) s), method.md 4). Temperature and bias come from held-out labels.
    """

    rejection_weight: float = 1.0
    temperature: float = 1.0
    bias: float = 0.0

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
    """What a head was made for and how. `target` and `draft` are fingerprints (`pair.fingerprint`), None when unknown."""

    hidden_size: int
    num_layers: int = 3
    target: str | None = None
    draft: str | None = None
    sampling: dict[str, Any] | None = None
    calibration: Calibration = field(default_factory=Calibration)
    threshold: float | None = None
    """The stopping threshold tuned on a development split, on the raw score; None when nobody tuned it."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Provenance and figures: command, versions, seeds, data, losses."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "HeadCard":
        values = json.loads(text)
        return cls(**{**values, "calibration": Calibration(**values.get("calibration", {}))})


class _Block(nn.Module):
    """x + SiLU(W x + b)."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)  # starts as the identity, as the reference does

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


class AcceptanceHead(nn.Module):
    """P(candidate accepted) from the draft's hidden state e [D] at that candidate. Always float32.

    >>> head = AcceptanceHead(HeadCard(hidden_size=8, num_layers=1))
    >>> head(torch.zeros(5, 8)).shape
    torch.Size([5])
    """

    def __init__(self, card: HeadCard):
        super().__init__()
        if card.hidden_size < 1 or card.num_layers < 0:
            raise HeadError(
                "a head needs hidden_size of at least 1 and num_layers of at least 0, got "
                f"hidden_size={card.hidden_size} and num_layers={card.num_layers}"
            )
        self.card = card
        self.blocks = nn.Sequential(*(_Block(card.hidden_size) for _ in range(card.num_layers)))
        self.output = nn.Linear(card.hidden_size, 1)

    def forward(self, hidden: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows"]:
        """Logits of the raw score (the one the training loss sees)."""
        return self.output(self.blocks(hidden.float())).squeeze(-1)

    @torch.inference_mode()
    def accept_probability(self, hidden: Float[Tensor, " D"], *, calibrated: bool = True) -> float:
        """The estimate for one candidate; raw (biased by the training weight) or calibrated."""
        logit = self(hidden)
        return float(torch.sigmoid(self.card.calibration.apply(logit) if calibrated else logit))

    def with_card(self, **changes: Any) -> "AcceptanceHead":
        """The same weights under a changed card."""
        other = AcceptanceHead(replace(self.card, **changes))
        other.load_state_dict(self.state_dict())
        return other.eval()

    def check(self, *, hidden_size: int, target: str | None = None, draft: str | None = None) -> None:
        """Raise `HeadError` unless the head is of this width and, where its card says so, made for this pair."""
        if self.card.hidden_size != hidden_size:
            raise HeadError(
                f"the head reads hidden states of width {self.card.hidden_size}, the draft has width {hidden_size}. "
                "Use the draft the head was trained on, or train a head for this one."
            )
        for role, made_for, given in (("draft", self.card.draft, draft), ("target", self.card.target, target)):
            if made_for is not None and given is not None and made_for != given:
                raise HeadError(
                    f"the head was made for another {role}: its card says {made_for}, this {role} is {given}. "
                    "Train a head for this pair, or load the pair it was made for."
                )

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `head.safetensors` and `head.json` into a folder, made if it is missing.

        Both are written under other names first: a run that is killed leaves what was there.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights, card = folder / f"{WEIGHTS}.part", folder / f"{CARD}.part"
        save_file({k: v.detach().float().cpu().contiguous() for k, v in self.state_dict().items()}, weights)
        card.write_text(self.card.to_json(), encoding="utf-8")
        weights.replace(folder / WEIGHTS)
        card.replace(folder / CARD)

    @classmethod
    def from_pretrained(cls, source: str | Path) -> "AcceptanceHead":
        """Read a head: a folder of ours, a folder in the published reference form, or a hub name of either.

        Raises `HeadError` when nothing is there or the files are not a head.
        """
        folder = _locate(source)
        try:
            if (folder / CARD).is_file():
                head = cls(HeadCard.from_json((folder / CARD).read_text(encoding="utf-8")))
                head.load_state_dict(load_file(folder / WEIGHTS))
            else:
                head = _read_reference(folder)
        except HeadError:
            raise
        except Exception as error:  # json, safetensors and pickle each have errors of their own
            raise HeadError(
                f"{folder} does not hold a readable head ({type(error).__name__}: {error}). A head is a folder with "
                f"{CARD} and {WEIGHTS}; write one with save_pretrained."
            ) from error
        return head.eval()


def _locate(source: str | Path) -> Path:
    folder = Path(source)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise HeadError(f"{folder} is a file. Give the folder that holds {CARD} (or config.json) and the weights.")
    if str(source).count("/") != 1 or str(source).startswith((".", "/", "~")):
        raise HeadError(f"there is no head at {folder}. Give a folder with {CARD} and {WEIGHTS}, or a hub name.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(source)))
    except Exception as error:  # the hub's own exceptions differ between its versions
        raise HeadError(f"{source} is neither a local folder nor a head that the hub can deliver ({error}).") from error


def _read_reference(folder: Path) -> AcceptanceHead:
    """The form of the authors' checkpoint: config.json {hidden_size, num_layers}; keys model.{i}.linear.*, model.{D}.*."""
    config_path = folder / "config.json"
    weights = next((folder / name for name in _REFERENCE_WEIGHTS if (folder / name).is_file()), None)
    if not config_path.is_file() or weights is None:
        raise HeadError(
            f"{folder} holds no head: expected {CARD} and {WEIGHTS}, or config.json with "
            f"{' or '.join(_REFERENCE_WEIGHTS)}; found {', '.join(sorted(p.name for p in folder.iterdir())) or 'nothing'}."
        )
    config = json.loads(config_path.read_text(encoding="utf-8"))
    is_bin = weights.suffix == ".bin"
    state = torch.load(weights, map_location="cpu", weights_only=True) if is_bin else load_file(weights)
    state = {name: tensor.float() for name, tensor in state.items()}  # before the subtraction below, which would round
    num_layers = int(config["num_layers"])
    head = AcceptanceHead(HeadCard(hidden_size=int(config["hidden_size"]), num_layers=num_layers, notes={"form": "reference"}))
    # Tied blocks may be stored once: safetensors drops duplicates and keeps the first name.
    is_stored_once = not any(f"model.{i}.linear.weight" in state for i in range(1, num_layers))
    ours = {}
    for i in range(num_layers):
        at = 0 if is_stored_once else i
        ours |= {f"blocks.{i}.linear.{part}": state[f"model.{at}.linear.{part}"] for part in ("weight", "bias")}
    last_weight, last_bias = state[f"model.{num_layers}.weight"], state[f"model.{num_layers}.bias"]
    if last_weight.shape[0] != 2:
        raise HeadError(f"the reference form has two outputs (reject, accept); {weights} has {last_weight.shape[0]}")
    ours |= {"output.weight": last_weight[1:] - last_weight[:1], "output.bias": last_bias[1:] - last_bias[:1]}
    head.load_state_dict(ours)
    return head
