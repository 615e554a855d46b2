"""vLLM's tests of its rejection sampler, over `verify` and `Sampling`. vLLM itself is not needed."""

from types import SimpleNamespace
from typing import Any

import torch
from sources import Source, adopted, loaded, stand_in
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import NoBadWordsLogitsProcessor, SuppressTokensLogitsProcessor

from specdecpp.integrations.processors import Processed
from specdecpp.sampling import Sampling, Uniforms, probabilities
from specdecpp.verify import TokenVerification, residual, verification_for

SOURCE = Source(repository="vllm-project/vllm", commit="v0.33.0", folders=("tests/v1/sample",))  # commit 4ba787ec9
NONE = -1
"""A place without a token."""
LEFT_OUT = {
    "test_sample_recovered_tokens": "compares bit for bit with vLLM's way to draw, an exponential race; ours inverts the sum",
    "test_sample_recovered_tokens_uses_fp64_exponential_race_when_requested": "the precision of that race",
    "test_frequency_penalties": "Sampling has no frequency penalty",
    "test_fly_*": "FLy changes the distribution",
    "test_synthetic_*": "acceptance at a given rate changes the distribution",
}


class SpecDecodeMetadata(SimpleNamespace):
    """Draft tokens of each request."""

    @classmethod
    def make_dummy(cls, drafts: list[list[int]], device: Any) -> "SpecDecodeMetadata":
        lengths = [len(draft) for draft in drafts]
        return cls(drafts=drafts, num_draft_tokens=lengths, cu_num_draft_tokens=torch.tensor(lengths).cumsum(0))


class RejectionSampler:
    """Our verification, request by request, with vLLM's signature."""

    def __init__(self, sampler: Any):
        self.sampler = sampler

    def __call__(self, metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any) -> SimpleNamespace:
        asked, bonus = sampling_metadata, self.sampler().sampled_token_ids.flatten().tolist()
        first = {name: getattr(asked, name)[0].item() for name in ("top_k", "top_p") if getattr(asked, name) is not None}
        sampling = Sampling(temperature=0.0 if asked.all_greedy else asked.temperature[0].item(), **first)
        places = torch.arange(len(logits)).split(metadata.num_draft_tokens)
        logits = torch.cat([constrained(logits[rows], metadata.drafts[i], i, asked) for i, rows in enumerate(places)])
        p, texts = probabilities(logits, sampling), []
        for i, (draft, rows) in enumerate(zip(metadata.drafts, places, strict=True)):
            known = draft[: draft.index(NONE)] if NONE in draft else draft
            after = p[rows[len(known)]] if known != draft else certain([bonus[i]], p)[0]
            q = certain(known, p) if draft_probs is None else draft_probs[rows]
            verdict = verification_for(sampling, TokenVerification())(
                torch.cat([p[rows[: len(known)]], after[None]]), q, torch.tensor(known, dtype=torch.long), uniforms(asked, i)
            )
            texts.append([*known[: verdict.num_accepted], verdict.next_token])
        width = 1 + max(metadata.num_draft_tokens)
        rows = [text + [NONE] * (width - len(text)) for text in texts]
        return SimpleNamespace(sampled_token_ids=torch.tensor(rows, dtype=torch.int))


def certain(tokens: list[int], like: Tensor) -> Tensor:
    """Distributions that are one at a token [len(tokens), V]."""
    rows = torch.zeros(len(tokens), like.shape[-1], dtype=like.dtype)
    rows[range(len(tokens)), tokens] = 1.0
    return rows


def uniforms(asked: Any, i: int) -> Uniforms:
    return Uniforms(asked.generators.get(i, torch.default_generator))


def constrained(logits: Tensor, draft: list[int], i: int, asked: Any) -> Tensor:
    """Logits of a request through the processors of transformers, as `custom_generate` applies them."""
    processors = LogitsProcessorList()
    if i in asked.bad_words_token_ids:
        processors.append(NoBadWordsLogitsProcessor(asked.bad_words_token_ids[i]))
    if asked.allowed_token_ids_mask is not None:
        processors.append(SuppressTokensLogitsProcessor(asked.allowed_token_ids_mask[i].nonzero().flatten().tolist()))
    if not processors:
        return logits
    model = SimpleNamespace(vocab_size=logits.shape[-1], hidden_size=0, max_length=None, device=logits.device)
    rows: Any = SimpleNamespace(model=model, extend=lambda tokens, rows: (logits, logits))
    text = [*(asked.output_token_ids[i] or [0]), *draft[:-1]]
    return Processed(rows, processors).extend(text, rows=len(draft))[0]


def sample_recovered_tokens(
    max_length: int, lengths: list[int], ends: Tensor, tokens: Tensor, q: Tensor | None, p: Tensor, asked: Any, device: Any
) -> Tensor:
    """A correction at every place, as if the draft token there were rejected."""
    q = certain(tokens.tolist(), p) if q is None else q
    owners = [i for i, length in enumerate(lengths) for _ in range(length)]
    return torch.tensor([uniforms(asked, i).categorical(residual(p[k], q[k])) for k, i in enumerate(owners)])


contents: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm.config": {},
    "vllm.platforms": {"current_platform": SimpleNamespace(device_type="cpu")},
    "vllm.utils": {},
    "vllm.utils.torch_utils": {},
    "vllm.v1": {},
    "vllm.v1.sample": {},
    "vllm.v1.sample.logits_processor": {},
    "vllm.v1.sample.metadata": {"SamplingMetadata": SimpleNamespace},
    "vllm.v1.sample.rejection_sampler": {
        "PLACEHOLDER_TOKEN_ID": NONE,
        "RejectionSampler": RejectionSampler,
        "sample_recovered_tokens": sample_recovered_tokens,
    },
    "vllm.v1.sample.sampler": {"SamplerOutput": SimpleNamespace},
    "vllm.v1.spec_decode": {},
    "vllm.v1.spec_decode.metadata": {"SpecDecodeMetadata": SpecDecodeMetadata},
}
modules = {name: stand_in(name, **parts) for name, parts in contents.items()}
folder = SOURCE.root / "tests/v1/sample"
modules |= {name: stand_in(name) for name in ("tests", "tests.v1", "tests.v1.sample")}
modules["tests.v1.sample.utils"] = loaded(folder / "utils.py", "vllm_tests_utils", modules)
globals().update(adopted(loaded(folder / "test_rejection_sampler.py", "vllm_tests", modules), LEFT_OUT))
