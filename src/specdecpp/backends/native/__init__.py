"""Known families on a CPU, by compiled code: `model` (passes), `steps` (the halves of a step), `weights`, `library` (finding
and loading the code), `compilation`, and the code itself in `cpp/`."""

from specdecpp.backends.native.compilation import compiler
from specdecpp.backends.native.model import NativeCache, NativeModel

__all__ = ["NativeCache", "NativeModel", "compiler"]
