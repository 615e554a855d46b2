"""Operation of the server: places, keys, clients that go away, signals, logs, counters."""

import http.client
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from served import PATIENCE_S, Served, eventually, served
from typer.testing import CliRunner

import specdecpp as sd
from specdecpp import cli
from specdecpp.loading.pair import Pair
from specdecpp.serving import logs
from specdecpp.testing import TableModel, tiny_tokenizer

LONG = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "n": 3}
ENDLESS = {"prompt": "abc", "max_tokens": 10**9, "ignore_eos": True}
"""A request to the pair of `endless_pair` that is answered until somebody ends it."""


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    return sd.load_pair(folder / "target", draft=folder / "draft")


@pytest.fixture(scope="module")
def server(pair: Pair) -> Iterator[Served]:
    with served(pair, max_running=2, max_waiting=2, name="tiny") as running:
        yield running


@pytest.fixture(scope="module")
def endless_pair() -> Pair:
    """A pair without an end of its context: whatever the machine, an answer of `ENDLESS` is never over before a test is."""
    target, draft = (TableModel.random(vocab_size=8, depth=1, seed=seed) for seed in (1, 2))
    return Pair(target=target, draft=draft, tokenizer=tiny_tokenizer(8))


@pytest.fixture(scope="module")
def endless(endless_pair: Pair) -> Iterator[Served]:
    with served(endless_pair, max_running=2, max_waiting=2, max_new_tokens=ENDLESS["max_tokens"]) as running:
        yield running


@pytest.fixture
def stopping(endless_pair: Pair) -> Iterator[Served]:
    """A server that waits with stopping until its requests have ended."""
    with served(endless_pair, grace_s=PATIENCE_S, max_new_tokens=ENDLESS["max_tokens"]) as running:
        yield running


def is_idle(server: Served) -> bool:
    return server.engine.num_running == server.engine.num_waiting == 0


def counters(server: Served) -> dict[str, float]:
    """Every sample, by its name and labels."""
    families = text_string_to_metric_families(server.get("/metrics").text)
    return {s.name + "".join(s.labels.values()): s.value for family in families for s in family.samples}


def test_who_finds_no_place_is_told_when_to_come_again(endless: Served) -> None:
    """Catches a queue without a bound, a 429 without Retry-After or one that /metrics does not count, and places that a stream
    keeps after its client has gone."""
    with httpx2.Client(base_url=endless.url, timeout=PATIENCE_S) as client, ExitStack() as opened:
        for _ in range(4):
            reply = opened.enter_context(client.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}))
            assert reply.status_code == 200
        full = endless.post("/v1/completions", {"prompt": "abc"})
        assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
        assert int(full.headers["retry-after"]) >= 1
        assert counters(endless)["specdecpp_requests_totalqueue_full"] >= 1
        full_house = {"status": "ok", "running": 2, "waiting": 2}
        assert eventually(lambda: endless.get("/health").json() == full_house)
    assert eventually(lambda: is_idle(endless))
    again = endless.post("/v1/completions", {"prompt": "abc", "ignore_eos": True})
    assert again.json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_goes_away_frees_its_place(endless: Served, is_stream: bool) -> None:
    """Catches work that goes on for nobody, with or without a stream: this one would never be idle again."""
    before = counters(endless).get("specdecpp_requests_totalcancelled", 0)
    connection = http.client.HTTPConnection(endless.url.removeprefix("http://"), timeout=PATIENCE_S)
    body = json.dumps({**ENDLESS, "stream": is_stream})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    assert eventually(lambda: endless.engine.num_running == 1)
    if is_stream:
        with connection.getresponse() as reply:
            assert reply.read(1)
    connection.close()
    assert eventually(lambda: is_idle(endless))
    assert eventually(lambda: counters(endless).get("specdecpp_requests_totalcancelled", 0) > before)


def test_a_request_past_its_time_ends_with_an_error(endless_pair: Pair) -> None:
    """Catches a deadline that a stream does not hear of, or that leaves the work running."""
    with served(endless_pair, timeout_s=0.2, max_new_tokens=ENDLESS["max_tokens"]) as server:
        reply = server.post("/v1/completions", ENDLESS)
        assert (reply.status_code, reply.json()["error"]["code"]) == (504, "timeout")
        with pytest.raises(openai.APIError, match="was not finished within"):
            list(server.client().completions.create(model=server.name, stream=True, extra_body=ENDLESS, prompt="abc"))
        assert is_idle(server)


