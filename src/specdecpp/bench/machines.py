"""Costs of a step: measured on this machine, read from a file, or given as c in units of a target pass."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdecpp.costs.known import measured
from specdecpp.errors import DataError
from specdecpp.head import AcceptanceHead
from specdecpp.loading.pair import Pair
from specdecpp.policies import Costs, Policy
from specdecpp.policies.head import costs_for, heads


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Costs with a name."""

    name: str
    costs: Costs

    @classmethod
    def relative(cls, c: float) -> "Machine":
        """A draft token costs c target passes, and a pass the same at any width: the paper's cost model.

        Raises ValueError unless c is a finite number of at least 0.

        >>> Machine.relative(0.22).name
        'c = 0.22'
        """
        if not 0 <= c < math.inf:
            raise ValueError(
                f"c, the time of a draft step over that of a target pass, must be finite and at least 0, got {c:g}."
            )
        return cls(name=f"c = {c:g}", costs=Costs.relative(c))

    @classmethod
    def read(cls, path: Path | str) -> "Machine":
        """From a JSON file with draft_s and passes, by itself or as `costs` of a results file. Raises `DataError`."""
        try:
            found: Any = json.loads(Path(path).read_text(encoding="utf-8"))
            found = found.get("costs", found) if isinstance(found, dict) else found
            if not isinstance(found, dict):
                raise ValueError(f"a {type(found).__name__} where an object was expected")
            costs = Costs.parse(found)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise DataError(
                f"{path} does not hold costs ({reason}). It is JSON with the seconds of a draft token and "
                'of passes by positions: {"draft_s": 0.02, "passes": {"1": 0.1, "5": 0.11}}.'
            ) from error
        return cls(name=str(found.get("name", Path(path).stem)), costs=costs)

    @classmethod
    def here(cls, pair: Pair, costs: Costs | None = None) -> "Machine":
        """This machine, as the Decoder knows it, or with costs that were just measured."""
        return cls(name="measured", costs=costs or measured(pair))

    @property
    def head_s(self) -> float:
        """Seconds that a head adds to every draft token, which the paper's cost model leaves out."""
        return self.costs.head_s

    def costs_of(self, policy: Policy) -> Costs:
        """Costs of a step under a policy: its head's time is part of drafting."""
        return costs_for(policy, self.costs)

    def to_dict(self) -> dict[str, Any]:
        """The form of a results file; `c` is a draft token over a target pass of one position."""
        costs = self.costs
        seconds = {name: getattr(costs, name) for name in ("draft_s", "start_s", "head_s", "switch_s")}
        passes = {str(n): s for n, s in costs.passes.items()}
        return {"name": self.name, **seconds, "passes": passes, "c": costs.draft_s / costs.verify_s(1)}


def head_of(policy: Policy) -> AcceptanceHead | None:
    """The head that a policy asks, its own or that of a rule it is made of."""
    return next(iter(heads(policy)), None)
