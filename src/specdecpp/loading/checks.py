"""The backends of a model, each made once, and compared with transformers once on a machine.

A passed check is remembered for the model, the code that runs it and the machine; a failed one is run and reported again.
"""

import hashlib
import logging
from functools import cache
from pathlib import Path
from typing import Any

from specdecpp import backends, cache_dir
from specdecpp.backends import Model
from specdecpp.backends.engines import BACKENDS
from specdecpp.backends.families import Sketch
from specdecpp.backends.native import NativeModel, compiler, library

log = logging.getLogger("specdecpp.loading")


class Loadable:
    """A model by its name, with its backends over one copy of its weights in each layout."""

    model: Any
    identity: Any
    skeleton: Any = None
    """The model without weights, where a sketch stands for it."""

    def __init__(self, name: str | Path):
        self.name = str(name)
        self._made: dict[tuple[str, int], Model] = {}

    def backend(self, kind: str, *, vocab_size: int, **more: Any) -> Model:
        """A backend of this kind. Raises `BackendError`."""
        if (kind, vocab_size) not in self._made:
            log.info("reading the weights of %s", self.name)
            self._made[kind, vocab_size] = self._checked(BACKENDS[kind].model, vocab_size=vocab_size, **more)
        return self._made[kind, vocab_size]

    def _checked(self, kind: type, *, model: Any = None, vocab_size: int, **more: Any) -> Model:
        model = model or self.model
        facts = {"backend": kind.__name__, "model": self.identity, "vocab_size": vocab_size, "code": code()}
        facts |= cache_dir.about()
        if kind is NativeModel:
            facts |= {"compiled": library.origin(), "activations": more.get("activations")}
        is_known = cache_dir.recall("check", facts) is not None
        if not is_known:
            log.info("comparing %s with transformers on %s", kind.__name__, self.name)
            model = self.skeleton if isinstance(model, Sketch) else model
        made = kind(model, vocab_size=vocab_size, probe=not is_known, **more)
        if not is_known:
            cache_dir.remember("check", facts, {})
        return made


@cache
def code() -> str:
    """Sixteen hex digits of what runs models here: our sources, the compiler and transformers."""
    import transformers

    folder = Path(backends.__file__).parent
    digest = hashlib.sha256(f"{transformers.__version__} {compiler()}".encode())
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".cpp", ".h", ".hpp")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