def test_the_key_is_asked_for_where_models_are_used(pair: Pair) -> None:
    """Catches an endpoint that the key does not guard, health checks that need one, or a scheme in lower case is refused."""
    with served(pair, api_key="sesame") as server:
        for scheme in ("Bearer ", "bearer ", "BEARER  "):
            assert server.get("/v1/models", headers={"authorization": f"{scheme}sesame"}).status_code == 200
        for wrong in ("Bearer Sesame", "Bearer ses\u00e4me", "Basic sesame", "sesame", "Bearer"):
            reply = server.get("/v1/models", headers={"authorization": wrong.encode()})
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        for path in ("/v1/completions", "/v1/chat/completions", "/completion", "/completions"):
            assert server.post(path, LONG).status_code == 401
        closed, opened = ("/v1/models", "/v1/models/x", "/models", "/props"), ("/health", "/metrics", "/")
        assert [server.get(path).status_code for path in (*closed, *opened)] == [401] * 4 + [200] * 3


FOREIGN = ("evil.example", "evil.example:80", "localhost.evil.example", "", "127.0.0.1.evil.example", "xn--bcher-kva.example")


def test_a_page_that_points_its_name_here_is_turned_away(pair: Pair) -> None:
    """Catches DNS rebinding: without a key any page could ask this server by a name of its own, and read what it says. Catches
    hosts that are refused though nobody but a friend would name them."""
    with served(pair, allowed_hosts=("box.lan", "*.home.arpa")) as server:
        for host in FOREIGN:
            reply = server.get("/health", headers={"host": host})
            assert (reply.status_code, reply.json()["error"]["code"]) == (421, "unknown_host")
            assert "--allowed-hosts" in reply.json()["error"]["message"]
        for host in ("LOCALHOST:80", "localhost.", "127.0.0.1", "[::1]:9", "192.168.7.7:8000", "Box.lan:1", "a.home.arpa"):
            assert server.get("/health", headers={"host": host}).status_code == 200, host
    key, box = {"api_key": "sesame"}, {"allowed_hosts": ("box.lan",)}
    for setup, status in (({"allowed_hosts": ("*",)}, 200), (key, 200), (key | box, 421)):
        with served(pair, **setup) as server:
            assert server.get("/health", headers={"host": FOREIGN[0]}).status_code == status


def test_a_conversation_needs_a_template(server: Served) -> None:
    """Catches a 500 where the tokenizer has no chat template."""
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        server.client().chat.completions.create(model="tiny", messages=[{"role": "user", "content": "abc"}])


def test_counters_add_up_to_what_was_answered(server: Served) -> None:
    """Catches counters that miss steps, count them twice, or have no place for refusals."""
    before = counters(server)
    reply = server.post("/v1/completions", {"prompt": "abcd", "max_tokens": 30, "ignore_eos": True, "n": 2, "seed": 0}).json()
    num = before.get("specdecpp_requests_totalfinished", 0)
    assert eventually(lambda: counters(server).get("specdecpp_requests_totalfinished", 0) > num)
    after = counters(server)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    block = reply["speculative"]
    assert grown["specdecpp_generation_tokens_total"] == reply["usage"]["completion_tokens"] == 60
    assert grown["vllm:spec_decode_num_drafts_total"] == block["num_spec_steps"] - block["drafted_histogram"].get("0", 0)
    assert grown["vllm:spec_decode_num_draft_tokens_total"] == block["num_draft_tokens"]
    assert grown["vllm:spec_decode_num_accepted_tokens_total"] == block["num_accepted_draft_tokens"]
    at = [value for name, value in grown.items() if "per_pos_total" in name]
    assert sum(at) == block["num_accepted_draft_tokens"]
    assert grown["specdecpp_stage_seconds_totalverify"] == pytest.approx(block["verify_s"])
    assert grown["specdecpp_time_to_first_token_seconds_count"] == 1
    assert (after["specdecpp_requests_running"], after["specdecpp_requests_waiting"]) == (0, 0)


