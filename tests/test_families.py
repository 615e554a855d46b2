"""Backends of known families compute what transformers computes: logits, states, windows, greedy text; and refuse the rest."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import BACKENDS, DEVICES, LONG, TEXT, VARIANTS, angles, built, each_backend, full_pass, model_of
from torch import nn

from specdecpp import Pair, load_pair
from specdecpp.backends import EagerModel, GraphModel, LeanModel, NativeModel, families
from specdecpp.backends.angles import Angles
from specdecpp.decoder import Decoder
from specdecpp.errors import BackendError
from specdecpp.policies import Fixed
from specdecpp.testing import save_tiny_pair, tiny_draft, tiny_model, tiny_tokenizer


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", list(VARIANTS))
@each_backend
def test_logits_and_states_are_those_of_transformers(backend: str, variant: str, device: str) -> None:
    """Catches a wrong angle, head order, norm, bias, scale, mask, window or edge of a panel, in whatever parts it is read."""
    if backend == "native" and device != "cpu":
        pytest.skip("it runs on a CPU")
    model = BACKENDS[backend](built(variant).to(device))
    text = LONG[: min(90, model.max_length or 90)]
    expected = full_pass(built(variant).to(device), text)
    for cuts in ((len(text),), (4, *range(5, 13), len(text)), (1, 3, 6, 10, len(text))):
        cache = model.new_cache()
        steps = [cache.extend(text[a:b], rows=b - a) for a, b in zip((0, *cuts), cuts, strict=False)]
        for which in range(2):
            found = torch.cat([step[which] for step in steps])
            torch.testing.assert_close(found, expected[which], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("window", [15, 16, 17, 31, 32, 33, 64, 100, 1024])
@each_backend
def test_texts_longer_than_a_window_the_room_and_one_pass(backend: str, window: int) -> None:
    """Catches a window one too wide or narrow at a block's edge or counted from a part, a cache that grows without what it had,
    parts of a prompt that do not see each other, more rows than one pass has, and what a rollback leaves behind."""
    config = {"max_position_embeddings": 1024, "sliding_window": window}
    expected = full_pass(built("gemma3", **config), LONG)
    cache = BACKENDS[backend](built("gemma3", **config)).new_cache()

    def check(start: int, end: int) -> None:
        """Read the text up to `end`, and compare what is seen of it from `start` on."""
        for found, whole in zip(cache.extend(LONG[cache.length : end], rows=end - start), expected, strict=True):
            torch.testing.assert_close(found, whole[start:end], atol=1e-3, rtol=1e-3)

    cache.extend([7] * 90, rows=1)
    cache.rollback(0)
    check(100, 700)
    cache.rollback(150)
    check(150, 383)
    check(383, 616)


@pytest.mark.parametrize("variant", ["qwen2", "phi3", "gemma3-scaled"])
def test_the_model_computes_what_it_did(variant: str) -> None:
    """Catches weights that are changed by being joined, or held twice."""
    model, same = built(variant), built(variant)
    lean = LeanModel(model)
    for (name, own), other in zip(model.named_parameters(), same.parameters(), strict=True):
        assert torch.equal(own, other), name
    ids = torch.tensor([TEXT])
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, same(input_ids=ids).logits, atol=1e-5, rtol=1e-5)
    layer = model.model.layers[0]
    projection = layer.self_attn.qkv_proj if variant == "phi3" else layer.self_attn.q_proj
    assert projection.weight.untyped_storage().data_ptr() == lean._layers[0].qkv.untyped_storage().data_ptr()


@pytest.mark.parametrize("backend", ["lean", "graphs"])
@pytest.mark.parametrize("variant", ["llama", "phi3-partial", "gemma3"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-5), (torch.bfloat16, 0.1)])
def test_other_types_of_weights(variant: str, dtype: torch.dtype, tolerance: float, backend: str) -> None:
    """Catches a table of angles, a mask or a softmax in half precision. (transformers takes norms and angles in float32.)"""
    caches = [BACKENDS[name](built(variant).to(dtype)).new_cache() for name in ("eager", backend)]
    (expected, _), (logits, hidden) = (cache.extend(TEXT, rows=6) for cache in caches)
    assert logits.dtype == hidden.dtype == dtype
    gap = (logits - expected).abs().max() / expected.abs().max()
    assert float(gap) < tolerance


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_a_description_names_every_weight_once(variant: str) -> None:
    """Catches a weight that no backend would read, one that is read twice, and a description that needs their values."""
    model = built(variant)
    family = families.described(model)
    names = [family.embedding, family.norm, *{family.output} - {family.embedding}]
    for layer in family.layers:
        names += [name for name in vars(layer).values() if isinstance(name, str)]
        names += [*layer.qkv, *layer.qkv_bias, *(layer.head_norms or ()), *layer.gate_up]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    with torch.device("meta"):
        empty = type(model)(model.config)
    assert families.described(empty) == family
    assert families.refusal(empty) is None
    for view in family.views:
        of = [Angles(families.Sketch.of(m).rotary, dtype=torch.float32, kind=view.angles) for m in (model, empty)]
        assert all(map(torch.equal, of[0].to(9), of[1].to(9)))


@each_backend
def test_longrope_is_read_up_to_where_its_angles_change(backend: str) -> None:
    """Catches the factors of long texts left behind in the model, and a context that goes on past the original length."""
    model = built("phi3-longrope")
    with torch.no_grad():
        model(input_ids=torch.tensor([TEXT + TEXT]))
    tables = [Angles(m.model.rotary_emb, dtype=torch.float32).to(16) for m in (model, built("phi3-longrope"))]
    assert all(map(torch.equal, *tables))
    cache = BACKENDS[backend](model).new_cache()
    assert cache.max_length == 16
    expected, _ = full_pass(built("phi3-longrope"), TEXT)
    torch.testing.assert_close(cache.extend(TEXT, rows=12)[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", ["llama", "qwen3", "phi3", "gemma3", "mistral-window"])
@each_backend
def test_greedy_text_is_the_targets_own(backend: str, variant: str) -> None:
    """Catches differences that only a decoded text shows, past its window; none of these texts has a near tie."""
    model, plain = built(variant), built(variant)
    target, draft = BACKENDS[backend](model), BACKENDS[backend](tiny_draft(built(variant)))
    pair = Pair(target=target, draft=draft, tokenizer=tiny_tokenizer())
    ids = torch.tensor([[3 + start, 5, 9] for start in range(6)])
    own = plain.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40, min_new_tokens=40, eos_token_id=None
    )
    for start, (prompt, text) in enumerate(zip(ids.tolist(), own[:, 3:].tolist(), strict=True)):
        out = Decoder(pair, policy=Fixed(k=(0, 1, 3, 9)[start % 4])).generate(
            prompt, max_tokens=40, temperature=0, ignore_eos=True
        )
        assert list(out.tokens) == text


class Packed(nn.Linear):
    """Stands for the linear layer of a quantisation."""


def altered(do: Callable[[Any], object]) -> Callable[[], Any]:
    """A tiny Llama to which something is done."""

    def made() -> Any:
        model = tiny_model("llama")
        do(model.model)
        return model

    return made


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: model_of("gpt2"), "it is not one of LlamaForCausalLM"),
    (lambda: tiny_model("gemma"), "it is not one of LlamaForCausalLM"),
    (lambda: tiny_model("llama", sliding_window=6), "a window of 6"),
    (lambda: tiny_model("llama", **angles("dynamic", factor=2.0)), "rotary angles are dynamic"),
    (lambda: tiny_model("llama", mlp_bias=True), "layers have biases"),
    (lambda: built("gemma3", final_logit_softcapping=30.0), "logits are squeezed below 30"),
    (lambda: built("gemma3", attn_logit_softcapping=50.0), "scores are squeezed below 50"),
    (lambda: built("gemma3", use_bidirectional_attention=True), "tokens see those after them"),
    (lambda: built("gemma3", sliding_window=0), "window is 0 positions wide"),
    (lambda: tiny_model("llama", hidden_act="gelu"), "gated by gelu"),
    (altered(lambda m: setattr(m.layers[1].self_attn.o_proj, "bias", nn.Parameter(torch.zeros(32)))), "output bias"),
    (altered(lambda m: m.norm.bfloat16()), "of several types"),
    (altered(lambda m: setattr(m.layers[0].mlp.up_proj, "__class__", Packed)), "quantised"),
    (altered(lambda m: setattr(m.layers[1], "_hf_hook", object())), "spread over devices"),  # as accelerate marks it
]


@pytest.mark.parametrize(("model", "reason"), REFUSED)
def test_what_is_not_described_is_refused(model: Any, reason: str) -> None:
    """Catches a model that is run as something it is not."""
    made = model()
    with pytest.raises(BackendError, match=f"cannot be run lean: .*{reason}.*Use EagerModel"):
        LeanModel(made)
    assert reason in (GraphModel.refusal(made) or "")
    assert reason in (NativeModel.refusal(made) or "")


def test_refusals_of_one_backend(tmp_path: Path) -> None:
    """Catches a model that would be computed wrongly, or a slow choice, found out too late."""
    assert "it is on meta, and graphs are for CUDA" in (GraphModel.refusal(tiny_model("llama").to("meta")) or "")
    assert "multiple of 16" in (NativeModel.refusal(tiny_model("llama")) or "")
    assert "float64 on cpu" in (NativeModel.refusal(built("llama").to(torch.float64)) or "")
    llama, other = save_tiny_pair(tmp_path / "llama"), save_tiny_pair(tmp_path / "gpt2", kind="gpt2")
    for kind, reason in {"graphs": "not on a GPU", "native": "multiple of 16|no C\\+\\+ compiler"}.items():
        with pytest.raises(BackendError, match=reason):
            load_pair(llama[0], draft=llama[1], backend=kind)
    assert type(load_pair(llama[0], draft=llama[1], backend="eager").target) is EagerModel
    assert type(load_pair(llama[0], draft=llama[1], backend="lean").target) is LeanModel
    assert type(load_pair(other[0], draft=other[1]).target) is EagerModel
    with pytest.raises(BackendError, match="lean: it is not one of"):
        load_pair(other[0], draft=other[1], backend="lean")
