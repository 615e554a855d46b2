"""Engines, which run steps. `step` is the specification.

| engine | where | file |
|---|---|---|
| `Host` | any model, any rule, any verification; the specification of the others | ../step.py |
| `Native` | both models by compiled code on a CPU, or a target alone with copies | native.py |
| `Copying` | any target, no draft model: candidates copied from the text | copying.py |
| `Device` | both models as graphs on a GPU | device.py |
"""

from specdecpp.rounds.copying import Copying
from specdecpp.rounds.device import Device
from specdecpp.rounds.native import Native
from specdecpp.step import Engine, Host, Request

ENGINES: tuple[Engine, ...] = (Native(), Copying(), Device(), Host())
"""In order of preference; the last takes everything."""

__all__ = ["ENGINES", "engine_for"]


def engine_for(request: Request) -> Engine:
    """The engine that its policy brings, else the first that can run the rounds of this request."""
    return request.policy.engine() or next(engine for engine in ENGINES if engine.refusal(request) is None)