def test_every_request_leaves_one_line_of_json(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    """Catches logs that a machine cannot read, that lack the figures, or that tell what people write."""
    with caplog.at_level(logging.INFO, logs.LOGGER):
        headers = {"x-request-id": "my-name"}
        reply = server.post("/v1/completions", {"prompt": "secret", "max_tokens": 5, "user": "ann"}, headers=headers)
        server.post("/v1/completions", {"prompt": "secret", "frob": 1}, headers={"x-request-id": "bad\tname"})
        assert eventually(lambda: len(caplog.records) >= 2)
    assert reply.headers["x-request-id"] == "my-name"
    assert reply.json()["id"] == "cmpl-my-name"
    good, bad = (json.loads(logs.JsonLines().format(record)) for record in caplog.records)
    assert (good["id"], good["status"], good["outcome"], good["user"]) == ("my-name", 200, "finished", "ann")
    assert good["completion_tokens"] == reply.json()["usage"]["completion_tokens"]
    assert (bad["status"], "frob" in bad["error"], bad["id"] != "bad\tname") == (400, True, True)
    assert "secret" not in caplog.text


def test_who_asks_while_it_stops_is_told(stopping: Served) -> None:
    """Catches a door that is shut at the signal, so that nobody sees /health say 503, and broken connections of others."""
    with httpx2.stream("POST", f"{stopping.url}/v1/completions", json={**ENDLESS, "stream": True}, timeout=PATIENCE_S) as reply:
        lines = reply.iter_lines()
        next(lines)
        stopping.server.should_exit = True
        assert eventually(lambda: stopping.get("/health").status_code == 503)
        assert stopping.get("/health").json() == {"status": "stopping", "running": 1, "waiting": 0}
        late = stopping.post("/v1/completions", LONG)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "shutting_down")
        assert "retry-after" in late.headers
        lines.close()


def test_a_second_interrupt_ends_requests_with_an_error_of_ours(stopping: Served, caplog: pytest.LogCaptureFixture) -> None:
    """Catches "Internal Server Error" as plain text, a stream that breaks off, and a traceback in the log."""
    with caplog.at_level(logging.INFO), ThreadPoolExecutor() as pool:
        whole, stream = (pool.submit(stopping.post, "/v1/completions", {**ENDLESS, "stream": on}) for on in (False, True))
        assert eventually(lambda: stopping.engine.num_running == 2)
        stopping.server.handle_exit(signal.SIGINT, None)
        assert eventually(lambda: stopping.get("/health").status_code == 503)
        stopping.server.handle_exit(signal.SIGINT, None)
        reply, events = whole.result(PATIENCE_S), stream.result(PATIENCE_S)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "shutting_down")
        assert json.loads(events.text.split("data: ")[-1])["error"]["code"] == "shutting_down"
        stopping.thread.join(PATIENCE_S)
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]
    facts = [record.facts for record in caplog.records if record.getMessage() == "stopped"]  # pyright: ignore[reportAttributeAccessIssue]
    assert facts == [{"dropped": 2}]


def test_an_engine_that_has_failed_says_so(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """Catches a server that looks well while its engine is dead, and clients that wait for it without end."""
    with served(pair) as server:
        assert server.get("/health").json()["status"] == "ok"

        def fail(steps: Any) -> None:
            raise RuntimeError("lightning")

        server.engine._on_turn = fail
        for _ in range(2):
            reply = server.post("/v1/completions", LONG)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "failed")
        health = server.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "failed", "running": 0, "waiting": 0})
    assert "lightning" in caplog.text


def test_the_verb_finishes_what_it_has_begun_and_ends_well(folder: Path) -> None:
    """Catches a process that a signal kills in the middle of an answer, one that prints more than its address, and a port that
    is reported but not listened on."""
    command = [sys.executable, "-m", "specdecpp", "serve", "--port", "0", "--target", str(folder / "target")]
    command += ["--draft", str(folder / "draft"), "--policy", "fixed:3", "--name", "mine", "--grace", "120"]
    environment = {**os.environ, "PYTHONPATH": str(Path(sd.__file__).parents[1])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:"), process.stderr.read()
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
            stream = client.completions.create(model="mine", stream=True, prompt="abc", extra_body=LONG)
            first = next(iter(stream))
            process.send_signal(signal.SIGTERM)
            ends = [choice.finish_reason for chunk in [first, *stream] for choice in chunk.choices if choice.finish_reason]
        assert ends == ["length"] * 3
        rest, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, rest) == (0, "")
    events = {line["event"]: line for line in map(json.loads, filter(lambda e: e.startswith("{"), errors.splitlines()))}
    assert events["stopped"]["dropped"] == 0
    assert events["request"]["policy"] == "fixed:3"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "warp"], "there is no policy"),
        (["--max-running", "0"], "--max-running"),
        (["--timeout", "nan"], "timeout_s must be above 0"),
        (["--host", "256.0.0.1"], "cannot listen on 256.0.0.1"),
    ],
)
def test_what_cannot_be_served_is_told_before_models_are_loaded(arguments: list[str], message: str) -> None:
    """Catches a typing mistake that is found only after minutes of loading."""
    result = CliRunner().invoke(cli.app, ["serve", *arguments], prog_name="specdecpp")
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr
