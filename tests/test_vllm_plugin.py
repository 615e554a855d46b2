"""The plugin for vLLM without vLLM (which tests/engines/vllm has): settings, refusals, and the lengths of steps."""

import random
import re
from types import SimpleNamespace
from typing import Any

import pytest

from specdecpp.errors import BackendError
from specdecpp.integrations.vllm import configuring
from specdecpp.integrations.vllm.configuring import policy_of
from specdecpp.integrations.vllm.lengths import Lengths


def configuration(**changes: Any) -> Any:
    """A configuration of vLLM that the plugin can follow, changed at dotted names."""
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(
            method="draft_model",
            parallel_drafting=False,
            use_heterogeneous_vocab=False,
            use_local_argmax_reduction=False,
            enable_adaptive_verification=False,
            num_speculative_tokens=8,
            num_speculative_tokens_per_batch_size=None,
            draft_sample_method="greedy",
            kv_cache_dtype=None,
            uses_draft_model=lambda: True,
            uses_dynamic_speculative_decoding=lambda: True,
        ),
        scheduler_config=SimpleNamespace(async_scheduling=True, scheduler_cls=None, max_num_seqs=32),
        parallel_config=SimpleNamespace(
            data_parallel_size=1,
            pipeline_parallel_size=1,
            tensor_parallel_size=1,
            data_parallel_rank=0,
            decode_context_parallel_size=1,
        ),
        compilation_config=SimpleNamespace(static_forward_context={}),
        use_v2_model_runner=True,
        additional_config={},
    )
    for name, value in changes.items():
        *path, last = name.split("__")
        of = config
        for part in path:
            of = getattr(of, part)
        setattr(of, last, value)
    return config


@pytest.mark.parametrize("given", [{}, {"other": {"head": "x"}}, None, SimpleNamespace(specdecpp={})])
def test_without_its_key_the_plugin_does_nothing(given: Any) -> None:
    """Catches a plugin that changes engines nobody configured for it, or breaks on other plugins' settings."""
    config = SimpleNamespace(additional_config=given)
    assert policy_of(config) is None
    configuring.configure(config)
    configuring.attach(config)


@pytest.mark.parametrize(
    ("said", "settings", "changes"),
    [
        ("must map", "policy", {}),
        ("knows no 'head'. It takes policy", {"head": "x"}, {}),
        ("there is no policy 'magic:1'", {"policy": "magic:1"}, {}),
        ('"policy"] must be text, got 3', {"policy": 3}, {}),
        ("there is no speculative_config", {}, {"speculative_config": None}),
        ("the method is 'eagle'", {}, {"speculative_config__method": "eagle"}),
        ("the first one is in use", {}, {"use_v2_model_runner": False}),
        ("parallel drafting has no steps", {}, {"speculative_config__parallel_drafting": True}),
        ("two vocabularies", {}, {"speculative_config__use_heterogeneous_vocab": True}),
        ("cannot draft in pipeline stages", {}, {"parallel_config__pipeline_parallel_size": 2}),
        ("data parallel ranks", {}, {"parallel_config__data_parallel_size": 2}),
        ("cannot follow SpecDecPP", {"policy": "specdecpp:0.4"}, {}),
        ("cannot follow MaxConfidence", {"policy": "max-confidence:0.5,drop=true"}, {}),
        ("hides the probabilities", {"policy": "cumulative:0.2"}, {"speculative_config__use_local_argmax_reduction": True}),
        ("Remove num_spec", {}, {"speculative_config__num_speculative_tokens_per_batch_size": [(1, 32, 2)]}),
        ("on each tensor-parallel rank", {"policy": "cumulative:0.2"}, {"parallel_config__tensor_parallel_size": 2}),
    ],
)
def test_what_cannot_be_followed_is_refused(said: str, settings: Any, changes: dict[str, Any]) -> None:
    """Catches a configuration that would be ignored in part, a misspelt key that leaves the default, ranks in a deadlock."""
    with pytest.raises(ValueError, match=re.escape(said)):
        configuring.configure(configuration(additional_config={"specdecpp": settings}, **changes))


@pytest.mark.parametrize(
    ("ours", "schedule", "scheduler"),
    [
        ({}, {0, 1, 2, 3, 4, 6, 8}, "AdaptiveAsyncScheduler"),
        ({"policy": "cost-aware"}, {0, 1, 2, 3, 4, 6, 8}, "AdaptiveAsyncScheduler"),
        ({"policy": "fixed:3"}, {3}, None),
        ({"policy": "fixed:8"}, None, None),
        ({"policy": "none"}, {0}, None),
        ({"policy": "cumulative:0.2"}, None, None),
    ],
)
def test_lengths_are_configured_before_the_engine_is_made(ours: Any, schedule: set[int] | None, scheduler: str | None) -> None:
    """Catches a length that the target has no graphs for, a policy whose length vLLM does not hear of, and one that it does."""
    config = configuration(additional_config={"specdecpp": ours})
    configuring.configure(config)
    table = config.speculative_config.num_speculative_tokens_per_batch_size
    assert (None if table is None else {k for *_, k in table}) == schedule
    assert (config.scheduler_config.scheduler_cls or "").rpartition(".")[2] == (scheduler or "")
    if table is not None:
        assert [first for first, *_ in table] == [1, *(last + 1 for _, last, _ in table[:-1])]
        assert table[-1][1] == 32


