"""The backends of a model, each made once, and put to the test once on a machine.

A passed test is remembered for the model, the code that runs it and the machine; a failed one is run and reported again.
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
from specdecpp.errors import BackendError

CLASSES = {kind: backend.model for kind, backend in BACKENDS.items()}
"""All kinds of backends but llama.cpp, which has its own copy of a file."""
log = logging.getLogger("specdecpp.loading")


class Backends:
    """The backends of a model by kind, over one copy of its weights in each layout."""

    def __init__(self, of: Any):
        self._of, self._made = of, {}

    def get(self, kind: str, *, vocab_size: int, num_threads: int, **more: Any) -> Model:
        """A model of this kind over that of its source, or over `more`. `num_threads` is for native. Raises `BackendError`."""
        made: Any = self._made.get((kind, vocab_size))
        if made is None:
            log.info("reading the weights of %s", self._of.name)
            try:
                made = self._checked(CLASSES[kind], more.pop("model", None) or self._of.model, vocab_size=vocab_size, **more)
            except BackendError as error:
                made = error
            self._made[kind, vocab_size] = made
        if isinstance(made, BackendError):
            raise made
        return made.with_threads(num_threads) if isinstance(made, NativeModel) else made

    def _checked(self, kind: type, model: Any, *, vocab_size: int, **more: Any) -> Model:
        facts = {"runner": kind.__name__, "model": self._of.identity, "vocab_size": vocab_size, "code": code()}
        facts |= cache_dir.about()
        if kind is NativeModel:
            facts |= {"compiled": library.origin(), "activations": more.get("activations")}
        is_known = cache_dir.recall("check", facts) is not None
        if not is_known:
            log.info("comparing %s with transformers on %s", kind.__name__, self._of.name)
            model = self._of.skeleton if isinstance(model, Sketch) else model
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
