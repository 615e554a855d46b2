"""What a user says to the plugin: `additional_config={"specdecpp": {...}}` of vLLM, read and checked.

head     folder or hub name of an acceptance head; without it the one beside the draft (`heads.BESIDE`)
policy   a rule as text, such as "cost-aware" or "cumulative:0.3" (`request.parse_policy`); without it the best one the
         head allows
costs    what a step takes, for rules that weigh it: {"draft_s": ..., "passes": {"1": ..., "5": ...}} in seconds, if wanted
         with "start_s" (`policies.Costs`), or {"c": ...} relative to a target pass; without it they are measured while requests
         are served
draft    the draft model, on the route that has no other place for it (`custom.Proposer`)
ends     how rounds of the second model runner end: "before" at the length that was chosen before them, the default of rules
         without a threshold; else a threshold may end them: "late" and "poll" learn of it a draft step late (`stopping`),
         "now" waits for every step
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdecpp.policies import Costs
from specdecpp.request import PolicySpec, parse_policy

KEY = "specdecpp"
ENDS = ("before", "now", "late", "poll")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The plugin's part of an engine's configuration."""

    head: str | None = None
    policy: PolicySpec | None = None
    costs: Costs | None = None
    draft: str | None = None
    ends: str | None = None

    @classmethod
    def of(cls, vllm_config: Any) -> "Settings | None":
        """Those of an engine, None where it has none: the plugin then does nothing. Raises ValueError for what is not known."""
        given = getattr(vllm_config, "additional_config", None)
        if not isinstance(given, Mapping) or KEY not in given:
            return None
        return cls.parse(given[KEY])

    @classmethod
    def parse(cls, values: Any) -> "Settings":
        """Read the mapping under "specdecpp".

        >>> Settings.parse({"policy": "fixed:4"}).policy.policy
        Fixed(k=4)
        """
        names = tuple(cls.__dataclass_fields__)
        if not isinstance(values, Mapping):
            raise ValueError(f'additional_config["{KEY}"] must map {", ".join(names)} to values, got {values!r}.')
        if unknown := sorted(set(values) - set(names)):
            raise ValueError(f'additional_config["{KEY}"] knows no {unknown[0]!r}. It takes {", ".join(names)}.')
        for name in ("head", "policy", "draft"):
            if not isinstance(values.get(name), str | None):
                raise ValueError(f'additional_config["{KEY}"]["{name}"] must be text, got {values[name]!r}.')
        policy, costs, ends = values.get("policy"), values.get("costs"), values.get("ends")
        if ends is not None and ends not in ENDS:
            raise ValueError(f'additional_config["{KEY}"]["ends"] must be one of {", ".join(ENDS)}, got {ends!r}.')
        return cls(
            head=values.get("head"),
            policy=None if policy is None else parse_policy(policy),
            costs=None if costs is None else _costs(costs),
            draft=values.get("draft"),
            ends=ends,
        )


def _costs(values: Any) -> Costs:
    try:
        if set(values) == {"c"}:
            return Costs.relative(float(values["c"]))
        if unknown := sorted(set(values) - {"draft_s", "passes", "start_s"}):
            raise ValueError(f"there is no {unknown[0]!r}")
        return Costs.parse(values)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f'additional_config["{KEY}"]["costs"] must be {{"draft_s": seconds, "passes": {{"1": seconds, ...}}}}, with '
            f'"start_s" if wanted, or {{"c": draft step over target pass}}, got {values!r} ({error}).'
        ) from error
