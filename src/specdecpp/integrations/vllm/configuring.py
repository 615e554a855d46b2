"""The plugin's way into an engine: its settings, the lengths of steps, and the one name of vLLM's that it replaces.

It is made for vLLM's second model runner, the default on CUDA. There vLLM asks one function for what drafts, and the plugin
puts its own in that place, in engines only that are configured for it. Such names move between releases, so the versions that
were tested are listed, and others are refused.
"""

import logging
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from specdecpp.errors import BackendError
from specdecpp.integrations.vllm.lengths import choices_up_to, schedule_of
from specdecpp.integrations.vllm.stopping import stop_rule
from specdecpp.policies import CostAware
from specdecpp.policy_spec import PolicySpec, parse_policy

KEY = "specdecpp"
"""The plugin's key in vLLM's `additional_config`."""
DEFAULT = "cost-aware"
TESTED = ("0.32.0", "0.33.0")
"""Versions of vLLM that the tests know."""
BACKEND, NAME = "vllm.v1.worker.gpu.model_runner", "init_speculator"
"""The place where vLLM looks up its speculator."""
HOME = "vllm.v1.worker.gpu.spec_decode"
OURS = "specdecpp.integrations.vllm.speculator"
SCHEDULER = "specdecpp.integrations.vllm.scheduler.Adaptive{}Scheduler"
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


def configure(vllm_config: Any) -> None:
    """Set the lengths of steps, before an engine makes its workers and its scheduler.

    Raises ValueError where the configuration chooses them too, or cannot be followed.
    """
    asked = policy_of(vllm_config)
    if asked is None:
        return
    check(vllm_config, asked)
    spec, scheduler = vllm_config.speculative_config, vllm_config.scheduler_config
    if spec.num_speculative_tokens_per_batch_size or scheduler.scheduler_cls:
        raise ValueError(
            f'additional_config["{KEY}"] chooses the lengths of steps. Remove num_speculative_tokens_per_batch_size and '
            "scheduler_cls, or the plugin."
        )
    policy = asked.policy
    if isinstance(policy, CostAware):
        choices = choices_up_to(spec.num_speculative_tokens, scheduler.max_num_seqs)
        scheduler.scheduler_cls = SCHEDULER.format("Async" if scheduler.async_scheduling else "")
    else:
        choices = [min(policy.max_tokens, spec.num_speculative_tokens)]
    if choices != [spec.num_speculative_tokens]:
        spec.num_speculative_tokens_per_batch_size = schedule_of(choices, scheduler.max_num_seqs)


def attach(vllm_config: Any) -> None:
    """Put our speculator in place, before an engine's worker makes one; vLLM's own if it is not configured.

    Raises ValueError for a configuration that cannot be followed, `BackendError` for an untested vLLM or a second plugin.
    """
    asked = policy_of(vllm_config)
    if asked is None:
        runner, ours = sys.modules.get(BACKEND), sys.modules.get(OURS)
        if runner is not None and ours is not None and getattr(runner, NAME) is ours.init_speculator:
            setattr(runner, NAME, getattr(import_module(HOME), NAME))
        return
    check(vllm_config, asked)
    check_version()
    runner, ours = import_module(BACKEND), import_module(OURS).init_speculator
    found = getattr(runner, NAME)
    if found is not getattr(import_module(HOME), NAME) and found is not ours:
        raise BackendError(
            f"another plugin has replaced {BACKEND}.{NAME} by {found.__module__}.{found.__qualname__}, and only one can draft. "
            "Name the plugins to load in VLLM_PLUGINS, with one of the two."
        )
    setattr(runner, NAME, ours)
    logger.info("specdecpp drafts in this engine")


def check_version() -> None:
    """Raise `BackendError` unless a tested vLLM is installed."""
    try:
        installed = version("vllm").partition("+")[0]
    except PackageNotFoundError:
        installed = "none"
    if installed not in TESTED:
        raise BackendError(
            f"specdecpp was tested with vllm {', '.join(TESTED)}; {installed} is installed, and vLLM's inner interfaces move "
            f'between releases. Install one of these, or remove additional_config["{KEY}"] to go without the plugin.'
        )


def check(vllm_config: Any, asked: PolicySpec) -> None:
    """Raise ValueError, with what to change, where the configuration cannot be followed."""
    spec = vllm_config.speculative_config
    if spec is None:
        raise ValueError(
            f'additional_config["{KEY}"] is set, but nothing is drafted: there is no speculative_config. Add '
            '--speculative-config \'{"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 8}\'.'
        )
    if spec.method != "draft_model":
        raise ValueError(
            f'additional_config["{KEY}"] is set, but the method is {spec.method!r}, which drafts without a draft model. Use '
            f'"method": "draft_model", or remove additional_config["{KEY}"].'
        )
    if not vllm_config.use_v2_model_runner:
        raise ValueError(
            f'additional_config["{KEY}"] needs vLLM\'s second model runner, and the first one is in use: on CPUs there is no '
            "other (this library serves by itself there, `specdecpp serve`), elsewhere remove VLLM_USE_V2_MODEL_RUNNER=0."
        )
    ranks, has_rule = vllm_config.parallel_config, stop_rule(asked, spec.num_speculative_tokens) is not None
    refusals: Mapping[str, bool] = {
        "parallel drafting has no steps to stop between": spec.parallel_drafting,
        "two vocabularies (use_heterogeneous_vocab) are not supported": spec.use_heterogeneous_vocab,
        "use_local_argmax_reduction hides the probabilities that a threshold reads": (
            has_rule and spec.use_local_argmax_reduction
        ),
        "a threshold may end steps differently on each tensor-parallel rank; use cost-aware or fixed:K": (
            has_rule and ranks.tensor_parallel_size > 1
        ),
        "data parallel ranks must draft equally long; use data_parallel_size 1 and several servers": (
            ranks.data_parallel_size > 1
        ),
        "the plugin cannot draft in pipeline stages; use tensor parallelism": ranks.pipeline_parallel_size > 1,
    }
    if hold := [reason for reason, holds in refusals.items() if holds]:
        raise ValueError(f'additional_config["{KEY}"] cannot be followed: {"; ".join(hold)}.')
