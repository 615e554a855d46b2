"""The plugin's settings, `additional_config={"specdecpp": {...}}` of vLLM, and its log, below vLLM's own."""

import logging
from collections.abc import Mapping
from typing import Any

from specdecpp.policy_spec import PolicySpec, parse_policy

KEY = "specdecpp"
DEFAULT = "cost-aware"
logger = logging.getLogger("vllm.specdecpp")


def policy_of(vllm_config: Any) -> PolicySpec | None:
    """The policy of an engine; None where it is not configured for the plugin. Raises ValueError for what is not known."""
    given = getattr(vllm_config, "additional_config", None)
    if not isinstance(given, Mapping) or KEY not in given:
        return None
    values = given[KEY]
    if not isinstance(values, Mapping):
        raise ValueError(f'additional_config["{KEY}"] must map policy to a value, got {values!r}.')
    if unknown := sorted(set(values) - {"policy"}):
        raise ValueError(f'additional_config["{KEY}"] knows no {unknown[0]!r}. It takes policy.')
    policy = values.get("policy", DEFAULT)
    if not isinstance(policy, str):
        raise ValueError(f'additional_config["{KEY}"]["policy"] must be text, got {policy!r}.')
    return parse_policy(policy)
