"""The compiled backend computes every family and window that is described, the same bits however a text is cut."""

from typing import Any

import pytest
import test_lean
import torch
from kinds import assert_same_bits

from specdecpp import Pair
from specdecpp.backends import EagerModel, NativeModel, native
from specdecpp.decoder import Decoder
from specdecpp.policies import Fixed
from specdecpp.testing import tiny_draft, tiny_tokenizer

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")

SHORT = test_lean.LONGROPE | {"short_factor": [1.0, 1.5, 2.0, 4.0, 5.0, 6.0, 7.0, 8.0], "long_factor": [9.0] * 8}
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("phi3", "phi3-window", "phi3-partial", "gemma3", "gemma3-scaled", "mistral-window")},
    **{name: {} for name in ("window-of-one", "qwen2-window", "qwen3-window", "yarn-angles")},
    "phi3-longrope": test_lean.angles("longrope", **SHORT),
}
TEXT = [int(t) for t in torch.randint(0, 64, (90,), generator=torch.Generator().manual_seed(0))]


def built(variant: str, **more: Any) -> Any:
    """Heads of 16, which the compiled code can have."""
    return test_lean.built(variant, **({"hidden_size": 64, "head_dim": 16} | VARIANTS[variant] | more))


@pytest.fixture(scope="module", params=list(VARIANTS))
def backends(request: pytest.FixtureRequest) -> tuple[EagerModel, NativeModel]:
    model = built(request.param)
    return EagerModel(model), NativeModel(model, num_threads=2)


def test_logits_and_states_are_those_of_transformers(backends: tuple[EagerModel, NativeModel]) -> None:
    """Catches a norm, scale, activation, window or table of angles that is another layer's, or is left out."""
    eager, compiled = backends[0].new_cache(), backends[1].new_cache()
    text = TEXT[: compiled.max_length]
    with torch.inference_mode():
        expected, states = eager.model.offline_pass(input_ids=torch.tensor([text]))
    logits, hidden = compiled.extend(text, rows=len(text))
    torch.testing.assert_close(logits, expected[0], atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(hidden, states[0], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_same_bits_however_a_text_is_cut(backends: tuple[EagerModel, NativeModel], threads: int) -> None:
    """Catches a window whose first block of positions, and so the order of a sum, depends on the rows that are read at once."""
    assert_same_bits(backends[1], TEXT, [1] * 90, [5, 1, 13, 2, 69], [57, 3, 30], threads=threads)


@pytest.mark.parametrize("window", [15, 16, 17, 31, 32, 33, 40, 64, 89, 90])
def test_windows_at_the_edges_of_blocks(window: int) -> None:
    """Catches a window that is one too wide or too narrow where it begins with a block of positions, and what a rollback leaves
    behind it."""
    model = built("gemma3", sliding_window=window)
    compiled = NativeModel(model, num_threads=2).new_cache()
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    compiled.extend([7] * 90, rows=1)
    compiled.rollback(0)
    first, _ = compiled.extend(TEXT[:70], rows=70)
    compiled.extend([8] * 40, rows=1)
    compiled.rollback(70)
    rest, _ = compiled.extend(TEXT[70:], rows=20)
    torch.testing.assert_close(torch.cat([first, rest]), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("variant", ["phi3", "gemma3", "mistral-window"])
def test_greedy_text_is_that_of_generate(variant: str) -> None:
    """Catches anything in a step that the parts above do not show; the text grows past its window."""
    model = built(variant)
    ids = torch.tensor([TEXT[:9]])
    mask = torch.ones_like(ids)
    own = model.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False, eos_token_id=None)[0, 9:].tolist()
    pair = Pair(target=NativeModel(model), draft=NativeModel(tiny_draft(model)), tokenizer=tiny_tokenizer())
    for k in (0, 1, 4, 9):
        assert list(Decoder(pair, policy=Fixed(k=k)).generate(TEXT[:9], max_tokens=40, temperature=0).tokens) == own


def test_the_context_ends_before_longrope_changes_its_angles() -> None:
    """Catches keys that are turned by the factors of short texts in a long one."""
    assert NativeModel(built("phi3-longrope")).max_length == 16
