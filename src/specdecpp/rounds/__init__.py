"""A round: draft, stop, verify. `plan` is what goes in and comes out; four engines run it.

| engine | where | file |
|---|---|---|
| `Host` | any runner, any rule, any verification; the specification of the others | host.py |
| `Native` | both models by compiled code on a CPU, or a target alone with copies | native.py |
| `Copying` | any target, no draft model: candidates copied from the text | copying.py |
| `Device` | both models as graphs on a GPU | device.py |
"""

from specdecpp.rounds.copying import Copying
from specdecpp.rounds.device import Device
from specdecpp.rounds.host import Host
from specdecpp.rounds.native import Native
from specdecpp.rounds.plan import Engine, Plan, Reading, Request, Result, Rows

ENGINES: tuple[Engine, ...] = (Native(), Copying(), Device(), Host())
"""In order of preference; the last takes everything."""

__all__ = ["ENGINES", "Engine", "Plan", "Reading", "Request", "Result", "Rows", "engine_for"]


def engine_for(request: Request) -> Engine:
    """The engine that its policy brings, else the first that can run the rounds of this request."""
    return request.policy.engine() or next(engine for engine in ENGINES if engine.refusal(request) is None)
