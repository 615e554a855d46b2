"""Passes whose small operations are kernels of our own, on a GPU where there is one and interpreted elsewhere."""

import os
import subprocess
import sys
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from distributions import unchecked
from kinds import TEXT, built
from test_graph_trees import PARENTS, check_tree

import specdecpp as sd
from specdecpp.backends import EagerModel, GraphModel, LeanModel
from specdecpp.backends.graphs import layers as fused
from specdecpp.backends.graphs.cache import WIDTHS, span_of
from specdecpp.backends.graphs.kernels import layers as kernels
from specdecpp.backends.graphs.layers import FusedModel
from specdecpp.sampling import streams
from specdecpp.testing import tiny_draft, tiny_model, tiny_tokenizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
slow = partial(pytest.param, marks=pytest.mark.slow)
FAMILIES = ("qwen2", "gemma3-scaled", "phi3-partial")
FAMILIES += (*map(slow, ("llama", "qwen3", "mistral-window", "one-kv-head", "wide-heads")),)


def graphs(model: Any) -> Any:
    backend = GraphModel(model.to(DEVICE), probe=False).new_cache()
    assert isinstance(backend.static.body, FusedModel)
    return backend


def noise(length: int) -> list[int]:
    return torch.randint(0, 64, (length,), generator=torch.Generator().manual_seed(0)).tolist()


