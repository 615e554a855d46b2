"""A head that judges the candidates of a whole batch at once, step by step, on the device of the draft.

It says what `policies.head.HeadPolicy.judge` says of one candidate; tests/test_vllm_plugin.py compares the two.
"""

import copy
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdecpp.head import AcceptanceHead, Calibration


class Said(NamedTuple):
    """Of one candidate of each row: P(accepted), and the acceptance expected of the one after it, if the head has that."""

    accept: Float[Tensor, " B"]
    next: Float[Tensor, " B"] | None


class Judging:
    """One round of judgements: call `start`, then the judge once for every draft step.

    A look-ahead head judges the candidate that a step has just drawn, a lagged one the candidate that the step has read, so
    the first of its calls says nothing.
    """

    def __init__(self, head: AcceptanceHead, *, calibrated: bool = True, device: torch.device | str = "cpu"):
        self._head = copy.deepcopy(head).to(device)
        self._calibrations = [
            head.card.calibration_at(is_greedy=is_greedy) if calibrated else Calibration() for is_greedy in (False, True)
        ]
        self.looks_ahead = head.card.form == "look_ahead"
        self.start()

    def start(self) -> None:
        self._depth = 0
        self._before: tuple[Tensor, Tensor | None] | None = None

    @torch.inference_mode()
    def __call__(
        self,
        hidden: Float[Tensor, "B D"],
        tokens: Int[Tensor, " B"],
        q: Float[Tensor, "B V"],
        *,
        is_greedy: Bool[Tensor, " B"] | None = None,
    ) -> Said | None:
        """After a step: `hidden` is the draft's state, q the distribution that it gave and `tokens` what was drawn from it.

        `is_greedy` marks the rows at temperature 0; None: there are none.
        """
        self._depth += 1
        drawn = tokens.long(), self._scalars(tokens.long(), q)
        judged, self._before = (drawn if self.looks_ahead else self._before), drawn
        if judged is None:
            return None
        out = self._head(hidden, *judged)
        names = self._head.card.outputs
        sampled, greedy = (calibration.apply(out[:, 0]) for calibration in self._calibrations)
        accept = torch.sigmoid(sampled if is_greedy is None else torch.where(is_greedy, greedy, sampled))
        return Said(accept, torch.sigmoid(out[:, names.index("next")]) if "next" in names else None)

    def _scalars(self, tokens: Int[Tensor, " B"], q: Float[Tensor, "B V"]) -> Float[Tensor, "B S"] | None:
        if not self._head.card.scalars:
            return None
        return torch.stack([self._scalar(name, tokens, q) for name in self._head.card.scalars], -1)

    def _scalar(self, name: str, tokens: Int[Tensor, " B"], q: Float[Tensor, "B V"]) -> Float[Tensor, " B"]:
        match name:
            case "log_q":
                return q.gather(1, tokens[:, None])[:, 0].clamp_min(1e-30).log()
            case "entropy":
                return torch.special.entr(q).sum(-1)
            case "gap":
                top = q.topk(min(2, q.shape[-1])).values
                return top[:, 0] - top[:, 1] if top.shape[-1] > 1 else torch.zeros_like(top[:, 0])
            case _:  # depth
                return torch.full_like(q[:, 0], self._depth)
