"""The lean backend computes what transformers computes: logits, hidden states, rollbacks, greedy text; and refuses the rest."""

from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import model_of
from torch import nn

from specdecpp import Pair, load_pair
from specdecpp.backends import EagerModel, LeanModel, families
from specdecpp.backends.angles import Angles
from specdecpp.decoder import Decoder
from specdecpp.errors import BackendError
from specdecpp.policies import Fixed
from specdecpp.testing import save_tiny_pair, tiny_draft, tiny_model, tiny_tokenizer

SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "phi3": ("phi3", {}),
    "gemma3": ("gemma3_text", SLIDING),
    "mistral-window": ("mistral", {"sliding_window": 6}),
}


def angles(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4} | more}


LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {"original_max_position_embeddings": 16, "short_factor": [1.0, 1.5, 2.0, 4.0], "long_factor": [9.0] * 4}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **KINDS,
    "tied": ("llama", {"tie_word_embeddings": True}),
    "one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "as-many-kv-heads": ("llama", {"num_key_value_heads": 4}),
    "wide-heads": ("qwen3", {"head_dim": 16}),
    "llama3-angles": ("llama", angles("llama3", **LLAMA3)),
    "linear-angles": ("llama", angles("linear", factor=2.0)),
    "yarn-angles": ("qwen3", angles("yarn", factor=4.0, original_max_position_embeddings=32)),
    "window-of-one": ("mistral", {"sliding_window": 1}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3-window": ("qwen3", {"use_sliding_window": True} | SLIDING),
    "phi3-window": ("phi3", {"sliding_window": 6}),
    "phi3-partial": ("phi3", angles("default", partial_rotary_factor=0.5)),
    "phi3-longrope": ("phi3", {"original_max_position_embeddings": 16} | angles("longrope", **LONGROPE)),
    "gemma3-scaled": (
        "gemma3_text",
        SLIDING
        | {"query_pre_attn_scalar": 20, "tie_word_embeddings": True, "head_dim": 16}
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            }
        },
    ),
}
TEXT = [1, 7, 3, 9, 12, 30, 2, 5, 41, 8, 8, 17]


def built(variant: str, **more: Any) -> Any:
    """A tiny model whose norms and biases differ from each other and from what they begin as."""
    kind, config = VARIANTS[variant]
    model, generator = tiny_model(kind, seed=1, **(config | more)), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="module", params=list(VARIANTS))
def pair_of_runners(request: pytest.FixtureRequest) -> tuple[EagerModel, LeanModel]:
    """transformers' own pass over untouched weights, and the lean one over the same weights."""
    return EagerModel(built(request.param)), LeanModel(built(request.param))