def parts(backend: Any, tokens: list[int], *cuts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and states of all tokens, read in portions that end at these places."""
    found = [backend.extend(tokens[a:b], rows=b - a) for a, b in zip((0, *cuts), (*cuts, len(tokens)), strict=True)]
    logits, states = zip(*found, strict=True)
    return torch.cat(logits), torch.cat(states)


@pytest.mark.parametrize("variant", FAMILIES)
def test_logits_and_states_are_those_of_transformers(variant: str) -> None:
    """Catches a wrong head, angle, norm, window or gate. Rows: 1, 2 of 2, 4 of 5, 5 of 5."""
    with unchecked():
        layers = {} if DEVICE == "cuda" or variant in ("llama", "gemma3-scaled") else {"num_hidden_layers": 1}
        expected = EagerModel(built(variant, **layers).to(DEVICE)).new_cache().extend(TEXT, rows=len(TEXT))
        for own, theirs in zip(parts(graphs(built(variant, **layers)), TEXT, 1, 3, 7), expected, strict=True):
            torch.testing.assert_close(own, theirs, atol=1e-4, rtol=1e-4)


WIDE_HEADS = {"hidden_size": 128, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE_HEADS |= {"num_hidden_layers": 1, "max_position_embeddings": 1024, "rms_norm_eps": 0.1}


@pytest.mark.parametrize("variant", [*map(slow, ("qwen2", "mistral-window", "qwen3"))])
def test_every_width_of_wide_heads(variant: str) -> None:
    """Catches halves of a head turned with another's, biases and scales of another row, and squares that are left out."""
    text, ends = noise(sum(WIDTHS)), list(accumulate(WIDTHS))
    with unchecked():
        expected = LeanModel(built(variant, **WIDE_HEADS).to(DEVICE), probe=False).new_cache().extend(text, rows=len(text))
        for own, theirs in zip(parts(graphs(built(variant, **WIDE_HEADS)), text, *ends[:-1]), expected, strict=True):
            torch.testing.assert_close(own, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", [None, slow(fused.Tiling(16, 32, 2, 2)), fused.Tiling(16, 128, 2, 1)])
def test_every_way_to_make_a_product(shape: fused.Tiling | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a first step of weights that counts twice or not at all, and a scale that is left out after torch's product."""
    adding = fused.Tiling(16, 32, 2, 2)  # so that what torch multiplies next has no scale yet
    monkeypatch.setattr(fused, "shape_of", lambda outputs, *_, **__: shape or (None if outputs > 128 else adding))
    text = noise(10)
    with unchecked():
        expected = LeanModel(built("qwen2", **WIDE_HEADS).to(DEVICE), probe=False).new_cache().extend(text, rows=len(text))
        backend = graphs(built("qwen2", **WIDE_HEADS))
        monkeypatch.setattr(backend.static.body, "early", {"queries", "out", "gate", "down", "output"})
        for own, theirs in zip(parts(backend, text, 1), expected, strict=True):
            torch.testing.assert_close(own, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_as_without_kernels(dtype: torch.dtype) -> None:
    """Catches a sum in half precision. Both beside float32 of the same weights, to twice the other's error."""
    if DEVICE == "cpu" and dtype is torch.bfloat16:
        pytest.skip("Triton's interpreter does not multiply bfloat16")
    with unchecked():
        half = built("llama").to(dtype)
        exact, _ = EagerModel(built("llama").to(dtype).float().to(DEVICE)).new_cache().extend(TEXT, rows=len(TEXT))
        lean = LeanModel(built("llama").to(DEVICE, dtype), probe=False).new_cache().extend(TEXT, rows=len(TEXT))[0]
        own, _ = parts(graphs(half), TEXT, 1, 3, 7)
    assert (own.float() - exact).abs().mean() < 2 * (lean.float() - exact).abs().mean()


@pytest.mark.parametrize(
    ("length", "most", "portions"), [(62, 32, 1), slow(218, 32, 1), (300, 4, 4), slow(318, 32, 8), slow(1100, 32, 32)]
)
def test_long_texts_are_put_together_from_portions(
    length: int, most: int, portions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches portions weighed wrongly, left out or counted twice, and a position too many or too few at their ends."""
    monkeypatch.setattr(kernels, "PARTS", most)
    text = noise(length + 5)
    span = span_of(length + 5)
    assert portions == (1 if span == 256 else min(most, span // kernels.POSITIONS.value))
    with unchecked():
        for variant in ("llama", "mistral-window"):
            own, theirs = (built(variant, num_hidden_layers=1, max_position_embeddings=2048) for _ in range(2))
            expected, _ = LeanModel(theirs.to(DEVICE), probe=False).new_cache().extend(text, rows=5)
            backend = graphs(own)
            backend.extend(text[:length], rows=1)
            torch.testing.assert_close(backend.extend(text[length:], rows=5)[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("variant", "sizes"), [("mistral-window", {}), slow("qwen3", {}), slow("llama", WIDE_HEADS)])
def test_several_sequences_in_one_pass(variant: str, sizes: dict[str, int]) -> None:
    """Catches a slot that reads or writes another's keys, positions of another row, and portions put together across slots:
    texts and caches of different sizes, by the launch that turns and by the one behind torch's product."""
    sizes = sizes | {"max_position_embeddings": 1024, "num_hidden_layers": 1}
    with unchecked():
        both = [kind(built(variant, **sizes).to(DEVICE), probe=False) for kind in (GraphModel, LeanModel)]
        for lengths, more in (((300, 3, 40), (1, 2, 3)), ((1, 7), (1, 1))):
            made = []
            for model in both:
                caches = [model.new_cache() for _ in lengths]
                for cache, n in zip(caches, lengths, strict=True):
                    model.read(cache, noise(n), rows=1)
                made.append(model.forward([(c, noise(9)[-n:]) for c, n in zip(caches, more, strict=True)], rows=1))
            for own, expected in zip(*made, strict=True):
                torch.testing.assert_close(own, expected, atol=1e-4, rtol=1e-4)
        assert [key[0] for key in both[0].slots._programs] == ["pass"] * 2


@pytest.mark.slow
def test_requests_together_say_what_they_say_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches draws and verdicts over rows of another slot, in memory that slots share."""

    def sharing(seed: int | None, **more: Any) -> Any:
        for stream in (made := streams(seed, **more)):
            stream.has_seed = False  # which would keep them apart
        return made

    monkeypatch.setattr("specdecpp.decoder.streams", sharing)
    target = tiny_model("llama", vocab_size=64, seed=1, num_hidden_layers=1, max_position_embeddings=512)
    own = [GraphModel(m.to(DEVICE), probe=False) for m in (target, tiny_draft(target, noise=0.4))]
    decoder = sd.Decoder(sd.Pair(target=own[0], draft=own[1], tokenizer=tiny_tokenizer()), policy=sd.CumulativeConfidence())
    options = {"max_tokens": 3, "ignore_eos": True, "seed": 3, "top_p": 0.9}
    with unchecked():
        together = decoder.generate_all([[3, 5, 2], [9]], **options)
        assert [out.tokens for out in together] == [decoder.generate(p, **options).tokens for p in ([3, 5, 2], [9])]
    assert {key[0] for key in own[0].slots._programs} == {"pass", "verdict"}


def test_what_was_forgotten_and_what_was_padded_leaves_no_trace() -> None:
    """Catches a padded row that is seen and a forgotten one that is. The same call then gives the same bits."""
    with unchecked():
        backend = graphs(built("qwen3"))
        backend.extend(TEXT[:5], rows=1)
        before, _ = backend.extend(TEXT[5:9], rows=4)  # padded to five
        backend.rollback(5)
        backend.extend([33, 34, 35, 36, 37], rows=1)
        backend.rollback(5)
        after, _ = backend.extend(TEXT[5:9], rows=4)
    assert torch.equal(before, after)


def test_greedy_answers_are_those_of_the_target() -> None:
    """Catches keys that a step leaves behind: a pair whose passes are fused, by rules that stop early and that do not."""
    target = tiny_model("llama", vocab_size=64, seed=1, num_hidden_layers=1, max_position_embeddings=512)
    draft = tiny_draft(target, noise=0.4)
    with unchecked():
        own = [GraphModel(m.to(DEVICE), probe=False) for m in (target, draft)]
        pair = sd.Pair(target=own[0], draft=own[1], tokenizer=tiny_tokenizer())
        options = {"max_tokens": 9, "temperature": 0.0, "ignore_eos": True}
        rules = (sd.Fixed(k=0), sd.Fixed(k=3), sd.CumulativeConfidence(threshold=0.3))
        alone, fixed, early = (sd.Decoder(pair, policy=rule).generate([3, 5, 2], **options) for rule in rules)
    assert alone.tokens == fixed.tokens == early.tokens
    assert 0 < fixed.metrics.num_accepted_draft_tokens < fixed.metrics.num_draft_tokens


def test_every_kernel_compiles() -> None:
    """Catches what the interpreter takes and the compiler does not, for GPUs that need not be there."""
    program = Path(__file__).with_name("compiled.py")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 9


@pytest.mark.parametrize(("variant", "config"), [("qwen2", WIDE_HEADS), slow("qwen3", {"num_hidden_layers": 1})])
@pytest.mark.parametrize(("shape", "length"), [slow("twigs", 20), ("full", 260)])
def test_nodes_of_a_tree_read_as_their_branches(variant: str, config: dict[str, Any], shape: str, length: int) -> None:
    """Catches a mask of another row, bits counted from another place, and an angle by the place: both kernels that turn."""
    model = LeanModel(built(variant, **config | {"max_position_embeddings": 1024}).to(DEVICE), probe=False)
    cache = graphs(built(variant, **config | {"max_position_embeddings": 1024}))
    with unchecked():
        check_tree(cache, model, PARENTS[shape], length, [1, 4], atol=1e-4, rtol=1e-4)
