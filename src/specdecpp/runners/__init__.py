"""How a model's forward pass is run. One protocol, so that the round does not care; `eager` runs any causal LM, `lean` the
Llama family with fewer operations. `runner_for` chooses."""

from typing import Any

from specdecpp.runners.eager import EagerRunner
from specdecpp.runners.lean import LeanRunner
from specdecpp.runners.protocol import Runner

__all__ = ["EagerRunner", "LeanRunner", "Runner", "runner_for"]


def runner_for(model: Any, *, vocab_size: int | None = None, lean: bool | None = None) -> EagerRunner:
    """A runner for a model of transformers: lean where it can be, unless `lean` says which.

    Raises `RunnerError` for a model that cannot be rolled back, or cannot be run lean although `lean=True`.
    """
    if lean is None:
        lean = LeanRunner.refusal(model) is None
    return LeanRunner(model, vocab_size=vocab_size) if lean else EagerRunner(model, vocab_size=vocab_size)
