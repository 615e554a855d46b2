"""A stop rule on the device of the draft: `policies.protocol.Rule` for all requests of a batch, with fixed addresses, so that a
graph can hold it. The host reads from pinned memory, `LAG` draft tokens late, if any request is worth another one.
"""

from typing import Any

import torch
from torch import Tensor

from specdecpp.policies import CostAware, Fixed, score
from specdecpp.policies.protocol import Evidence, Rule, rule_of
from specdecpp.policy_spec import PolicySpec

LAG = 1


class StopRule:
    """The evidence of every request, and flags by step."""

    def __init__(self, rule: Rule, max_num_reqs: int, max_tokens: int, device: torch.device):
        self._rule = rule
        self._least = torch.tensor(rule.thresholds(max_tokens + 1), dtype=torch.float32, device=device)
        self._evidence = torch.ones(max_num_reqs, device=device)
        self._goes_on = torch.ones(max_tokens, dtype=torch.int32, device=device)
        is_cuda = device.type == "cuda"
        self._host = torch.ones(max_tokens, dtype=torch.int32, pin_memory=is_cuda)
        self._copied: list[Any] = [torch.cuda.Event() for _ in range(max_tokens)] if is_cuda else []

    def start(self) -> None:
        self._evidence.fill_(1.0)

    def judge(self, logits: Tensor, tokens: Tensor, step: Tensor, temperature: Tensor, is_drafting: Tensor) -> None:
        """Add the draft token number `step` (from 0) of each request to its evidence."""
        scaled = logits.float() / temperature.masked_fill(temperature <= 0, 1.0).unsqueeze(-1)
        chosen = scaled.gather(-1, tokens.long().unsqueeze(-1)).squeeze(-1)
        q = (chosen - scaled.logsumexp(-1)).exp()
        evidence = self._evidence[: len(tokens)]
        if self._rule.evidence is Evidence.SURVIVAL:
            estimate = torch.logit(1 / (1 + (1 - q).clamp(min=score.MIN_OTHERS)), eps=score.CLIP)
            bias, slope = self._rule.score or score.Score()
            evidence.mul_(torch.sigmoid(bias + slope * estimate))
        elif self._rule.evidence is Evidence.PRODUCT_OF_Q:
            evidence.mul_(q)
        else:
            evidence.copy_(q)
        goes_on = (is_drafting & (evidence >= self._least.index_select(0, step.view(1) + 1))).any().int()
        self._goes_on.index_copy_(0, step.view(1), goes_on.view(1))

    def ends(self, num_drawn: int) -> bool:
        """True if no request wanted more than `num_drawn - LAG` draft tokens."""
        last, asked = num_drawn - 1, num_drawn - 1 - LAG
        self._host[last : last + 1].copy_(self._goes_on[last : last + 1], non_blocking=True)
        if self._copied:
            self._copied[last].record()
        if asked < 0:
            return False
        if self._copied:
            self._copied[asked].synchronize()
        return not self._host[asked]


def stop_rule(asked: PolicySpec, max_tokens: int) -> Rule | None:
    """The thresholds that may end a step, the same in every one; None where its length is chosen before it.

    Raises ValueError where the policy's thresholds differ from step to step, or read what is not at hand here.
    """
    if isinstance(asked.policy, CostAware | Fixed):
        return None
    is_unfit = asked.needs_head or asked.policy.drops_last
    rule = None if is_unfit else rule_of(asked.policy, asked.policy.start(), None)
    if rule is None or rule.evidence not in (Evidence.LAST_Q, Evidence.PRODUCT_OF_Q, Evidence.SURVIVAL):
        raise ValueError(
            f"vLLM's second model runner cannot follow {asked.policy}: it takes cost-aware, fixed:K, and rules with a "
            "threshold on the draft's probabilities that keep every draft token, such as cumulative:0.2."
        )
    return rule
