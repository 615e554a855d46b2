"""EagerModel against a fresh forward pass of the same model without a cache, and the models it must refuse."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import CACHE, KINDS, full_pass, model_of
from transformers import AutoModel, DynamicCache, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from specdecpp import BackendError
from specdecpp.backends import EagerModel
from specdecpp.testing import tiny_model

# A step: how many tokens to cut (capped by what is there), and which to append then.
STEPS = st.lists(st.tuples(st.integers(0, 6), st.lists(st.integers(0, 63), min_size=1, max_size=5)), min_size=1, max_size=8)


def check_steps(fresh_pass: Any, cache: Any, steps: list[tuple[int, list[int]]], tolerance: float = 1e-9) -> None:
    """Extend and roll back; after every step all appended rows must equal those of a fresh pass."""
    tokens: list[int] = []
    for num_cut, new in steps:
        tokens = tokens[: max(0, len(tokens) - num_cut)]
        cache.rollback(len(tokens))
        tokens = tokens + new
        rows = 1 + num_cut % len(new)
        for found, expected in zip(cache.extend(new, rows=rows), fresh_pass(tokens), strict=True):
            torch.testing.assert_close(found, expected[-rows:], atol=tolerance, rtol=0)
        assert cache.length == len(tokens)


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


class Changed(LlamaForCausalLM):
    """A model as in code from the hub: `way` is what its forward does with the usual one, the ids and the cache."""

    way: Any = None

    def forward(self, input_ids: Any = None, past_key_values: Any = None, use_cache: Any = None) -> Any:  # no logits_to_keep
        return self.way(
            lambda ids, cache: super(Changed, self).forward(input_ids=ids, **{CACHE: cache}), input_ids, past_key_values
        )


class Renamed(LlamaForCausalLM):
    """Calls its cache as transformers does from 5.24 on."""

    def forward(self, input_ids: Any = None, cache: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids=input_ids, **{CACHE: cache}, **kwargs)


def changed(way: Any, kind: type[LlamaForCausalLM] = Changed) -> LlamaForCausalLM:
    model = tiny_model("llama")
    model.__class__, model.way = kind, way
    return model


def leaking(forward: Any, ids: Any, cache: Any) -> Any:
    """The token that follows weighs a hundredth."""
    out = forward(ids, cache)
    out.logits[:, :-1] *= 1 + 0.01 * ids[:, 1:, None]
    return out


def prefixed(forward: Any, ids: Any, cache: Any) -> Any:
    """A token of the model's own goes before what it is given, as in models with a learned prefix."""
    if not cache.get_seq_length():
        forward(torch.tensor([[9]]), cache)
    return forward(ids, cache)


def tiring(forward: Any, ids: Any, cache: Any, passes: Any = count(1)) -> Any:  # noqa: B008 (one model has it)
    """The fourth pass is another one: a state that shows late."""
    out = forward(ids, cache)
    out.logits *= 1.01 if next(passes) > 3 else 1.0
    return out


@pytest.mark.parametrize("kind", [Changed, Renamed])
def test_a_forward_may_take_less_and_name_its_cache_otherwise(kind: type[LlamaForCausalLM]) -> None:
    """Catches rows from the wrong end where a model scores every position, and a release of transformers without caches."""
    backend = EagerModel(changed(lambda forward, ids, cache: forward(ids, cache), kind).double()).new_cache()
    backend.extend([3, 4, 5], rows=1)
    backend.rollback(2)
    for rows, expected in zip(
        backend.extend([9, 6, 7], rows=2), full_pass(tiny_model("llama").double(), [3, 4, 9, 6, 7]), strict=True
    ):
        torch.testing.assert_close(rows, expected[-2:], atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        (tiring, "Changed gives other logits after a rollback"),
        (leaking, "Changed gives a token other logits when another token follows it"),
        (lambda forward, ids, cache: forward(ids, DynamicCache()), "was given 3 tokens and its cache holds 0"),
        (prefixed, "was given 3 tokens and its cache holds 4"),
        (lambda *_: {}["update_indexer"], "fails in a forward pass with a plain key-value cache .*update_indexer"),
    ],
)
def test_the_probe_refuses_a_model_whose_cache_cannot_be_trusted(way: Any, reason: str) -> None:
    """Catches a model that loads, runs, and is silently wrong after the first rejected draft token."""
    with pytest.raises(BackendError, match=reason):
        EagerModel(changed(way))


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


def test_a_pass_that_fails_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches tokens that are counted and were not read: the next pass answered without them."""
    model = EagerModel(tiny_model("llama", seed=1))
    cache, tokens = model.new_cache(), [3, 4, 5, 6]
    cache.extend(tokens[:2], rows=1)
    with monkeypatch.context() as patch:
        patch.setattr(model.model.model.layers[-1], "forward", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            cache.extend(tokens[2:], rows=1)
    assert cache.length == 2
    expected, _ = model.new_cache().extend(tokens, rows=2)
    torch.testing.assert_close(cache.extend(tokens[2:], rows=2)[0], expected)
