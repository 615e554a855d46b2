"""Quantised weights in the compiled backend: the file's own values, in every form; and bits that depend on the row alone."""

import ctypes
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from kinds import assert_same_bits, needs_compiler
from quantised import fabricated

from specdecpp.backends import EagerModel, NativeModel, probe
from specdecpp.backends.native.library import library
from specdecpp.backends.native.weights import KINDS, values_of
from specdecpp.errors import BackendError
from specdecpp.loading.gguf_reading import Stored
from specdecpp.testing import tiny_model

pytestmark = needs_compiler

TEXT = [1, 7, 3, 9, 12, 30, 2, 5, 41, 8, 8, 17, 60, 33]
SMALL = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


def stored(model: Any, kinds: Mapping[str, str]) -> dict[str, Stored]:
    """Values of a model's parameters: made up, of the kind of the first name in `kinds` that a parameter's name has in it."""
    found = {}
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        if parameter.ndim < 2:
            data = parameter.detach().float().contiguous()
            found[name] = Stored("F32", tuple(data.shape), data.view(torch.uint8).numpy().reshape(1, -1))
        else:
            kind = next(kind for part, kind in kinds.items() if part in name)
            found[name] = fabricated(kind, *parameter.shape, seed=seed)
    return found


def pair(kinds: Mapping[str, str], activations: Any = "float32", **more: Any) -> tuple[EagerModel, NativeModel]:
    """A model with such values, by transformers and, its own weights being on the meta device, by compiled code."""
    model = tiny_model("llama", seed=3, **(SMALL | more))
    values = stored(model, kinds)
    with torch.device("meta"):
        skeleton = type(model)(model.config)
    skeleton.model.rotary_emb = model.model.rotary_emb
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name].dequantised())
    return EagerModel(model), NativeModel(skeleton, stored=values, num_threads=2, activations=activations)


QUANTISED = [kind for kind in KINDS if kind not in ("F32", "F16", "BF16")]
ROUNDED = [(kind, activations) for kind in QUANTISED for activations in ("int16", "int8")]


@pytest.fixture(scope="module", params=[*((kind, "float32") for kind in KINDS), *ROUNDED], ids="-".join)
def backends(request: pytest.FixtureRequest) -> tuple[EagerModel, NativeModel]:
    kind, activations = request.param
    if activations != "float32" and not library().native_has_dots():
        pytest.skip("this processor has no products of whole numbers")
    return pair({"": kind}, activations=activations)


def near(compiled: NativeModel, eager: EagerModel) -> None:
    """Logits are those of the file's values: to rounding, where activations are rounded to bytes to one or two per cent."""
    (expected, states), (logits, hidden) = (model.new_cache().extend(TEXT, rows=len(TEXT)) for model in (eager, compiled))
    least, most = {"float32": (0, 1e-4), "int16": (1e-6, 3e-4), "int8": (1e-4, 0.03)}[compiled.activations]
    assert least <= probe.gap(logits, expected) < most
    assert probe.gap(hidden, states) < most


def test_logits_are_those_of_the_values_in_the_file(backends: tuple[EagerModel, NativeModel]) -> None:
    """Catches a code, scale, zero or offset from the wrong place of a block, and inputs in another order than weights."""
    near(backends[1], backends[0])


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_the_same_bits_however_a_text_is_cut(backends: tuple[EagerModel, NativeModel], threads: int) -> None:
    """Catches sums whose order depends on how many rows are summed, and rounding that looks at more than its own row."""
    cuts = [1] * 14, [2, 2, 3, 3, 4], [5, 9], [13, 1], [6, 8], [7, 7], [4, 10], [11, 3], [12, 2]
    assert_same_bits(backends[1], TEXT, *cuts, threads=threads)


WIDTHS = {"head_dim": 32, "hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 3, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("kinds", "more"),
    [
        ({"v_proj": "Q6_K", "q_proj": "Q4_K", "down": "Q6_K", "embed": "Q6_K", "": "Q4_K"}, {}),
        ({"q_proj": "F16", "k_proj": "Q4_1", "gate": "Q2_K", "up_proj": "Q8_0", "embed": "BF16", "": "Q5_1"}, {}),
        ({"gate": "F32", "up_proj": "Q4_0", "o_proj": "Q3_K", "lm_head": "Q5_K", "": "Q8_0"}, {}),
        ({"": "Q4_1"}, {"vocab_size": 71} | WIDTHS),
    ],
)
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_file_of_several_kinds_and_widths(kinds: dict[str, str], more: dict[str, int], is_tied: bool) -> None:
    """Catches sums over groups of another matrix's size, parts of a joined product in the wrong columns, and a last panel that
    is read or written past its end."""
    eager, compiled = pair(kinds, tie_word_embeddings=is_tied, **more)
    near(compiled, eager)
    near(compiled.with_threads(5), eager)


