"""How a model's forward pass is run: one protocol for all rounds.

eager   any causal LM, by transformers                       native  known families on a CPU, by code compiled for it
lean    known families with fewer operations of torch        graphs  known families on a GPU, in CUDA graphs
gguf    GGUF files, by llama.cpp                             (`families` says which those are, as data)

`choice` takes the fastest for a pair.
"""

from specdecpp.runners.eager import EagerRunner
from specdecpp.runners.gguf import GGUFRunner
from specdecpp.runners.graphs import GraphRunner
from specdecpp.runners.lean import LeanRunner
from specdecpp.runners.native import NativeRunner
from specdecpp.runners.protocol import Cache, Draws, ReadsBoth, Runner, Skips

__all__ = [
    "Cache",
    "Draws",
    "EagerRunner",
    "GGUFRunner",
    "GraphRunner",
    "LeanRunner",
    "NativeRunner",
    "ReadsBoth",
    "Runner",
    "Skips",
]
