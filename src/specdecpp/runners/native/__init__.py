"""Llama and its relatives (`families`) on a CPU, a pass as one call of compiled code.

runner   a model, and its caches           weights   a model in the layout that the code reads
library  finding, checking, loading       compilation  the compiler, and what a wheel has code for
native.cpp  the code: a pass, and the halves of a round around it
"""

from specdecpp.runners.native.compilation import compiler
from specdecpp.runners.native.library import Drafting, Filters, Head, Verifying
from specdecpp.runners.native.runner import NativeCache, NativeRunner

__all__ = ["Drafting", "Filters", "Head", "NativeCache", "NativeRunner", "Verifying", "compiler"]