def test_a_kind_that_is_not_known_becomes_float32() -> None:
    """Catches a file whose rarest matrix keeps it from being run."""
    model = tiny_model("llama", seed=3, **SMALL)
    values, name = stored(model, {"": "Q8_0"}), "model.layers.0.mlp.down_proj.weight"
    known = values[name].dequantised()
    rare: Any = SimpleNamespace(kind="TQ9_9", dequantised=lambda: known)
    expected, found = (
        NativeModel(model, stored=values | of, activations="float32", probe=False).new_cache().extend(TEXT, rows=2)[0]
        for of in ({}, {name: rare})
    )
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("kind", QUANTISED)
def test_values_by_compiled_code_are_those_of_the_package_gguf(kind: str) -> None:
    """Catches a code, a scale or a level that is read from another place: a check of a pass would compare it with itself."""
    made = fabricated(kind, 40, 512, seed=5)
    torch.testing.assert_close(values_of(made), made.dequantised(), rtol=1e-6, atol=0)


def test_weights_that_are_read_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches values by compiled code that nothing else has looked at."""
    made = fabricated("Q4_K", 40, 512, seed=5)
    monkeypatch.setattr(Stored, "dequantised", lambda self: torch.zeros(self.shape))
    with pytest.raises(BackendError, match="Q4_K otherwise than the package gguf"):
        values_of(made)


def test_kinds_are_those_of_the_package_gguf_and_others_are_refused() -> None:
    """Catches a number that means another kind there, and rows of no kind or not of whole blocks, read past their end."""
    assert {GGMLQuantizationType(number).name: number for number in KINDS.values()} == KINDS
    lib, data = library(), torch.zeros(4096, dtype=torch.uint8)
    shape = (ctypes.c_int32 * 12)(1, 32, 1, 1, 32, 32, 32, 8, 0)
    handle = lib.native_new(ctypes.byref(shape))
    for kind, width in ((2, 48), (12, 32), (99, 32), (-1, 32)):
        assert not lib.native_matrix(handle, 0, 0, kind, data.data_ptr(), 8, width, 32, None, 1)
    lib.native_free(handle)


def test_two_bytes_are_the_default_where_the_processor_multiplies_them() -> None:
    """Catches a default that is slower than it has to be, and an error in front of a processor without such products."""
    backend = pair({"": "Q4_1"}, activations=None)[1]
    assert backend.activations == ("int16" if library().native_has_dots() else "float32")


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q6_K", "BF16"])
def test_a_trimmed_output_layer_takes_its_rows_of_a_file(kind: str) -> None:
    """Catches rows of quantised blocks taken by the wrong numbers, or with the wrong stride."""
    ids = [2, 3, 20, 21, 22, 63]
    expected = pair({"": kind})[0].new_cache().extend(TEXT, rows=3)[0]
    for backend in pair({"": kind}, output_ids=ids):
        found = backend.new_cache().extend(TEXT, rows=3)[0]
        assert (found[:, ids] - expected[:, ids]).abs().max() < 1e-4 * expected.abs().max()
        assert int(found.isfinite().sum()) == 3 * len(ids)


@pytest.mark.parametrize("threads", [1, 3])
def test_several_sequences_in_a_pass_have_the_bits_of_each_alone(
    backends: tuple[EagerModel, NativeModel], threads: int
) -> None:
    """Catches rows that read another sequence's cache, positions of another, and sums that depend on the company."""
    alone, model = [backends[1].with_threads(1).new_cache() for _ in range(5)], backends[1].with_threads(threads)
    together, seen_by = ([model.new_cache() for _ in alone] for _ in range(2))
    for texts in ([TEXT[:n] for n in (1, 9, 4, 14, 2)], [[5], [6, 7], [8], [1], [2, 3, 4]]):
        logits, hidden = model.forward(list(zip(together, texts, strict=True)), rows=1)
        same, seen = model.forward_seen(list(zip(seen_by, texts, strict=True)), layer=1)
        assert torch.equal(logits, same)
        for i, text in enumerate(texts):
            expected = alone[i].extend(text, rows=1)
            assert torch.equal(logits[i], expected[0][0])
            assert torch.equal(hidden[i], expected[1][0])
            assert seen[i].shape == (len(text), 256)
    assert [r.length for r in together] == [r.length for r in alone]


def test_what_a_layer_reads_is_told() -> None:
    """Catches states of another layer, or of other rows."""
    eager, compiled = pair({"": "Q8_0"})
    found: list[torch.Tensor] = []
    handle = eager.model.model.layers[1].register_forward_pre_hook(lambda _, args: found.append(args[0]))
    eager.new_cache().extend(TEXT, rows=1)
    handle.remove()
    (seen,) = compiled.forward_seen([(compiled.new_cache(), TEXT)], layer=1)[1]
    assert (seen - found[0][0]).abs().max() < 1e-4 * found[0].abs().max()


def test_a_pass_that_would_write_elsewhere_is_refused() -> None:
    """Catches a lookup past the end of the embedding, and a pass that writes into caches of another shape."""
    model, other = pair({"": "Q8_0"})[1], pair({"": "Q8_0"})[1]
    for wrong in (-1, 64, 2**40):
        with pytest.raises(ValueError, match="the embedding has 64 rows"):
            model.new_cache().extend([1, wrong], rows=1)
    one, two = model.new_cache(), model.new_cache()
    for parts in ([(one, [1]), (other.new_cache(), [2])], [(one, [1]), (one, [2])], [(one, [1]), (two, [])]):
        with pytest.raises(ValueError, match="a cache for each"):
            model.forward(parts, rows=1)
