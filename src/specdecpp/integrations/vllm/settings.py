"""Settings of the plugin: `additional_config={"specdecpp": {...}}` of vLLM, read and checked.

policy   a rule as text, such as "fixed:3" or "cumulative:0.3" (`request.parse_policy`); without it the length that makes the
         most tokens per second, by what is measured while requests are served
ends     how steps end: "before" at the length that was chosen before them, the default of rules without a threshold; else a
         threshold may end them: "late" and "poll" learn of it a draft step late (`stopping`), "now" waits for every step
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdecpp.policy_spec import PolicySpec, parse_policy

KEY = "specdecpp"
ENDS = ("before", "now", "late", "poll")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The plugin's part of an engine's configuration."""

    policy: PolicySpec | None = None
    ends: str | None = None

    @classmethod
    def of(cls, vllm_config: Any) -> "Settings | None":
        """Those of an engine, None where it has none: the plugin then does nothing. Raises ValueError for what is not
        known."""
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
        policy, ends = values.get("policy"), values.get("ends")
        if not isinstance(policy, str | None):
            raise ValueError(f'additional_config["{KEY}"]["policy"] must be text, got {policy!r}.')
        if ends is not None and ends not in ENDS:
            raise ValueError(f'additional_config["{KEY}"]["ends"] must be one of {", ".join(ENDS)}, got {ends!r}.')
        return cls(policy=None if policy is None else parse_policy(policy), ends=ends)
