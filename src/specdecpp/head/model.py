"""The acceptance head as a torch module: any rows at once."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from specdecpp.errors import HeadError
from specdecpp.head.card import Calibration, HeadCard
from specdecpp.head.rows import Arrays, Estimator, RowEstimator
from specdecpp.loading.fingerprints import OLD_DIGITS


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
        self.token = nn.Embedding(card.vocab_size or 0, width) if card.form == "look_ahead" else None
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(card.num_layers)))
        self.output = nn.Linear(width, 1)

    def forward(
        self,
        hidden: Float[Tensor, "*rows D"],
        token: Int[Tensor, "*rows"] | None = None,
        scalars: Float[Tensor, "*rows S"] | None = None,
    ) -> Float[Tensor, "*rows"]:
        """The raw logit of acceptance, which the training loss sees.

        hidden is the state at the token (lagged) or the one that gave its q (look-ahead); `token` is read by the look-ahead
        form only; `scalars` has a column for each of `card.scalars` (`features.rows`).
        """
        x = hidden.float()
        if self.input is not None:
            x = self.input(x if scalars is None else torch.cat([x, scalars.float()], -1))
        if self.token is not None:
            assert token is not None, "the look-ahead form judges a token"
            x = x + self.token(token)
        return self.output(self.blocks(x)).squeeze(-1)

    def estimate(
        self, hidden: Float[Tensor, " D"], token: int = 0, scalars: tuple[float, ...] = (), *, calibrated: bool = True
    ) -> float:
        """P(accepted) of one token, raw (biased by the training weight) or calibrated."""
        return self.estimator(calibrated=calibrated)(hidden, token, scalars)

    def estimator(self, *, calibrated: bool = True, is_greedy: bool = False) -> Estimator:
        """`estimate` for many tokens, one at a time, with the weights as they are now; `is_greedy` at temperature 0."""
        calibration = self.card.calibration_at(is_greedy=is_greedy) if calibrated else Calibration()
        if self.output.weight.device.type == "cpu":
            return RowEstimator(self, calibration)

        @torch.inference_mode()
        def estimate(hidden: Tensor, token: int, scalars: tuple[float, ...]) -> float:
            row = torch.tensor(token, device=hidden.device), torch.tensor(scalars, device=hidden.device)
            return float(calibration.apply(self(hidden, *row)).sigmoid())

        return estimate

    def arrays(self) -> Arrays:
        """The weights as they are now, copied."""
        width = self.output.in_features
        blocks = cast(list[_Block], list(self.blocks))
        bias = np.zeros(width, np.float32) if self.input is None else _array(self.input.bias)
        return Arrays(
            weight=None if self.input is None else _array(self.input.weight),
            table=bias[None] if self.token is None else _array(self.token.weight) + bias,
            blocks=np.array([_array(b.linear.weight) for b in blocks], np.float32).reshape(-1, width, width),
            biases=np.array([_array(b.linear.bias) for b in blocks], np.float32).reshape(-1, width),
            output=_array(self.output.weight)[0],
            output_bias=self.output.bias.item(),
        )

    def with_card(self, **changes: Any) -> "AcceptanceHead":
        """A head with these weights under a changed card."""
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
        from specdecpp.head import files

        files.write(self, Path(folder))

    @classmethod
    def from_pretrained(cls, source: str | Path) -> "AcceptanceHead":
        """Read a head: a folder of ours, a folder in the published reference form, or a hub name of either.

        Raises `HeadError` when nothing is there, the files are not a head, or the weights are not those that the card was
        written with. A card without their digest, of an earlier version or written by hand, is taken at its word.
        """
        from specdecpp.head import files

        return files.read(source)


def _array(of: Tensor) -> np.ndarray:
    return of.detach().float().cpu().numpy().copy()
