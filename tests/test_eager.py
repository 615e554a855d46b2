"""EagerModel against a fresh forward pass of the same model without a cache, and the models it must refuse."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import CACHE, KINDS, full_pass, model_of
from transformers import AutoModel, DynamicCache, LlamaForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.cache_utils import DynamicLayer

from specdecpp import BackendError
from specdecpp.backends import EagerModel
from specdecpp.testing import tiny_model

# A step: how many tokens to cut (capped by what is there), and which to append then.
STEPS = st.lists(st.tuples(st.integers(0, 6), st.lists(st.integers(0, 63), min_size=1, max_size=5)), min_size=1, max_size=8)


def check_steps(fresh_pass: Any, backend: Any, steps: list[tuple[int, list[int]]], tolerance: float = 1e-9) -> None:
    """Extend and roll back; after every step all appended rows must equal those of a fresh pass."""
    tokens: list[int] = []
    for num_cut, new in steps:
        tokens = tokens[: max(0, len(tokens) - num_cut)]
        backend.rollback(len(tokens))
        tokens = tokens + new
        rows = 1 + num_cut % len(new)
        logits, hidden = backend.extend(new, rows=rows)
        expected_logits, expected_hidden = fresh_pass(tokens)
        assert backend.length == len(tokens)
        torch.testing.assert_close(logits, expected_logits[-rows:], atol=tolerance, rtol=0)
        torch.testing.assert_close(hidden, expected_hidden[-rows:], atol=tolerance, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_any_sequence_of_extend_and_rollback_equals_one_fresh_pass(kind: str) -> None:
    """Catches a rollback that leaves or loses a position, a wrong position id or a wrong window mask."""
    is_exact = kind != "mixtral"  # torch's grouped matrix product of the experts has no float64
    model = model_of(kind, torch.float64 if is_exact else torch.float32)
    backend = EagerModel(model)

    @settings(max_examples=40)
    @given(STEPS)
    def run(steps: list[tuple[int, list[int]]]) -> None:
        check_steps(partial(full_pass, model), backend.new_cache(), steps, 1e-9 if is_exact else 1e-4)

    run()


def test_a_model_is_left_as_it_was_given() -> None:
    """Catches a hook that stays on a model that is the user's, also after a pass that fails."""
    model = tiny_model("llama")
    backend = EagerModel(model).new_cache()
    backend.extend([3], rows=1)
    with pytest.raises(IndexError):
        backend.extend([999], rows=1)
    assert not model.get_output_embeddings()._forward_pre_hooks


def test_threads_may_share_a_model() -> None:
    """Catches a pass that takes the hidden states of another thread's."""
    model = tiny_model("llama").double()
    first = EagerModel(model)
    texts = [[i, i + 1, i + 2] for i in range(3, 60)]

    def read(tokens: list[int]) -> torch.Tensor:
        return first.new_cache().extend(tokens, rows=1)[1]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(read, texts))
    for tokens, hidden in zip(texts, found, strict=True):
        torch.testing.assert_close(hidden, full_pass(model, tokens)[1][-1:], atol=1e-9, rtol=0)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_pass_that_failed_is_cut_off(layer: int) -> None:
    """Catches a rollback by what should have been read, where the cache of some layers has less."""
    model = tiny_model("llama").double()
    backend = EagerModel(model).new_cache()
    backend.extend([3, 4, 5, 6], rows=1)

    def fails(*_: Any) -> None:
        raise MemoryError

    hook = model.model.layers[layer].register_forward_pre_hook(fails)
    with pytest.raises(MemoryError):
        backend.extend([7, 8], rows=1)
    hook.remove()
    backend.rollback(3)
    logits, _ = backend.extend([9], rows=1)
    torch.testing.assert_close(logits, full_pass(model, [3, 4, 5, 9])[0][-1:], atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("kind", "config", "expected"),
    [
        ("llama", {"max_position_embeddings": 48}, 48),
        ("llama", {"max_position_embeddings": 48, "max_seq_len": 32}, 48),
        ("gpt2", {"max_position_embeddings": 40}, 40),
        ("opt", {"max_position_embeddings": 56}, 56),
        ("mpt", {"max_position_embeddings": None, "max_seq_len": 32}, 32),
        ("bloom", {"max_position_embeddings": None}, None),
    ],
)
def test_max_length_comes_from_the_config(kind: str, config: dict[str, Any], expected: int | None) -> None:
    """Catches a context limit that is missed (crash past the end) or invented, whatever the config calls it."""
    assert EagerModel(tiny_model(kind, **config)).max_length == expected


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_the_last_position_of_the_context_can_be_used(kind: str) -> None:
    """Catches a max_length that is one too large for learned positions."""
    backend = EagerModel(tiny_model(kind, max_position_embeddings=16)).new_cache()
    assert backend.max_length == 16
    backend.extend([3] * 15, rows=1)
    logits, _ = backend.extend([4], rows=1)
    assert logits.isfinite().all()


class TakesNoRows(LlamaForCausalLM):
    """A forward without logits_to_keep, as in code from the hub."""

    def forward(self, input_ids: Any = None, past_key_values: Any = None, use_cache: Any = None) -> Any:
        return super().forward(input_ids=input_ids, use_cache=use_cache, **{CACHE: past_key_values})


