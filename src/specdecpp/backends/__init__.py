"""How a model's forward pass is run: one protocol for all steps.

eager   any causal LM, by transformers                       native  known families on a CPU, by code compiled for it
lean    known families with fewer operations of torch        graphs  known families on a GPU, in CUDA graphs
gguf    GGUF files, by llama.cpp                             (`families` says which those are, as data)

`choice` takes the fastest for a pair.
"""

from specdecpp.backends.base import Cache, Draws, Model, ReadsBoth, Skips
from specdecpp.backends.eager import EagerModel
from specdecpp.backends.graphs import GraphModel
from specdecpp.backends.lean import LeanModel
from specdecpp.backends.llama_cpp import LlamaCppModel
from specdecpp.backends.native import NativeModel

__all__ = [
    "Cache",
    "Draws",
    "EagerModel",
    "GraphModel",
    "LeanModel",
    "LlamaCppModel",
    "Model",
    "NativeModel",
    "ReadsBoth",
    "Skips",
]
