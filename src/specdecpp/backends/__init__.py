"""Backends: how a model's forward pass is run. `base` has the protocol, `engines` the table of all.

eager      any causal LM, by transformers                    native/  known families on a CPU, by code compiled for it
lean       known families with fewer operations of torch     graphs/  known families on a GPU, in CUDA graphs
llama_cpp  GGUF files, by llama.cpp                          families, angles  what a family computes, as data

kept       caches of requests that ended      trimmed  output layers that score some tokens only      probe  the check at load
"""

from specdecpp.backends.base import Cache, Draws, Model, ReadsBoth, Reduces, Skips
from specdecpp.backends.eager import EagerModel
from specdecpp.backends.graphs.model import GraphModel
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
    "Reduces",
    "Skips",
]