class Tiring(LlamaForCausalLM):
    """Its fourth pass is another one: a state that shows late."""

    calls = 0

    def forward(self, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        out = super().forward(*args, **{CACHE: past_key_values}, **kwargs)
        self.calls += 1
        out.logits = out.logits * (1.01 if self.calls > 3 else 1.0)
        return out


class Leaking(LlamaForCausalLM):
    """The token that follows weighs a hundredth."""

    def forward(self, input_ids: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:
        out = super().forward(input_ids=input_ids, **{CACHE: past_key_values}, **kwargs)
        out.logits[:, :-1] *= 1 + 0.01 * input_ids[:, 1:, None]
        return out


class Prefixed(LlamaForCausalLM):
    """Puts a token of its own before what it is given, as models with a learned prefix do."""

    def forward(self, input_ids: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:
        if past_key_values is not None and not past_key_values.get_seq_length():
            super().forward(input_ids=torch.tensor([[9]]), **{CACHE: past_key_values})
        return super().forward(input_ids=input_ids, **{CACHE: past_key_values}, **kwargs)


class KeepsItsOwnCache(LlamaForCausalLM):
    """Ignores the cache it is given."""

    def forward(self, input_ids: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids=input_ids, **{CACHE: DynamicCache()}, **kwargs)


class WantsAnotherCache(LlamaForCausalLM):
    """Fails on a cache of a kind it does not know, as models with indexed attention do."""

    def forward(self, input_ids: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:
        raise AttributeError("'DynamicLayer' object has no attribute 'update_indexer'")


def subclassed(kind: type[LlamaForCausalLM]) -> LlamaForCausalLM:
    model = tiny_model("llama")
    model.__class__ = kind
    return model


def test_a_model_without_logits_to_keep_gives_the_same_rows() -> None:
    """Catches rows taken from the wrong end where the model always scores every position."""
    model = subclassed(TakesNoRows).double()
    got = EagerModel(model).new_cache().extend([3, 4, 5, 6], rows=2)
    for rows, expected in zip(got, full_pass(tiny_model("llama").double(), [3, 4, 5, 6]), strict=True):
        torch.testing.assert_close(rows, expected[-2:], atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Tiring, "Tiring gives other logits after a rollback"),
        (Leaking, "Leaking gives a token other logits when another token follows it"),
        (KeepsItsOwnCache, "was given 3 tokens and its cache holds 0"),
        (Prefixed, "was given 3 tokens and its cache holds 4"),
        (WantsAnotherCache, "fails in a forward pass with a plain key-value cache .*update_indexer"),
    ],
)
def test_the_probe_refuses_a_model_whose_cache_cannot_be_trusted(kind: type[LlamaForCausalLM], reason: str) -> None:
    """Catches a model that loads, runs, and is silently wrong after the first rejected draft token."""
    with pytest.raises(BackendError, match=reason):
        EagerModel(subclassed(kind))


class Renamed(LlamaForCausalLM):
    """Calls its cache as transformers does from 5.24 on."""

    def forward(self, input_ids: Any = None, cache: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids=input_ids, **{CACHE: cache}, **kwargs)


def test_a_cache_may_have_another_name() -> None:
    """Catches a release of transformers in which no model is said to have a cache."""
    model = subclassed(Renamed).double()
    backend = EagerModel(model).new_cache()
    backend.extend([3, 4, 5], rows=1)
    backend.rollback(2)
    logits, _ = backend.extend([9], rows=1)
    torch.testing.assert_close(logits, full_pass(tiny_model("llama").double(), [3, 4, 9])[0][-1:], atol=1e-9, rtol=0)


def test_the_probe_sees_a_state_that_only_a_rollback_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a probe that compares nothing across the rollback: here crop itself does not cut."""
    monkeypatch.setattr(DynamicLayer, "crop", lambda layer, tokens_to_remove: None)
    with pytest.raises(BackendError, match="other logits"):
        EagerModel(model_of("llama"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_probe_lets_half_precision_pass(kind: str, dtype: torch.dtype) -> None:
    """Catches a probe so strict that rounding, or experts that group tokens differently, refuse a sound model."""
    logits, _ = EagerModel(model_of(kind, dtype)).new_cache().extend([3, 4, 5], rows=1)
    assert logits.dtype == dtype


def encoder_decoder() -> Any:
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, pad_token_id=0))


RECURRENT = r"keeps a recurrent state .*linear_attention.* cannot be rolled back"


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        *((partial(tiny_model, kind), RECURRENT) for kind in ("mamba", "recurrent_gemma", "jamba")),
        (partial(tiny_model, "qwen3_next", num_experts=2, moe_intermediate_size=16), RECURRENT),
        (encoder_decoder, "T5ForConditionalGeneration is an encoder-decoder"),
        (partial(tiny_model, "bert"), "BertLMHeadModel gives a token other logits when another token follows it"),
        (partial(tiny_model, "openai-gpt"), "OpenAIGPTLMHeadModel takes no past_key_values"),
        (lambda: AutoModel.from_config(model_of("llama").config), "LlamaModel has no output embeddings.*AutoModelForCausalLM"),
    ],
)
def test_models_without_a_plain_cache_are_refused_with_the_reason(model: Any, reason: str) -> None:
    """Catches a state that survives a rollback, an encoder's cache, tokens that see later ones, and AutoModel."""
    with pytest.raises(BackendError, match=reason):
        EagerModel(model())


def test_a_sound_model_is_taken_and_put_into_evaluation_mode() -> None:
    """Catches a decoder that is refused as an encoder, and dropout that stays on: two passes would differ."""
    EagerModel(tiny_model("bert", is_decoder=True))
    backend = EagerModel(tiny_model("gpt2").train())
    first, second = (backend.new_cache().extend([3, 4, 5], rows=1)[0] for _ in range(2))
    assert torch.equal(first, second)
