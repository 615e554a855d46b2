"""Figures of answers as clients of llama.cpp and vLLM read them, and llama.cpp's own endpoint."""

import json
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from time import monotonic
from typing import Any

import pytest
from batched import compiled_pair
from served import Served, served

from specdecpp.backends import native
from specdecpp.decoder import encode
from specdecpp.loading.pair import Pair
from specdecpp.metrics import Metrics
from specdecpp.serving.replies import speculative_decoding, timings_of
from specdecpp.serving.schema import ChatRequest

TEXT = "I believe the meaning of life is"
MESSAGE = [{"role": "user", "content": TEXT}]
TEXTS, CHATS, NATIVE = "/v1/completions", "/v1/chat/completions", "/completion"
ALWAYS = {"speculative": {"policy": "fixed:3"}}
"""The policy that drafts whatever steps cost here."""
DETAILED = {"speculative": {"policy": "fixed:3", "details": True}}


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": MESSAGE} if path == CHATS else {"prompt": TEXT}
    return prompt | {"temperature": 0, "max_tokens" if path.startswith("/v1/") else "n_predict": 24} | fields


def asked(server: Served, path: str, **fields: Any) -> Any:
    reply = server.post(path, body_of(path, **fields))
    assert reply.status_code == 200, reply.text
    return reply.json()


def streamed(server: Served, path: str, **fields: Any) -> list[Any]:
    reply = server.post(path, body_of(path, stream=True, **fields))
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert (lines[-1] == "[DONE]") == path.startswith("/v1/"), "llama.cpp's own endpoint does not say so"
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_llama_cpps_figures_by_hand() -> None:
    """Catches cached tokens that count as read, seconds for milliseconds, and a division by no time."""
    found = timings_of(Metrics(num_prompt_tokens=30, num_cached_tokens=10, num_tokens=8), prompt_s=0.5, predicted_s=2.0)
    assert (found.cache_n, found.prompt_n, found.predicted_n) == (10, 20, 8)
    assert (found.prompt_ms, found.prompt_per_token_ms, found.prompt_per_second) == (500, 25, 40)
    assert (found.predicted_ms, found.predicted_per_token_ms, found.predicted_per_second) == (2000, 250, 4)
    assert timings_of(Metrics(), prompt_s=0.0, predicted_s=0.0).predicted_per_second is None


def test_the_figures_are_those_of_the_steps(server: Served) -> None:
    """Catches sums that do not fit the steps or each other, a step without draft tokens that counts (vLLM's does not), lengths
    that are pooled, and times that go beyond what the client saw."""
    started = monotonic()
    reply = asked(server, TEXTS, **DETAILED)
    waited_ms = 1e3 * (monotonic() - started)
    steps = [(s["num_drafted"], s["num_accepted"]) for s in reply["speculative"]["steps"][0]]
    block, timings, usage = reply["metrics"]["speculative_decoding"], reply["timings"], reply["usage"]
    counts = Counter((k, j) for k, j in steps if k)
    assert any(j for _, j in counts), "some were accepted"
    assert block["acceptance_histogram"] == [sum(n for (_, i), n in counts.items() if i == j) for j in range(3 + 1)]
    by_length = {int(k): row for k, row in block["acceptance_histogram_by_draft_length"].items()}
    assert {(k, j): n for k, row in by_length.items() for j, n in enumerate(row) if n} == counts
    assert sum(block["acceptance_histogram"]) == block["num_spec_steps"] == counts.total()
    assert block["mean_acceptance_length"] == 1 + timings["draft_n_accepted"] / counts.total()
    assert block["num_spec_tokens"] == 3
    assert timings["draft_n"] == block["num_draft_tokens"] == sum(k for k, _ in steps)
    assert timings["draft_n_accepted"] == block["num_accepted_draft_tokens"] == sum(j for _, j in steps)
    assert block["draft_acceptance_rate"] == timings["draft_n_accepted"] / timings["draft_n"]
    assert timings["predicted_n"] == usage["completion_tokens"] == len(steps) + timings["draft_n_accepted"]
    assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"]
    assert 1e3 * reply["speculative"]["elapsed_s"] <= timings["prompt_ms"] + timings["predicted_ms"] <= waited_ms
    assert speculative_decoding([], 2).mean_acceptance_length == 1.0


