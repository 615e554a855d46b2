"""Our speculator of vLLM's second model runner on vLLM's classes; `world` stands in for kernels and graphs."""

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import DRAFT, TARGET
from test_vllm_plugin import configuration

from specdecpp.errors import BackendError
from specdecpp.integrations.vllm import configuring, register, stopping

pytestmark = pytest.mark.filterwarnings("default")


class Table:
    """A network of the last two tokens, drawn at random: what it says depends on the seed and the context only."""

    num_ids = 7

    def __init__(self, seed: int, *, like: "Table | None" = None, share: float = 0.0):
        self.table = torch.randn(self.num_ids, self.num_ids, self.num_ids, generator=torch.Generator().manual_seed(seed))
        if like is not None:
            self.table = share * like.table + (1 - share) * self.table

    def __call__(self, context: Sequence[int]) -> torch.Tensor:
        before, last = (0, *context)[-2:]
        return 2.5 * self.table[before, last]


@pytest.fixture(scope="module")
def target() -> Table:
    return Table(0)


@pytest.fixture(scope="module")
def draft(target: Table) -> Table:
    return Table(1, like=target, share=0.6)


def world(draft: Any, target: Any, ours: dict[str, Any] | None = None, **sizes: Any) -> Any:
    from world import World

    return World(draft, target, ours=ours or {}, **sizes)


