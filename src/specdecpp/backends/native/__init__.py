"""Llama and its relatives (`families`) on a CPU, a pass as one call of compiled code.

backend   a model, and its caches           weights   a model in the layout that the code reads
library  finding, checking, loading       compilation  the compiler, and what a wheel has code for
native.cpp  the code: a pass, and the halves of a step around it
"""

from specdecpp.backends.native.compilation import compiler
from specdecpp.backends.native.library import Drafting, Filters, Head, Verifying
from specdecpp.backends.native.model import NativeCache, NativeModel

__all__ = ["Drafting", "Filters", "Head", "NativeCache", "NativeModel", "Verifying", "compiler"]
