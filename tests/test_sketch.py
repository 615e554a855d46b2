"""A model's sketch stands for it where its weights lie in a file: kept as JSON, it gives the same bits without transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import written
from kinds import VARIANTS, built

from specdecpp.backends import NativeModel, native
from specdecpp.backends.families import Sketch
from specdecpp.loading import gguf
from specdecpp.loading.gguf import GGUF
from specdecpp.loading.gguf_reading import Stored

TEXT = [1, 7, 3, 9, 12, 30, 2, 5]
pytestmark = pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")


def stored(model: Any) -> dict[str, Stored]:
    """A model's own values, as a file has them."""
    found = {}
    for name, parameter in model.named_parameters():
        data = parameter.detach().float().contiguous()
        rows = data.reshape(len(data) if data.ndim > 1 else 1, -1)
        found[name] = Stored("F32", tuple(data.shape), rows.view(torch.uint8).numpy())
    return found


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_a_sketch_that_was_kept_gives_the_same_bits(variant: str) -> None:
    """Catches a field of a family, an angle or a limit of the context that JSON loses or changes."""
    model = built(variant)
    sketch = Sketch.parse(json.loads(json.dumps(Sketch.of(model).told())))
    backend, kept = (NativeModel(one, stored=stored(model), num_threads=1, probe=False) for one in (model, sketch))
    assert sketch.family == Sketch.of(model).family
    assert (kept.max_length, kept.vocab_size, kept.hidden_size) == (backend.max_length, backend.vocab_size, backend.hidden_size)
    assert torch.equal(kept.new_cache().extend(TEXT, rows=8)[0], backend.new_cache().extend(TEXT, rows=8)[0])


def test_a_file_that_was_loaded_before_builds_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches two seconds of imports at every load."""
    path = written(tmp_path / "model.gguf")
    before = GGUF(path)
    num = before.num_rows
    first = before.backend("native", vocab_size=num)

    monkeypatch.setattr(gguf, "built", lambda _: pytest.fail("the model was built again"))
    again = GGUF(path)
    assert again.num_rows == num
    found = again.backend("native", vocab_size=num)
    assert torch.equal(found.new_cache().extend(TEXT, rows=8)[0], first.new_cache().extend(TEXT, rows=8)[0])
