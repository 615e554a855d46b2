"""Statistics of requests without a seed, for later ones.

A request with a seed begins with what is fixed and learns within itself only, so the seed gives the same answer again. The
others begin with what all of them have taught so far, for each way of sampling by itself (`decoder.Decoder`).
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from specdecpp.costs import Costs
from specdecpp.costs.clock import differ, shares
from specdecpp.policies.protocol import Policy


def settings(policy: Policy) -> dict[str, Any]:
    """The numbers and words that tell a rule from others of its class."""
    named = {f.name: getattr(policy, f.name) for f in fields(policy) if f.init}
    return {name: value for name, value in named.items() if isinstance(value, int | float | str)}


def since(past: Mapping[str, Any] | None, now: Costs | None) -> Mapping[str, Any] | None:
    """Statistics of an earlier process, without its gains where it took steps to cost otherwise than they do now."""
    if past is None or now is None or "gains" not in past:
        return past
    try:
        holds = not differ(past["shares"], shares(now))
    except (KeyError, TypeError, ValueError):  # of nobody knows which costs
        holds = False
    return past if holds else {**past, "gains": {}, "lost": 0.0}


class Experience:
    """Statistics for one rule and one sampling. `past` is what an earlier process has kept, and `keep` is called with what
    this one knows after 1, 4, 16, 64, ... requests."""

    def __init__(
        self,
        policy: Policy,
        past: Mapping[str, Any] | None = None,
        *,
        keep: Callable[[Mapping[str, Any]], None] | None = None,
    ):
        self.past = past
        self._policy, self._keep, self._num, self._due = policy, keep, 0, 1

    def begin(self) -> Any:
        """The memory of a new request."""
        return self._policy.start() if self.past is None else self._policy.resume(self.past)

    def add(self, memory: Any) -> None:
        """Take in what a request had learned when it ended."""
        self.past = self._policy.carry(self.past, memory)
        self._num += 1
        if self._keep is not None and self.past is not None and self._num == self._due:
            self._due *= 4
            self._keep(self.past)
