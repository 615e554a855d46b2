"""A head that judges the candidates of a whole batch at once, step by step, on the device of the draft.

It says what `policies.head.HeadPolicy.judge` says of one candidate; tests/test_vllm_plugin.py compares the two.
"""

import copy

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specdecpp.head import AcceptanceHead, Calibration, features


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
        self._before: tuple[Tensor, Tensor] | None = None

    @torch.inference_mode()
    def __call__(
        self,
        hidden: Float[Tensor, "B D"],
        tokens: Int[Tensor, " B"],
        q: Float[Tensor, "B V"],
        *,
        is_greedy: Bool[Tensor, " B"] | None = None,
    ) -> Float[Tensor, " B"] | None:
        """P(accepted) of one candidate of each row, after a step: `hidden` is the draft's state, q the distribution that it
        gave and `tokens` what was drawn from it.

        `is_greedy` marks the rows at temperature 0; None: there are none.
        """
        self._depth += 1
        tokens = tokens.long()
        drawn = tokens, features.rows(self._head.card.scalars, tokens=tokens, q=q, depth=self._depth)
        judged, self._before = (drawn if self.looks_ahead else self._before), drawn
        if judged is None:
            return None
        logit = self._head(hidden, *judged)
        sampled, greedy = (calibration.apply(logit) for calibration in self._calibrations)
        return torch.sigmoid(sampled if is_greedy is None else torch.where(is_greedy, greedy, sampled))
