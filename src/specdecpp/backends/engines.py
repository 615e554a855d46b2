"""Engines, which run steps. `step` is the specification.

| engine | where | file |
|---|---|---|
| `Host` | any model, any rule, any verification; the specification of the others | ../step.py |
| `Native` | both models by compiled code on a CPU, or a target alone with copies | native.py |
| `Copying` | any target, no draft model: draft tokens copied from the text | copying.py |
| `Device` | both models as graphs on a GPU | device.py |
"""

from specdecpp.backends.device import Device
from specdecpp.backends.native.steps import Native
from specdecpp.drafters.copying import Copying
from specdecpp.step import Engine, Host, Request

ENGINES: tuple[Engine, ...] = (Native(), Copying(), Device(), Host())
"""In order of preference; the last takes everything."""

__all__ = ["ENGINES", "engine_for"]


def engine_for(request: Request) -> Engine:
    """The engine that its policy brings, else the first that can run the steps of this request."""
    return request.policy.engine() or next(engine for engine in ENGINES if engine.refusal(request) is None)
