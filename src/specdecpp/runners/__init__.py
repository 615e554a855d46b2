"""How a model's forward pass is run. One protocol, so that the round does not care; `eager` runs any causal LM."""

from specdecpp.runners.eager import EagerRunner
from specdecpp.runners.protocol import Runner

__all__ = ["EagerRunner", "Runner"]
