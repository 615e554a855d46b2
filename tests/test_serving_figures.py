"""Figures of answers as clients of llama.cpp and vLLM read them, llama.cpp's own endpoint, and OpenAI's newer fields."""

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
from specdecpp.metrics import Metrics, Piece, Step
from specdecpp.policies.protocol import Stop
from specdecpp.serving.replies import speculative_decoding, timings_of
from specdecpp.serving.schema import ChatRequest

TEXT = "I believe the meaning of life is"
GREEDY = {"temperature": 0.0, "top_k": 1}
FIXED = {"speculative": {"policy": "fixed:3", "details": True}}
ALWAYS = {"speculative": {"policy": "fixed:3"}}
"""The policy that drafts whatever steps cost here."""
MESSAGE = [{"role": "user", "content": TEXT}]
PATHS = ["/v1/completions", "/v1/chat/completions"]


def asked(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": MESSAGE} if "chat" in path else {"prompt": TEXT}
    return prompt | {"temperature": 0, "max_tokens": 24} | fields


def told(server: Served, path: str, body: dict[str, Any]) -> Any:
    reply = server.post(path, body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def streamed(server: Served, path: str, body: dict[str, Any]) -> list[Any]:
    reply = server.post(path, body | {"stream": True})
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert (lines[-1] == "[DONE]") == path.startswith("/v1/"), "llama.cpp's own endpoint does not say so"
    return [json.loads(line) for line in lines if line != "[DONE]"]


def step(num_drafted: int, num_accepted: int) -> Step:
    return Step(
        pieces=(Piece(token=1, text="a", origin="accepted"),) * num_accepted + (Piece(token=2, text="b", origin="bonus"),),
        num_drafted=num_drafted,
        num_accepted=num_accepted,
        stop=Stop(),
        judged=(),
        finish_reason=None,
        draft_s=0.0,
        head_s=0.0,
        verify_s=0.0,
        other_s=0.0,
    )


def test_vllms_figures_by_hand() -> None:
    """Catches a step without draft tokens that counts (vLLM's does not), and lengths that are pooled."""
    found = speculative_decoding([step(0, 0), step(1, 1), step(3, 2), step(3, 0), step(0, 0)], 4)
    assert found.model_dump(mode="json") == {
        "mean_acceptance_length": 2.0,  # 1 + 3 / 3
        "draft_acceptance_rate": 3 / 7,
        "acceptance_histogram": [1, 1, 1, 0, 0],
        "acceptance_histogram_by_draft_length": {"1": [0, 1], "3": [1, 0, 1, 0]},
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 3,
        "num_draft_tokens": 7,
        "num_spec_tokens": 4,
    }
    one, other = ([step(1, 1), step(3, 2)], [step(2, 1), step(2, 2)])
    pooled, apart = (
        {"mean_acceptance_length", "acceptance_histogram", "num_draft_tokens"},
        "acceptance_histogram_by_draft_length",
    )
    of_one, of_other = (speculative_decoding(steps, 3).model_dump() for steps in (one, other))
    assert {name: of_one[name] for name in pooled} == {name: of_other[name] for name in pooled}
    assert of_one[apart] != of_other[apart]
    assert speculative_decoding([step(0, 0)], 2).mean_acceptance_length == 1.0


def test_llama_cpps_figures_by_hand() -> None:
    """Catches cached tokens that count as read, seconds for milliseconds, and a division by no time."""
    metrics = Metrics(num_prompt_tokens=30, num_cached_tokens=10, num_tokens=8, num_draft_tokens=6, num_accepted_draft_tokens=3)
    assert timings_of(metrics, prompt_s=0.5, predicted_s=2.0).model_dump() == {
        "cache_n": 10,
        "prompt_n": 20,
        "prompt_ms": 500.0,
        "prompt_per_token_ms": 25.0,
        "prompt_per_second": 40.0,
        "predicted_n": 8,
        "predicted_ms": 2000.0,
        "predicted_per_token_ms": 250.0,
        "predicted_per_second": 4.0,
        "draft_n": 6,
        "draft_n_accepted": 3,
    }
    assert timings_of(Metrics(), prompt_s=0.0, predicted_s=0.0).predicted_per_second is None


@pytest.mark.parametrize("path", PATHS)
def test_the_figures_are_those_of_the_steps(server: Served, path: str) -> None:
    """Catches sums that do not fit the steps or each other, and times that go beyond what the client saw."""
    started = monotonic()
    reply = told(server, path, asked(path, **FIXED))
    waited_ms = 1e3 * (monotonic() - started)
    steps = [(s["num_drafted"], s["num_accepted"]) for s in reply["speculative"]["steps"][0]]
    block, timings, usage = reply["metrics"]["speculative_decoding"], reply["timings"], reply["usage"]
    counts = Counter((k, j) for k, j in steps if k)
    assert any(j for _, j in counts), "some were accepted"
    assert block["acceptance_histogram"] == [sum(n for (_, i), n in counts.items() if i == j) for j in range(3 + 1)]
    by_length = {int(k): row for k, row in block["acceptance_histogram_by_draft_length"].items()}
    assert {(k, j): n for k, row in by_length.items() for j, n in enumerate(row) if n} == counts
    assert sum(block["acceptance_histogram"]) == sum(map(sum, by_length.values())) == block["num_spec_steps"]
    assert block["num_spec_tokens"] == 3
    assert timings["draft_n"] == block["num_draft_tokens"] == sum(k for k, _ in steps)
    assert timings["draft_n_accepted"] == block["num_accepted_draft_tokens"] == sum(j for _, j in steps)
    assert block["draft_acceptance_rate"] == timings["draft_n_accepted"] / timings["draft_n"]
    assert timings["predicted_n"] == usage["completion_tokens"] == len(steps) + timings["draft_n_accepted"]
    assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"]
    both_ms = timings["prompt_ms"] + timings["predicted_ms"]
    assert 1e3 * reply["speculative"]["elapsed_s"] <= both_ms <= waited_ms
    assert timings["predicted_per_second"] == pytest.approx(1e3 * timings["predicted_n"] / timings["predicted_ms"])


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_has_the_figures_at_its_end(server: Served, path: str) -> None:
    """Catches figures in every chunk, in none, or other ones than those of the whole."""
    body = asked(path, **ALWAYS)
    whole = told(server, path, body)
    *parts, last = streamed(server, path, body | {"stream_options": {"include_usage": True, "include_obfuscation": False}})
    assert not any({"timings", "metrics"} & set(part) for part in parts)
    assert (last["choices"], last["metrics"]) == ([], whole["metrics"])
    untimed = {name: value for name, value in whole["timings"].items() if name.endswith(("_n", "_accepted"))}
    assert untimed.items() <= last["timings"].items()
    *parts, last = streamed(server, path, body)
    assert not any({"timings", "metrics"} & set(part) for part in parts)
    assert last["choices"][0]["finish_reason"]
    assert untimed.items() <= last["timings"].items()
    assert "metrics" not in last, "vLLM's are in the chunk of the usage alone"


def test_figures_of_several_answers_and_without_a_draft(server: Served) -> None:
    """Catches figures of one answer that stand for all, and a histogram where nothing could be drafted."""
    path = PATHS[0]
    single = [told(server, path, asked(path, temperature=1, seed=seed, **FIXED)) for seed in (3, 4)]
    both = told(server, path, asked(path, temperature=1, seed=3, n=2, **FIXED))
    assert both["metrics"] == {"speculative_decoding": None}
    for name in ("prompt_n", "predicted_n", "draft_n", "draft_n_accepted"):
        assert both["timings"][name] == sum(reply["timings"][name] for reply in single)
    alone = told(server, path, asked(path, speculative=False))
    assert (alone["metrics"], alone["timings"]["draft_n"]) == ({"speculative_decoding": None}, 0)


@pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")
def test_cached_tokens_are_not_read_again() -> None:
    """Catches `cache_n` that stays 0 where caches are kept, and a rate that counts cached tokens."""
    prompt = [3 + i % 40 for i in range(60)]
    with served(compiled_pair()) as server:
        first, second = (told(server, "/completion", {"prompt": prompt, "n_predict": 4, "temperature": 0}) for _ in range(2))
    assert (first["timings"]["cache_n"], first["timings"]["prompt_n"]) == (0, 60)
    assert second["timings"]["cache_n"] > 0
    assert second["timings"]["cache_n"] + second["timings"]["prompt_n"] == second["tokens_evaluated"] == 60


def test_requests_of_llama_cpps_tests(server: Served) -> None:
    """Catches a draft that changes a greedy answer, one that is not used, and a stream that is another answer."""
    body = {"prompt": TEXT, **GREEDY, "n_predict": 16, "speculative.p_min": 0.0, "cache_prompt": False, "seed": -1}
    alone, drafted = (told(server, "/completion", body | {"speculative": how}) for how in (False, ALWAYS["speculative"]))
    assert (
        alone["content"] == drafted["content"] == told(server, PATHS[0], asked(PATHS[0], max_tokens=16))["choices"][0]["text"]
    )
    assert (alone["timings"]["draft_n"], drafted["timings"]["draft_n"] > 0) == (0, True)
    assert (drafted["tokens_predicted"], drafted["stop_type"], drafted["truncated"]) == (16, "limit", False)
    assert drafted["tokens"] == []
    assert (drafted["stop"], drafted["has_new_line"]) == (True, "\n" in drafted["content"])
    *parts, last = streamed(server, "/completion", body | {"return_tokens": True})
    assert "".join(part["content"] for part in parts) == drafted["content"]
    tokens = told(server, "/completions", body | {"return_tokens": True})["tokens"]
    assert [token for part in parts for token in part["tokens"]] == tokens
    assert len(tokens) == 16
    assert not any(part["stop"] or "timings" in part for part in parts)
    assert (last["content"], last["stop"], last["timings"]["predicted_n"]) == ("", True, 16)
    assert last["generation_settings"]["n_predict"] == 16
    assert all("timings" in part for part in streamed(server, "/completion", body | {"timings_per_token": True}))


def test_how_an_answer_of_llama_cpps_endpoint_ends(server: Served) -> None:
    """Catches ends that are all called alike, and an answer that the context cut short without a word."""
    whole = told(server, "/completion", {"prompt": TEXT, **GREEDY, "n_predict": 24})["content"]
    stop = whole[5:8]
    stopped = told(server, "/completion", {"prompt": TEXT, **GREEDY, "stop": [stop]})
    assert (stopped["content"], stopped["stop_type"]) == (whole[: whole.index(stop)], "word")
    ids = [5] * 1000
    for num in (-1, 500):
        cut = told(server, "/completion", {"prompt": ids, "n_predict": num, "ignore_eos": True})
        assert (cut["tokens_predicted"], cut["stop_type"], cut["truncated"]) == (24, "limit", True)
    assert server.post("/completion", {"prompt": [5] * 1024}).json()["error"]["code"] == "context_length_exceeded"
    ended = [told(server, "/completion", {"prompt": TEXT, "seed": seed, **ALWAYS}) for seed in range(4)]
    assert {"eos"} <= {reply["stop_type"] for reply in ended}
    assert not any(reply["truncated"] for reply in ended if reply["stop_type"] == "eos")


def test_several_prompts_of_llama_cpps_endpoint(server: Served) -> None:
    """Catches answers under another prompt's index, in the whole and in a stream, and figures of all in place of each's."""
    body = {**GREEDY, "n_predict": 6}
    alone = [told(server, "/completion", body | {"prompt": prompt}) for prompt in (TEXT, "Hello")]
    both = told(server, "/completion", body | {"prompt": [TEXT, "Hello"]})
    chunks = streamed(server, "/completion", body | {"prompt": [TEXT, "Hello"]})
    for i, single in enumerate(alone):
        same = ("content", "prompt", "tokens_evaluated")
        assert [both[i][name] for name in ("index", *same)] == [i, *(single[name] for name in same)]
        assert both[i]["timings"]["prompt_n"] == single["tokens_evaluated"]
        assert "".join(chunk["content"] for chunk in chunks if chunk["index"] == i) == single["content"]


def test_sampling_under_llama_cpps_names(server: Served) -> None:
    """Catches a parameter that gets lost between its two names."""
    names = {"top_k": 5, "top_p": 0.9, "min_p": 0.05, "temperature": 0.9, "seed": 7}
    ours = told(server, PATHS[0], asked(PATHS[0], **names, **ALWAYS, repetition_penalty=1.3))["choices"][0]["text"]
    body = {"prompt": TEXT, "n_predict": 24, **names, **ALWAYS}
    theirs = told(server, "/completion", body | {"repeat_penalty": 1.3, "repeat_last_n": -1})
    assert theirs["content"] == ours
    off = told(server, "/completion", body | {"repeat_penalty": 1.3, "repeat_last_n": 0})
    plain = told(server, "/completion", body)
    assert off["content"] == plain["content"] != ours
    assert theirs["generation_settings"].items() >= (names | {"repeat_penalty": 1.3}).items()
    assert told(server, "/completion", body | {"top_k": -1, "seed": 2**32 - 1})["generation_settings"]["top_k"] == 0


def test_what_clients_of_llama_cpp_ask_first(server: Served, pair: Pair) -> None:
    """Catches properties that are not this server's, and that are shown without the key."""
    props = server.get("/props").json()
    assert (props["total_slots"], props["default_generation_settings"]["n_ctx"]) == (4, 1024)
    own = told(server, "/completion", {"prompt": TEXT, "n_predict": 1})["generation_settings"]
    assert props["default_generation_settings"]["params"].items() <= (own | {"n_predict": -1}).items()
    assert server.get("/models").json() == server.get("/v1/models").json()
    with served(pair, api_key="secret") as locked:
        assert [locked.get(path).status_code for path in ("/props", "/models", "/health")] == [401, 401, 200]
        assert locked.post("/completion", {"prompt": TEXT}).status_code == 401


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/completion", {"n_predict": 0}, "n_predict"),
    ("/completion", {"n_predict": "8"}, "n_predict"),
    ("/completion", {"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n"),
    ("/completion", {"speculative": {"details": True}}, "speculative.details"),
    *(("/completion", {name: value}, name) for name, value in {"mirostat": 2, "n_probs": 3, "grammar": "root ::= x"}.items()),
    *((path, {"store": True}, "store") for path in PATHS),
    *((path, {"service_tier": tier}, "service_tier") for path in PATHS for tier in ("flex", "priority")),
    *((path, {"metadata": {"a": 1}}, "metadata.a") for path in PATHS),
    *((path, {"tool_choice": "required"}, "tool_choice") for path in PATHS),
    (PATHS[1], {"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
]


@pytest.mark.parametrize(("path", "fields", "param"), REFUSED, ids=[str(fields)[:40] for _, fields, _ in REFUSED])
def test_what_would_change_the_answer_is_refused(server: Served, path: str, fields: dict[str, Any], param: str) -> None:
    """Catches a field that asks for something and is let through in silence."""
    body = {"prompt": TEXT} if path == "/completion" else asked(path)
    reply = server.post(path, body | fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_openais_newer_fields_change_no_answer(server: Served, pair: Pair) -> None:
    """Catches a refusal of what OpenAI's clients send, and a role or a name that the template never sees."""
    labels = {"metadata": {"team": "a"}, "store": False, "safety_identifier": "u1", "prompt_cache_key": "k"}
    for path in PATHS:
        plain = told(server, path, asked(path))
        for tier, choice in (("auto", "auto"), ("default", "none")):
            full = told(server, path, asked(path, **labels, service_tier=tier, tool_choice=choice))
            assert full["choices"] == plain["choices"]
    by_role = [
        told(server, PATHS[1], asked(PATHS[1]) | {"messages": [{"role": role, "content": "Be brief."}, *MESSAGE]})
        for role in ("developer", "system", "user")
    ]
    developer, system, user = (reply["usage"]["prompt_tokens"] for reply in by_role)
    assert developer == system != user
    assert by_role[0]["choices"] == by_role[1]["choices"]
    (named,) = ChatRequest.model_validate({"messages": [MESSAGE[0] | {"name": "ann"}]}).prompts
    tokenizer = deepcopy(pair.tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m['name'] }}: {{ m['content'] }}{% endfor %}"
    assert encode(replace(pair, tokenizer=tokenizer), named) == tokenizer(f"ann: {TEXT}", add_special_tokens=False).input_ids
