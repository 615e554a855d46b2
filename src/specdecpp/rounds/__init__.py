"""A round: draft, stop, verify. `plan` is what goes in and comes out; five engines run it.

| engine | where | file |
|---|---|---|
| `Host` | any runner, any rule, any verification; the specification of the others | host.py |
| `Native` | both models by compiled code on a CPU, or a target alone with copies | native.py |
| `Copying` | any target, no draft model: candidates copied from the text | copying.py |
| `Either` | what the rule `WithCopies` says: copies, or the model's candidates, by the engines for each | either.py |
| `Device` | both models as graphs on a GPU | device.py |
"""

from specdecpp.rounds.copying import Copying
from specdecpp.rounds.device import Device
from specdecpp.rounds.either import Either
from specdecpp.rounds.host import Host
from specdecpp.rounds.native import Native
from specdecpp.rounds.plan import Engine, Plan, Reading, Request, Result, Rows

_SINGLE: tuple[Engine, ...] = (Native(), Copying(), Device(), Host())
ENGINES: tuple[Engine, ...] = (Either(_SINGLE[:1]), Either(_SINGLE), *_SINGLE)
"""In order of preference; the last takes everything."""

__all__ = ["ENGINES", "Engine", "Plan", "Reading", "Request", "Result", "Rows", "engine_for"]


def engine_for(request: Request) -> Engine:
    """The first engine that can run the rounds of this request."""
    return next(engine for engine in ENGINES if engine.refusal(request) is None)