@pytest.mark.parametrize("path", [TEXTS, CHATS])
def test_a_stream_has_the_figures_at_its_end(server: Served, path: str) -> None:
    """Catches figures in every chunk, in none, or other ones than those of the whole; vLLM's come with the usage alone."""
    whole = asked(server, path, **ALWAYS)
    untimed = {name: value for name, value in whole["timings"].items() if name.endswith(("_n", "_accepted"))}
    for more in ({}, {"stream_options": {"include_usage": True, "include_obfuscation": False}}):
        *parts, last = streamed(server, path, **ALWAYS, **more)
        assert not any({"timings", "metrics"} & set(part) for part in parts)
        assert (bool(last["choices"]), last.get("metrics")) == ((False, whole["metrics"]) if more else (True, None))
        assert untimed.items() <= last["timings"].items()


def test_figures_of_several_answers_and_without_a_draft(server: Served) -> None:
    """Catches figures of one answer that stand for all, and a histogram where nothing could be drafted."""
    single = [asked(server, TEXTS, temperature=1, seed=seed, **ALWAYS) for seed in (3, 4)]
    both = asked(server, TEXTS, temperature=1, seed=3, n=2, **ALWAYS)
    assert both["metrics"] == {"speculative_decoding": None}
    for name in ("prompt_n", "predicted_n", "draft_n", "draft_n_accepted"):
        assert both["timings"][name] == sum(reply["timings"][name] for reply in single)
    alone = asked(server, TEXTS, speculative=False)
    assert (alone["metrics"], alone["timings"]["draft_n"]) == ({"speculative_decoding": None}, 0)


@pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")
def test_cached_tokens_are_not_read_again() -> None:
    """Catches `cache_n` that stays 0 where caches are kept, and a rate that counts cached tokens."""
    with served(compiled_pair()) as server:
        first, second = (asked(server, NATIVE, prompt=[3 + i % 40 for i in range(60)], n_predict=4) for _ in range(2))
    assert (first["timings"]["cache_n"], first["timings"]["prompt_n"]) == (0, 60)
    assert second["timings"]["cache_n"] > 0
    assert second["timings"]["cache_n"] + second["timings"]["prompt_n"] == second["tokens_evaluated"] == 60


def test_requests_of_llama_cpps_tests(server: Served) -> None:
    """Catches a draft that changes a greedy answer, one that is not used, and a stream that is another answer."""
    fields = {"n_predict": 16, "top_k": 1, "speculative.p_min": 0.0, "cache_prompt": False, "seed": -1}
    alone, drafted = (asked(server, NATIVE, **fields, speculative=how) for how in (False, ALWAYS["speculative"]))
    ours = asked(server, TEXTS, max_tokens=16)["choices"][0]["text"]
    assert alone["content"] == drafted["content"] == ours
    assert (alone["timings"]["draft_n"], drafted["timings"]["draft_n"] > 0) == (0, True)
    assert (drafted["tokens_predicted"], drafted["stop_type"], drafted["truncated"]) == (16, "limit", False)
    assert (drafted["stop"], drafted["tokens"], drafted["has_new_line"]) == (True, [], "\n" in ours)
    *parts, last = streamed(server, NATIVE, **fields, return_tokens=True)
    assert "".join(part["content"] for part in parts) == ours
    tokens = asked(server, "/completions", **fields, return_tokens=True)["tokens"]
    assert [token for part in parts for token in part["tokens"]] == tokens
    assert len(tokens) == 16
    assert not any(part["stop"] or "timings" in part for part in parts)
    assert (last["content"], last["stop"], last["timings"]["predicted_n"]) == ("", True, 16)
    assert last["generation_settings"]["n_predict"] == 16
    assert all("timings" in part for part in streamed(server, NATIVE, **fields, timings_per_token=True))