def serve(
    lengths: Lengths, *, acceptance: float, pass_s: float, step_s: float, num_steps: int, num_reqs: int = 1, pauses: float = 0.0
) -> float:
    """Tokens per second of so many steps, each known one step late; a share of them takes three passes longer."""
    rng, now, tokens, waiting = random.Random(0), 0.0, 0, []
    for _ in range(num_steps):
        waiting.append(lengths[num_reqs])
        if len(waiting) < 2:
            continue
        k = waiting.pop(0)
        now += pass_s + step_s * k + (2 * step_s if k else 0.0) + 3 * pass_s * (rng.random() < pauses)
        accepted = [next((j for j in range(k) if rng.random() > acceptance), k) for _ in range(num_reqs)]
        tokens += num_reqs + sum(accepted)
        lengths.observe(now, num_reqs, k, [(k, a) for a in accepted] if k else [])
    return tokens / now


def best_fixed(**engine: Any) -> float:
    return max(serve(Lengths([k]), num_steps=3000, **engine) for k in (0, 1, 2, 3, 4, 6, 8))


@pytest.mark.parametrize(
    ("acceptance", "step_s", "num_reqs", "pauses"),
    [(0.9, 0.2, 1, 0), (0.7, 0.3, 1, 0), (0.6, 0.1, 8, 0), (0.3, 0.4, 1, 0), (0.1, 0.2, 32, 0), (0.6, 0.18, 1, 0.02)],
)
def test_the_length_is_nearly_the_best(acceptance: float, step_s: float, num_reqs: int, pauses: float) -> None:
    """Catches a chooser that is stuck, drafts where it does not pay, loses by asking, or takes pauses for costs."""
    engine: dict[str, Any] = {"acceptance": acceptance, "step_s": step_s, "num_reqs": num_reqs, "pauses": pauses, "pass_s": 1.0}
    assert serve(Lengths([0, 1, 2, 3, 4, 6, 8]), num_steps=3000, **engine) > 0.96 * best_fixed(**engine)


def test_drafting_that_begins_to_pay_is_found_out() -> None:
    """Catches a length of 0 that is never left again."""
    lengths = Lengths([0, 1, 2, 4, 8])
    serve(lengths, acceptance=0.05, pass_s=1.0, step_s=0.3, num_steps=500)
    assert lengths[1] == 0
    late = serve(lengths, acceptance=0.9, pass_s=1.0, step_s=0.3, num_steps=6000)
    assert late > 1.2


def test_what_is_learned_of_one_load_is_not_anothers() -> None:
    """Catches seconds of one request that are taken for those of 32."""
    lengths = Lengths([0, 2, 4])
    serve(lengths, acceptance=0.8, pass_s=1.0, step_s=0.1, num_steps=300)
    serve(lengths, acceptance=0.8, pass_s=1.0, step_s=3.0, num_steps=300, num_reqs=32)
    assert (lengths[1] > 0, lengths[32]) == (True, 0)
    assert "at up to 32 requests" in lengths.report()
    assert lengths.report() == ""


def test_what_trimming_leaves_out_under_load_is_no_loss_without_it() -> None:
    """Catches draft tokens that are left out in large batches and count as rejected in small ones."""
    lengths = Lengths([0, 2, 4], trims=True)
    for num_reqs, acceptance in ((1, 0.9), (32, 0.05)):
        serve(lengths, acceptance=acceptance, pass_s=1.0, step_s=0.3, num_steps=300, num_reqs=num_reqs)
    assert lengths[1] > 0


@pytest.mark.parametrize(
    ("installed", "is_tested"), [("0.32.0", True), ("0.33.0+cu129", True), ("0.31.0", False), ("0.34.0", False), (None, False)]
)
def test_only_tested_versions_are_accepted(installed: str | None, is_tested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a release whose inner names have moved and that is patched all the same."""

    def version(name: str) -> str:
        if installed is None:
            raise configuring.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(configuring, "version", version)
    if is_tested:
        configuring.check_version()
    else:
        with pytest.raises(BackendError, match=r"tested with vllm 0\.32\.0, 0\.33\.0; (none|0\.3)"):
            configuring.check_version()
