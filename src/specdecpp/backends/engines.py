"""The table of backends: a new one is a folder, an import and a line here.

A backend is the class of a model (`base.Model`). Where it also runs the halves of a step faster than `step.Host`, the
specification, it brings an engine.
"""

from typing import Any, NamedTuple

from specdecpp.backends.eager import EagerModel
from specdecpp.backends.graphs.engine import Device
from specdecpp.backends.graphs.engine import record_passes as record_passes
from specdecpp.backends.graphs.model import GraphModel
from specdecpp.backends.lean import LeanModel
from specdecpp.backends.llama_cpp import LlamaCppModel
from specdecpp.backends.native.model import NativeModel
from specdecpp.backends.native.steps import Native
from specdecpp.drafters.copying import Copying
from specdecpp.step import Engine, Host, Request


class Backend(NamedTuple):
    """One line of the table."""

    model: Any
    engine: type[Engine] | None = None


BACKENDS = {
    "graphs": Backend(GraphModel, Device),
    "native-int8": Backend(NativeModel, Native),
    "native": Backend(NativeModel, Native),
    "llama.cpp": Backend(LlamaCppModel),
    "lean": Backend(LeanModel),
    "eager": Backend(EagerModel),
}
"""Backends by kind, in the order in which they are tried."""

_FUSED = dict.fromkeys(backend.engine for backend in BACKENDS.values() if backend.engine)
ENGINES: tuple[Engine, ...] = (*(make() for make in _FUSED), Copying(), Host())
"""In order of preference; the last takes everything."""


def engine_for(request: Request) -> Engine:
    """The engine that its policy brings, else the first that can run the steps of this request."""
    return request.policy.engine() or next(engine for engine in ENGINES if engine.refusal(request) is None)
