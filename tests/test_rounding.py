"""The rounding that a draft is trained through is that of its file."""

import numpy as np
import pytest
import torch
from test_distil import folder, plan_of

from specdecpp.distillation import network, rounding, training
from specdecpp.distillation.network import Shape
from specdecpp.distillation.rounding import rounded
from specdecpp.distillation.run import distil
from specdecpp.distillation.target import Target
from specdecpp.distillation.text import pieces
from specdecpp.loading import gguf_writing
from specdecpp.loading.gguf_reading import GGUFSource
from specdecpp.loading.gguf_writing import Precision
from specdecpp.loading.models import load_model
from specdecpp.loading.pair import REFERENCE
from specdecpp.loading.tokenizers import load_tokenizer
from specdecpp.training.checkpoints import saved

_ = folder  # a fixture


@pytest.mark.parametrize("precision", [Precision.q4_1, Precision.q8_0])
def test_the_values_are_those_of_the_file_to_the_bit(precision):
    """Catches another rounding of halves, scales that stay in four bytes, and blocks of zeros that become NaN."""
    gguf = pytest.importorskip("gguf")
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(0))
    weight[0] = 0
    weight[1, :32] = 0.25
    kind = gguf.GGMLQuantizationType[precision.upper()]
    stored = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind)
    assert np.array_equal(rounded(weight, precision).numpy(), stored)


def test_gradients_pass_as_if_nothing_was_rounded():
    weight = torch.randn(4, 64, requires_grad=True)
    given = torch.randn(4, 64)
    (rounded(weight, Precision.q4_1) * given).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, given)


def test_other_rows_stay():
    odd, even = torch.randn(4, 40), torch.randn(4, 64)
    assert rounded(odd, Precision.q4_1) is odd
    assert rounded(even, None) is even


def test_what_is_trained_computes_as_the_file_does(folder, tmp_path):
    """Catches a training on weights that the file does not have, and a file in other bits than its training was told."""
    model = load_model(REFERENCE / "target", dtype=torch.float32, device=None, device_map=None)
    whole, out = tmp_path / "whole.gguf", tmp_path / "out"
    gguf_writing.write(model, load_tokenizer(REFERENCE / "target"), whole, precision=Precision.q4_1)
    shape = Shape(kept=2, own=1, tokens=500)
    distil(plan_of(folder, out, target=str(whole), shape=shape, tokens=1500, max_tokens=16))
    target, file = Target(str(whole)), Target(str(out / "draft.gguf"))
    assert rounding.precision_of(target) is Precision.q4_1
    own = (w for name, w in GGUFSource(out / "draft.gguf").stored.items() if name.startswith("model.layers.2."))
    assert {w.kind for w in own if len(w.shape) == 2} == {"Q4_1"}
    draft = network.draft(target.model, shape)
    training.put(network.tail(draft, 2), saved(out / training.STATE)["own"])
    text = list(pieces(next((out / "text").iterdir())))[:3]
    trained = training.hidden(network.tail(draft, 2), text, precision=Precision.q4_1)
    torch.testing.assert_close(trained, training.hidden(network.tail(file.model, 2), text), rtol=1e-5, atol=1e-5)
