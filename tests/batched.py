"""What the tests of batches share: a compiled pair, prompts, and a session for each of them."""

from typing import Any

from specdecpp import Decoder, Pair
from specdecpp.backends import NativeModel
from specdecpp.session import Session
from specdecpp.testing import tiny_draft, tiny_model, tiny_tokenizer

PROMPTS = [[3], [5, 9, 11, 2], [7] * 30, [1, 2], [40, 41, 42]]


def compiled_pair(*, seed: int = 1) -> Pair:
    model = tiny_model("llama", seed=seed, head_dim=16)
    target, draft = (NativeModel(of, num_threads=1) for of in (model, tiny_draft(model)))
    return Pair(target=target, draft=draft, tokenizer=tiny_tokenizer(64))


def session(decoder: Decoder, i: int, **options: Any) -> Session:
    """Of prompt i, which has been read."""
    started = decoder.start(PROMPTS[i], max_tokens=12 + 5 * i, seed=i, **options)
    started.prefill()
    return started
