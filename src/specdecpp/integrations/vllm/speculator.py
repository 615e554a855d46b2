"""Route C: vLLM's second model runner, whose adaptive verification trims candidates by survival, with our head as the judge.

That runner always drafts `num_speculative_tokens`, and under load verifies those slots of a batch that are most likely to be
reached: it ranks them by the running product of `draft_token_confidence_probs`. vLLM fills these with what it learns online
from the draft's logits; here the head does.

Column k must be a function of the candidates before slot k, or trimming would change the distribution (`policies.protocol`).
So the head's judgement of candidate k stands in column k + 1, and column 0 is 1: whether the first slot is worth verifying
nobody has judged.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group  # pyright: ignore[reportMissingImports]
from vllm.v1.worker.gpu.spec_decode import init_speculator as vllm_init_speculator  # pyright: ignore[reportMissingImports]
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import (  # pyright: ignore[reportMissingImports]
    StandaloneARSpeculator,
)

from specdecpp.errors import HeadError
from specdecpp.integrations.vllm.heads import BESIDE, fitting_head
from specdecpp.integrations.vllm.judging import Judging
from specdecpp.integrations.vllm.log import logger
from specdecpp.integrations.vllm.settings import Settings


def init_speculator(vllm_config: Any, device: torch.device, *args: Any) -> Any:
    """What the runner calls in place of vLLM's own; other methods than a draft model go there."""
    if not vllm_config.speculative_config.uses_draft_model() or Settings.of(vllm_config) is None:
        return vllm_init_speculator(vllm_config, device, *args)
    return JudgedSpeculator(vllm_config, device)


class JudgedSpeculator(StandaloneARSpeculator):
    """Drafts as vLLM does and tells its adaptive verification what the head expects."""

    _judging: Judging

    def __init__(self, vllm_config: Any, device: torch.device):
        super().__init__(vllm_config, device)
        self.use_acceptance_estimator = False
        self._step = 0

    def load_model(self, target_model: Any) -> None:
        """The draft as vLLM loads it, then the head, checked against the pair. Raises `HeadError`."""
        super().load_model(target_model)
        settings = Settings.of(self.vllm_config)
        spec = self.speculative_config
        draft, target = spec.draft_model_config, spec.target_model_config
        sizes = {"hidden_size": draft.get_hidden_size(), "vocab_size": target.get_vocab_size()}
        head = fitting_head(settings.head if settings else None, target=target.model, draft=draft.model, **sizes)
        if head is None:
            raise HeadError(
                f"adaptive verification by a head needs one, and there is none at {draft.model}/{BESIDE}. Export one there, or "
                'name one under "head".'
            )
        self._judging = Judging(head, device=self.device)
        logger.info("adaptive verification follows a %s head", head.card.form)

    def propose(self, *args: Any, **kwargs: Any) -> Tensor:
        """A round of vLLM's. All ranks trim by what the first one's head said, so that rounding cannot part them."""
        self._step = 0
        self._judging.start()
        tokens = super().propose(*args, **kwargs)
        if get_tp_group().world_size > 1:
            get_tp_group().broadcast(self.draft_token_confidence_probs, src=0)
        return tokens

    def compute_draft_logits(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As vLLM's; they are kept until the step's candidates are drawn."""
        self._logits = super().compute_draft_logits(hidden_states, *args, **kwargs)
        return self._logits

    def sample_draft(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """One draft step: vLLM's own draw, then the head's judgement of it. Unknown arguments are passed on."""
        logits = self._logits = None
        tokens = super().sample_draft(hidden_states, *args, **kwargs)
        logits = self._logits
        assert logits is not None, "the draw computes logits"
        num_rows, confidences = len(tokens), self.draft_token_confidence_probs
        if not self._step:
            confidences[:num_rows, 0] = 1.0
        temperature = torch.where(self.temperature > 0, self.temperature, 1.0)[self.idx_mapping[:num_rows].clamp_min(0)]
        said = self._judging(hidden_states, tokens, (logits.float() / temperature[:, None]).softmax(-1))
        self._step += 1
        # A look-ahead head judges the candidate of this step, a lagged one that of the step before.
        column = self._step if self._judging.looks_ahead else self._step - 1
        if said is not None and column < confidences.shape[1]:
            confidences[:num_rows, column] = said
        return tokens