def test_how_an_answer_of_llama_cpps_endpoint_ends(server: Served) -> None:
    """Catches ends that are all called alike, and an answer that the context cut short without a word."""
    whole = asked(server, NATIVE)["content"]
    stop = whole[5:8]
    stopped = asked(server, NATIVE, stop=[stop])
    assert (stopped["content"], stopped["stop_type"]) == (whole[: whole.index(stop)], "word")
    for num in (-1, 500):
        cut = asked(server, NATIVE, prompt=[5] * 1000, n_predict=num, ignore_eos=True)
        assert (cut["tokens_predicted"], cut["stop_type"], cut["truncated"]) == (24, "limit", True)
    assert server.post(NATIVE, {"prompt": [5] * 1024}).json()["error"]["code"] == "context_length_exceeded"
    ended = [asked(server, NATIVE, temperature=1, n_predict=-1, seed=seed, **ALWAYS) for seed in range(4)]
    assert {"eos"} <= {reply["stop_type"] for reply in ended}
    assert not any(reply["truncated"] for reply in ended if reply["stop_type"] == "eos")


def test_several_prompts_of_llama_cpps_endpoint(server: Served) -> None:
    """Catches answers under another prompt's index, in the whole and in a stream, and figures of all in place of each's."""
    texts = [TEXT, "Hello"]
    both, chunks = (ask(server, NATIVE, n_predict=6, prompt=texts) for ask in (asked, streamed))
    for i, text in enumerate(texts):
        single = asked(server, NATIVE, n_predict=6, prompt=text)
        same = ("content", "prompt", "tokens_evaluated")
        assert [both[i][name] for name in ("index", *same)] == [i, *(single[name] for name in same)]
        assert both[i]["timings"]["prompt_n"] == single["tokens_evaluated"]
        assert "".join(chunk["content"] for chunk in chunks if chunk["index"] == i) == single["content"]


def test_sampling_under_llama_cpps_names(server: Served) -> None:
    """Catches a parameter that gets lost between its two names."""
    names = {"top_k": 5, "top_p": 0.9, "min_p": 0.05, "temperature": 0.9, "seed": 7}
    ours = asked(server, TEXTS, **names, **ALWAYS, repetition_penalty=1.3)["choices"][0]["text"]
    theirs = asked(server, NATIVE, **names, **ALWAYS, repeat_penalty=1.3, repeat_last_n=-1)
    assert theirs["content"] == ours
    off = asked(server, NATIVE, **names, **ALWAYS, repeat_penalty=1.3, repeat_last_n=0)
    assert off["content"] == asked(server, NATIVE, **names, **ALWAYS)["content"] != ours
    assert theirs["generation_settings"].items() >= (names | {"repeat_penalty": 1.3}).items()
    assert asked(server, NATIVE, top_k=-1, seed=2**32 - 1)["generation_settings"]["top_k"] == 0


def test_what_clients_of_llama_cpp_ask_first(server: Served) -> None:
    """Catches properties that are not this server's."""
    props = server.get("/props").json()
    assert (props["total_slots"], props["default_generation_settings"]["n_ctx"]) == (4, 1024)
    own = server.post(NATIVE, {"prompt": TEXT, "n_predict": 1}).json()["generation_settings"]
    assert props["default_generation_settings"]["params"].items() <= (own | {"n_predict": -1}).items()
    assert server.get("/models").json() == server.get("/v1/models").json()


def test_a_template_sees_roles_and_names(pair: Pair) -> None:
    """Catches a role or a name that the template never sees; a developer is OpenAI's newer word for the system."""
    tokenizer = deepcopy(pair.tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }} {{ m['name'] }}: {{ m['content'] }}{% endfor %}"
    for role, seen in (("developer", "system"), ("system", "system"), ("user", "user")):
        (named,) = ChatRequest.model_validate({"messages": [{"role": role, "content": TEXT, "name": "ann"}]}).prompts
        text = pair.tokenizer(f"{seen} ann: {TEXT}", add_special_tokens=False)
        assert encode(replace(pair, tokenizer=tokenizer), named) == text.input_ids