def test_logits_and_states_are_those_of_transformers(pair_of_runners: tuple[EagerModel, LeanModel]) -> None:
    """Catches a wrong angle, head order, norm or mask: read at once, and token by token."""
    eager, lean = (r.new_cache() for r in pair_of_runners)
    expected, states = eager.extend(TEXT, rows=len(TEXT))
    logits, hidden = lean.extend(TEXT, rows=len(TEXT))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(hidden, states, atol=1e-4, rtol=1e-4)
    lean = pair_of_runners[1].new_cache()
    steps = [lean.extend(TEXT[:4], rows=4), *(lean.extend([t], rows=1) for t in TEXT[4:7]), lean.extend(TEXT[7:], rows=5)]
    torch.testing.assert_close(torch.cat([s[0] for s in steps]), expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_the_eager_runner_is_the_models_own_pass(pair_of_runners: tuple[EagerModel, LeanModel]) -> None:
    """Catches a window that transformers forgets over a cache which keeps every position: the measure of these tests is then
    not that of a pass without any cache."""
    eager, _ = (r.new_cache() for r in pair_of_runners)
    plain, states = eager.model.offline_pass(input_ids=torch.tensor([TEXT]))
    steps = [eager.extend(TEXT[:4], rows=4), *(eager.extend([t], rows=1) for t in TEXT[4:7]), eager.extend(TEXT[7:], rows=5)]
    torch.testing.assert_close(torch.cat([s[0] for s in steps]), plain[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat([s[1] for s in steps]), states[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", ["mistral-window", "gemma3", "qwen2-window"])
@torch.inference_mode()
def test_what_has_left_the_window_is_not_read(variant: str) -> None:
    """Catches a window that is one too wide or too narrow, over every way to come to a length: positions that no layer may
    see are spoilt, the last that one may see is not."""
    model = built(variant, layer_types=["sliding_attention"] * 2, max_window_layers=0, use_sliding_window=True)
    lean, window = LeanModel(model), model.config.sliding_window
    for new in (1, 3, 9):
        backend, spoilt, seen = lean.new_cache(), lean.new_cache(), lean.new_cache()
        for one in (backend, spoilt, seen):
            one.extend(TEXT + TEXT, rows=1)
        first = len(TEXT + TEXT) - window + 1
        for caches in (spoilt.keys, spoilt.values):
            for cache in caches:
                cache[:, :first] = 1e4
        seen.values[0][:, first] += 1.0
        expected, found, other = (one.extend(TEXT[:new], rows=new)[0] for one in (backend, spoilt, seen))
        assert torch.equal(found, expected)
        assert not torch.equal(other[0], expected[0])


@pytest.mark.parametrize("variant", ["mistral-window", "gemma3", "phi3-window"])
def test_a_text_longer_than_the_window_and_than_one_pass(variant: str) -> None:
    """Catches a window that is counted from the part of a text that is being read, or over what the cache holds."""
    long = [int(t) for t in torch.randint(0, 64, (700,), generator=torch.Generator().manual_seed(0))]
    model = built(variant, max_position_embeddings=1024, sliding_window=100)
    lean = LeanModel(model).new_cache()
    expected, _ = EagerModel(model).offline_pass(input_ids=torch.tensor([long]))
    torch.testing.assert_close(lean.extend(long, rows=600)[0], expected[0, -600:], atol=1e-3, rtol=1e-3)
    lean.rollback(150)
    parts = [lean.extend(long[a : a + 233], rows=233)[0] for a in range(150, 616, 233)]
    torch.testing.assert_close(torch.cat(parts), expected[0, 150:616], atol=1e-3, rtol=1e-3)


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


@pytest.mark.parametrize("variant", ["llama", "phi3-partial", "gemma3"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-5), (torch.bfloat16, 0.1)])
def test_other_types_of_weights(variant: str, dtype: torch.dtype, tolerance: float) -> None:
    """Catches a table of angles, a mask or a softmax in half precision. (transformers takes norms and angles in float32.)"""
    eager, lean = EagerModel(built(variant).to(dtype)).new_cache(), LeanModel(built(variant).to(dtype)).new_cache()
    expected, _ = eager.extend(TEXT, rows=6)
    logits, hidden = lean.extend(TEXT, rows=6)
    assert logits.dtype == hidden.dtype == dtype
    gap = (logits - expected).abs().max() / expected.abs().max()
    assert float(gap) < tolerance


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_a_description_names_every_weight_once(variant: str) -> None:
    """Catches a weight that no backend would read, one that is read twice, and a description that needs the weights' values:
    that of a model without any is the same."""
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
        of = [Angles(m.model.rotary_emb, dtype=torch.float32, kind=view.angles) for m in (model, empty)]
        assert all(map(torch.equal, of[0].to(9), of[1].to(9)))


def test_longrope_is_read_up_to_where_its_angles_change() -> None:
    """Catches the factors of long texts, which a longer pass leaves behind in the model, and a context that goes further."""
    model = built("phi3-longrope")
    with torch.no_grad():
        model(input_ids=torch.tensor([TEXT + TEXT]))
    tables = [Angles(m.model.rotary_emb, dtype=torch.float32).to(16) for m in (model, built("phi3-longrope"))]
    assert all(map(torch.equal, *tables))
    lean = LeanModel(model).new_cache()
    assert lean.max_length == 16
    expected, _ = EagerModel(built("phi3-longrope")).new_cache().extend(TEXT, rows=12)
    torch.testing.assert_close(lean.extend(TEXT, rows=12)[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", list(KINDS))
def test_greedy_text_is_the_targets_own(kind: str) -> None:
    """Catches differences that only show in a decoded text. In float32 logits differ by 1e-6 of their size, so a flip needs a
    tie closer than that: none of these 20 texts of 40 tokens has one."""
    model, plain = built(kind), built(kind)
    draft = LeanModel(tiny_draft(model))
    pair = Pair(target=LeanModel(model), draft=draft, tokenizer=tiny_tokenizer())
    ids = torch.tensor([[3 + start, 5, 9] for start in range(20)])  # with 40 more they are longer than any window
    own = plain.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40, min_new_tokens=40, eos_token_id=None
    )
    for prompt, text in zip(ids.tolist(), own[:, 3:].tolist(), strict=True):
        out = Decoder(pair, policy=Fixed(k=3)).generate(prompt, max_tokens=40, temperature=0, ignore_eos=True)
        assert list(out.tokens) == text


def with_output_bias(model: Any) -> Any:
    model.model.layers[1].self_attn.o_proj.bias = nn.Parameter(torch.zeros(32))
    return model


class Packed(nn.Linear):
    """Stands for the linear layer of a quantisation."""


def packed(model: Any) -> Any:
    model.model.layers[0].mlp.up_proj.__class__ = Packed
    return model


def hooked(model: Any) -> Any:
    """As accelerate marks what it has spread over devices."""
    model.model.layers[1]._hf_hook = object()
    return model


def half_and_half(model: Any) -> Any:
    model.model.norm.bfloat16()
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: model_of("gpt2"), "it is not one of LlamaForCausalLM"),
        (lambda: tiny_model("llama", sliding_window=6), "a window of 6"),
        (
            lambda: tiny_model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "rotary angles are dynamic",
        ),
        (lambda: tiny_model("llama", mlp_bias=True), "layers have biases"),
        (lambda: built("gemma3", final_logit_softcapping=30.0), "logits are squeezed below 30"),
        (lambda: built("gemma3", attn_logit_softcapping=50.0), "scores are squeezed below 50"),
        (lambda: built("gemma3", use_bidirectional_attention=True), "tokens see those after them"),
        (lambda: built("gemma3", sliding_window=0), "window is 0 positions wide"),
        (lambda: tiny_model("gemma"), "it is not one of LlamaForCausalLM"),
        (lambda: tiny_model("llama", hidden_act="gelu"), "gated by gelu"),
        (lambda: with_output_bias(tiny_model("llama")), "output bias"),
        (lambda: half_and_half(tiny_model("llama")), "of several types"),
        (lambda: packed(tiny_model("llama")), "quantised"),
        (lambda: hooked(tiny_model("llama")), "spread over devices"),
    ],
)
def test_what_cannot_be_run_lean_is_refused_and_run_by_transformers(model: Any, reason: str) -> None:
    """Catches a model that is run as something it is not."""
    with pytest.raises(BackendError, match=reason):
        LeanModel(model())


def test_a_runner_can_be_asked_for(tmp_path: Path) -> None:
    """Catches a choice that is ignored, and one that cannot be had."""
    llama, other = save_tiny_pair(tmp_path / "llama"), save_tiny_pair(tmp_path / "gpt2", kind="gpt2")
    assert type(load_pair(llama[0], draft=llama[1], backend="eager").target) is EagerModel
    assert type(load_pair(llama[0], draft=llama[1], backend="lean").target) is LeanModel
    assert type(load_pair(other[0], draft=other[1]).target) is EagerModel
    with pytest.raises(BackendError, match="lean: it is not one of"):
        load_pair(other[0], draft=other[1], backend="lean")


@pytest.mark.parametrize("scale", [None, 1.02])
def test_a_lean_pass_that_disagrees_is_not_used(scale: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a family member that computes something else under a known name, or nearly the same."""
    own = LeanModel._head_normed
    monkeypatch.setattr(LeanModel, "_head_normed", lambda self, qk, norms: scale * own(self, qk, norms) if scale else qk)
    with pytest.raises(BackendError, match="other logits than transformers"):
        LeanModel(tiny_model("qwen3", seed=1))