def alone(target: Table, prompt: list[int], num: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < num:
        tokens.append(int(target(tokens).argmax()))
    return tokens


def argmaxes(network: Table, context: list[int], num: int) -> list[int]:
    return alone(network, context, len(context) + num)[len(context) :]


@pytest.mark.parametrize("graphs", [False, True])
def test_draft_tokens_are_those_of_the_draft_whatever_happened_before(graphs: bool, draft: Table, target: Table) -> None:
    """Catches a draft that reads too little, or too much, after steps of other lengths, none, prompts in parts, and a slot's
    next request: every draft token is the draft's own behind the true context (the cache notices anything else). As by graphs
    it also catches a pass that reads what is not in a buffer, and rows of padding that write."""
    found = world(draft, target, graphs=graphs)
    prompts = {"a": [1, 2, 3, 4, 5, 6, 1, 2, 3], "b": [4], "c": [6, 5, 4, 3, 2, 1, 0, 1, 2, 3, 4, 5]}
    lengths = [3, 3, 0, 0, 0, 2, 4, 1, 1, 4, 0, 4, 4]
    for i, length in enumerate(lengths):
        for name, at in (("a", 0), ("b", 1), ("c", 4)):
            if i == at:
                found.add(name, prompts[name])
        if i == 9:
            found.remove("b")
            prompts["d"] = [2, 2, 6]
            found.add("d", prompts["d"])
        found.step(length, chunk=5)
        for r in found.requests.values():
            if r.num_computed >= r.num_prompt and length:
                assert r.draft[:length] == argmaxes(draft, r.tokens, length)
            assert all(t == -1 for t in r.draft[length:])
    for name, r in found.requests.items():
        assert r.tokens == alone(target, prompts[name], len(r.tokens))
        assert len(r.tokens) > r.num_prompt + 4


def test_a_step_of_no_length_costs_nothing(draft: Table, target: Table) -> None:
    """Catches a pass, or an upload, where nothing is drafted: vLLM's own drafts read along."""
    found = world(draft, target)
    found.add("a", [1, 2, 3])
    for _ in range(4):
        found.step(0)
    assert not found.draft.passes
    found.step(2)
    assert found.draft.passes == [[6], [2], [1]]  # the first six of its eight tokens, then a step


def test_what_was_missed_is_read_in_passes_that_fit(draft: Table, target: Table) -> None:
    """Catches one pass over more tokens than the engine has room for, and parts in the wrong order."""
    found = world(draft, target, max_num_tokens=16)
    found.add("a", [1, 2, 3] * 5)
    found.add("b", [3, 2, 1] * 5)
    for _ in range(3):
        found.step(0, chunk=8)
    found.step(3)
    assert all(sum(widths) <= 16 for widths in found.draft.passes)
    assert all(r.draft[:3] == argmaxes(draft, r.tokens, 3) for r in found.requests.values())


class Whole:
    """A model of the reference pair, asked for whole contexts in float32."""

    def __init__(self, folder: str):
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        self.num_ids = self._model.config.vocab_size
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.inference_mode()
    def __call__(self, context: Sequence[int]) -> torch.Tensor:
        key = tuple(context)
        if key not in self._known:
            self._known[key] = self._model(torch.tensor([key])).logits[0, -1]
        return self._known[key]


@pytest.mark.parametrize("policy", ["cumulative:0.3", pytest.param("max-confidence:0.4", marks=pytest.mark.slow), "fixed:3"])
def test_every_step_is_the_librarys_own(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a score, a threshold or a product that is not the rule's: a step late, of another request, at another scale."""
    from specdecpp.decoder import Decoder
    from specdecpp.loading.pair import load_pair
    from specdecpp.policy_spec import parse_policy

    monkeypatch.setattr(stopping, "LAG", 0)
    found = world(Whole(DRAFT), Whole(TARGET), {"policy": policy}, most=6, max_model_len=128, max_num_tokens=128)
    pair = load_pair(backend="eager")
    rule = replace(parse_policy(policy).policy, **({} if policy.startswith("fixed") else {"max_tokens": 6}))
    decoder = Decoder(pair, policy=rule)
    prompts = {text: pair.tokenizer(text).input_ids for text in ("Tom has 3 apples", "def fib(n):\n")}
    for name, prompt in prompts.items():  # one after the other: a batch goes on while any request does
        found.add(name, prompt)
        for _ in range(14):
            found.step(3 if policy.startswith("fixed") else 6)
        request = found.requests[name]
        own = decoder.generate([*prompt, request.tokens[len(prompt)]], max_tokens=80, temperature=0.0, ignore_eos=True)
        assert request.steps == [(r.num_drafted, r.num_accepted) for r in own.steps[: len(request.steps)]]
        assert request.tokens[len(prompt) + 1 :] == list(own.tokens)[: len(request.tokens) - len(prompt) - 1]
        assert policy.startswith("fixed") or len({num for num, _ in request.steps}) >= 3
        found.remove(name)


PROMPTS = [[a, b, (a * b + 1) % 7] for a in range(3) for b in range(4)]


def first_lengths(draft: Table, target: Table) -> list[int]:
    """Draft tokens of each prompt's first step, alone."""
    found, lengths = world(draft, target, {"policy": "cumulative:0.3"}), []
    for prompt in PROMPTS:
        found.add("a", prompt)
        found.step(4)
        lengths.append(sum(t >= 0 for t in found.requests["a"].draft))
        found.remove("a")
    return lengths


def test_a_batch_goes_on_while_any_request_does(draft: Table, target: Table) -> None:
    """Catches a loop that ends with the first request that stops, and tokens that are thrown away after they were drawn."""
    lengths = first_lengths(draft, target)
    shortest, longest = (PROMPTS[lengths.index(find(lengths))] for find in (min, max))
    found = world(draft, target, {"policy": "cumulative:0.3"})
    found.add("a", shortest)
    found.add("b", longest)
    found.step(4)
    assert min(lengths) < max(lengths)
    assert [sum(t >= 0 for t in r.draft) for r in found.requests.values()] == [max(lengths)] * 2


def test_a_flag_that_is_read_late_ends_a_step_one_token_later(
    draft: Table, target: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a lag of two, and one that is not there: on a CPU the flag of the step before is always known."""
    late = first_lengths(draft, target)
    monkeypatch.setattr(stopping, "LAG", 0)
    at_once = first_lengths(draft, target)
    assert late == [min(4, n + 1) for n in at_once]
    assert min(at_once) < 3


@pytest.mark.parametrize("release", ["installed", "newest"])
def test_the_second_runner_has_what_ours_builds_on(
    release: str, python: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    """Catches a release on the list of known ones whose backend, scheduler or rejection sampler has changed under us."""
    path = "" if release == "installed" else str(request.getfixturevalue("newest"))
    assert python("names.py", PYTHONPATH=os.pathsep.join([path, os.environ.get("PYTHONPATH", "")])) == []


def test_a_draft_with_a_sliding_window_is_refused(draft: Table, target: Table) -> None:
    """Catches a draft that reads late what it has missed, and writes it where the window's blocks are another request's."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    found = world(draft, target).speculator
    sizes = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    for spec, fits in ((FullAttentionSpec(**sizes), True), (SlidingWindowSpec(**sizes, sliding_window=32), False)):
        found.attn_groups = [[SimpleNamespace(kv_cache_spec=spec)]]
        with nullcontext() if fits else pytest.raises(BackendError, match="SlidingWindowSpec"):
            found.check_attention()


@pytest.mark.parametrize("asked", [pytest.param("cumulative:0.3", marks=pytest.mark.slow), "cumulative:0.1 trims"])
def test_the_distribution_is_the_targets(asked: str, python: Callable[..., Any]) -> None:
    """Catches a missing draft token that is verified, other distributions than those proposed: chi-square, 180 answers."""
    num_answers = 180
    found = python("draws.py", str(num_answers), *asked.split(), CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")
    cells, rest = [], [0, 0.0]
    for num, p in found["rows"]:
        if num_answers * p >= 5:
            cells.append((num, num_answers * p))
        else:
            rest = [rest[0] + num, rest[1] + num_answers * p]
    cells.append((rest[0], rest[1]))
    chi_square, num_free = sum((num - mean) ** 2 / mean for num, mean in cells), len(cells) - 1
    assert num_free >= 8
    assert chi_square < num_free + 3.5 * (2 * num_free) ** 0.5
    assert len(found["accepted"]) >= 3
    assert len(found["lengths"]) == 3


def test_engines_get_what_they_are_configured_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a plugin that is not asked, stays in place for engines without its key, or takes another plugin's place."""
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.spec_decode import init_speculator

    from specdecpp.integrations.vllm import speculator

    monkeypatch.setattr(configuring, "check_version", lambda: None)  # this build has another name
    configuring.attach(configuration(additional_config={"specdecpp": {}}))
    assert model_runner.init_speculator is speculator.init_speculator
    configuring.attach(SimpleNamespace(additional_config={}))
    assert model_runner.init_speculator is init_speculator
    monkeypatch.setattr(model_runner, "init_speculator", test_engines_get_what_they_are_configured_for)
    with pytest.raises(BackendError, match=r"another plugin has replaced .*init_speculator by test_vllm"):
        configuring.attach(configuration(additional_config={"specdecpp": {}}))


def test_an_engine_on_a_cpu_is_refused() -> None:
    """Catches a server that starts, and drafts as if the plugin were not there."""
    from vllm import LLM

    options: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "distributed_executor_backend": "uni"}
    drafting = {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 8}
    with pytest.raises(ValueError, match="needs vLLM's second model runner, and the first one is in use"):
        LLM(TARGET, speculative_config=drafting, additional_config={"specdecpp": {}}, max_model_len=256, **options)


def test_the_plugin_can_be_loaded_again() -> None:
    """Catches a second layer around vLLM's worker each time a process loads its plugins."""
    from vllm.v1.worker.worker_base import WorkerBase

    register()
    before = WorkerBase.__init__
    register()
    assert WorkerBase.__init__ is before
