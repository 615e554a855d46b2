"""The check of backends against transformers: what it takes for the truth, what it lets pass, and what it does not."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch

from specdecpp.backends import EagerModel, LeanModel, NativeModel, lean, native, probe
from specdecpp.backends.angles import Angles
from specdecpp.errors import BackendError
from specdecpp.testing import tiny_model

needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")


@cache
def chaotic() -> Any:
    """A model whose sums in bfloat16 are far from its own function, as those of SmolLM2 on the ids 1, 2, 3: sharp attention."""
    model = tiny_model("llama", seed=1, layers=24, head_dim=16)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(10)
    return model.bfloat16()


def test_the_models_own_rounding_is_not_held_against_a_backend() -> None:
    """Catches the refusal of every quick backend for a model in bfloat16, because transformers in bfloat16 is off itself."""
    model = chaotic()
    ids = probe.tokens(64)
    wide = probe.expected(model, ids)
    own = model(input_ids=torch.tensor([ids])).logits[0].detach()
    assert probe.gap(own, wide) > 0.1, "the model is too tame for this test"
    LeanModel(model)
    if native.compiler() is not None:
        NativeModel(model)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "gemma3_text"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_what_is_expected_is_the_model_in_float32(kind: str, is_tied: bool) -> None:
    """Catches a parameter that stays rounded, a tied output layer widened in one place only, and a model that is changed."""
    narrow = tiny_model(kind, tie_word_embeddings=is_tied).bfloat16()
    before = dict(narrow.named_parameters())
    ids = probe.tokens(64)
    found = probe.expected(narrow, ids)
    assert all(before[name] is parameter for name, parameter in narrow.named_parameters())
    assert {parameter.dtype for parameter in before.values()} == {torch.bfloat16}
    assert torch.equal(found, deepcopy(narrow).float()(input_ids=torch.tensor([ids])).logits[0].detach())


def test_the_weights_are_not_copied_as_a_whole() -> None:
    """Catches a check that takes as much memory again as the model: values go as soon as their module has been called."""
    model = tiny_model("llama", layers=4).bfloat16()
    most = 0

    def count(*_: object) -> None:
        nonlocal most
        wide = (p for m in model.modules() for p in m._parameters.values() if p is not None and p.dtype == torch.float32)
        most = max(most, sum(1 for _ in wide))

    hooks = [m.register_forward_hook(count, prepend=True) for m in model.modules()]
    probe.expected(model, probe.tokens(64))
    assert most == 1
    for hook in hooks:
        hook.remove()


def mirrored(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Angles.at
    monkeypatch.setattr(Angles, "at", lambda self, a, b: tuple(t.flip(-1) for t in at(self, a, b)))


def heavy(monkeypatch: pytest.MonkeyPatch) -> None:
    call = lean.Norm.__call__
    monkeypatch.setattr(lean.Norm, "__call__", lambda self, x: call(self, x) * 1.1)


def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean, "_mask", lambda n, num, window, like: like.new_zeros(n, num))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("twist", [mirrored, heavy, blind])
def test_a_wrong_angle_norm_or_mask_is_found_in_any_precision(
    twist: Callable[[pytest.MonkeyPatch], None], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a tolerance for half precision under which a backend of another model passes."""
    LeanModel(tiny_model("llama", seed=1).to(dtype))
    twist(monkeypatch)
    with pytest.raises(BackendError, match="other logits than transformers in float32"):
        LeanModel(tiny_model("llama", seed=1).to(dtype))


@needs_compiler
def test_a_wrong_angle_of_compiled_code_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the same in the compiled backend, whose sums are in float32: an angle two in a thousand too large is seen."""
    to = Angles.to
    monkeypatch.setattr(Angles, "to", lambda self, end: tuple(t * 1.002 for t in to(self, end)))
    with pytest.raises(BackendError, match="other logits than transformers in float32"):
        NativeModel(tiny_model("llama", seed=1, head_dim=16).bfloat16())


def test_logits_that_are_no_numbers_agree_with_nothing() -> None:
    """Catches a comparison that NaN passes."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(BackendError, match="difference nan"):
        LeanModel(model)


@pytest.mark.parametrize("vocab_size", [1, 5, 49152])
def test_ids_are_of_the_vocabulary_and_positions_of_the_context(vocab_size: int) -> None:
    """Catches an id past a small vocabulary, special tokens taken for text, and a probe longer than the context."""
    ids = probe.tokens(vocab_size)
    assert len(ids) == probe.NUM_TOKENS
    assert all(0 <= i < vocab_size for i in ids)
    assert vocab_size < 100 or (len(set(ids)) == len(ids) and min(ids) > 1000)
    for length in (1, 3, 7):
        found = probe.observed(EagerModel(tiny_model("llama", vocab_size=vocab_size)), probe.tokens(vocab_size, length))
        assert found.shape == (length, vocab_size)
