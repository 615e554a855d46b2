"""The reference pair and a tiny one as GGUF files, written once."""

from pathlib import Path
from typing import Any

import pytest
from gguf_files import converted
from transformers import AutoTokenizer

from specdecpp.loading import gguf_writing
from specdecpp.loading.pair import REFERENCE
from specdecpp.testing import tiny_draft, tiny_model


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(REFERENCE / "target")


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target-f32.gguf, draft-q8_0.gguf and so on."""
    folder = tmp_path_factory.mktemp("reference")
    for role in ("target", "draft"):
        for precision in ("f32", "bf16", "q8_0"):
            converted(role, folder / f"{role}-{precision}.gguf", precision)
    return folder


@pytest.fixture(scope="session")
def tiny() -> Any:
    """A random model with room for long texts; nobody may change it."""
    return tiny_model("llama", vocab_size=4100, max_position_embeddings=4096)


@pytest.fixture(scope="session")
def tiny_files(tiny: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target.gguf in float32, draft.gguf a noisy copy in int8."""
    folder = tmp_path_factory.mktemp("tiny")
    gguf_writing.write(tiny, tokenizer, folder / "target.gguf")
    gguf_writing.write(tiny_draft(tiny), tokenizer, folder / "draft.gguf", precision=gguf_writing.Precision.q8_0)
    return folder
