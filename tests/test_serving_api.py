"""The server as OpenAI's own client meets it, over HTTP on loopback, with the pair that ships."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest
from served import Served, served

from specdecpp.decoder import Decoder, encode
from specdecpp.loading.pair import Pair
from specdecpp.serving import exchange
from specdecpp.serving.app import PAGE

TEXT = "Ann has 3 bags of 12 apples. How many apples does she have?"
MESSAGES: list[Any] = [{"role": "user", "content": f"{TEXT}\nLet's think step by step."}]
FIXED = {"speculative": {"policy": "fixed:3"}}
"""Under it the answer to a seed does not depend on what steps cost here."""


def chat(client: openai.OpenAI, **asked: Any) -> Any:
    return client.chat.completions.create(**({"model": "reference", "messages": MESSAGES, "max_tokens": 24} | asked))


def complete(client: openai.OpenAI, **asked: Any) -> Any:
    return client.completions.create(**({"model": "reference", "prompt": TEXT, "max_tokens": 24} | asked))


def test_the_one_model_is_listed(pair: Pair) -> None:
    """Catches a name in the list that requests do not know, and no page for one with a slash, as hub names have."""
    with served(pair, name="org/tiny") as server:
        client = server.client()
        (model,) = client.models.list().data
        assert model.id == client.models.retrieve(model.id).id == server.get("/v1/models/org/tiny").json()["id"] == "org/tiny"
        assert complete(client, model=model.id, max_tokens=1).model == "org/tiny"
        for name in ("gpt-4", "org"):
            with pytest.raises(openai.NotFoundError, match="there is no model"):
                client.models.retrieve(name)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 3},
        {"temperature": 1.0, "top_p": 0.9, "seed": 4},
        {"temperature": 1.0, "top_k": 5, "min_p": 0.05, "repetition_penalty": 1.2, "seed": 5},
    ],
    ids=lambda o: ",".join(o),
)
def test_the_text_is_the_decoders_own(client: openai.OpenAI, pair: Pair, options: dict) -> None:
    """Catches a sampling parameter that gets lost between the request and the session, in both endpoints."""
    extra = {name: options[name] for name in ("top_k", "min_p", "repetition_penalty") if name in options}
    plain = {name: value for name, value in options.items() if name not in extra}
    decoder = Decoder(pair)
    expected = decoder.generate(TEXT, max_tokens=24, **{"seed": 0, **options})
    told = complete(client, **plain, extra_body=extra)
    assert (told.choices[0].text, told.usage.completion_tokens) == (expected.text, len(expected.tokens))
    expected = decoder.generate(MESSAGES, max_tokens=24, **{"seed": 0, **options})
    told = chat(client, **plain, extra_body=extra)
    assert told.choices[0].message.content == expected.text
    assert told.usage.prompt_tokens == len(encode(pair, MESSAGES))


def test_the_playground_is_one_page_that_asks_nobody_else(server: Served) -> None:
    """Catches a script or style that is left out of the package, and anything that is loaded from elsewhere."""
    reply = server.get("/")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    text = reply.text
    for name in ("page.css", "page.js"):
        assert (PAGE / name).read_text() in text
    assert not re.search(r"/\* (style|script) \*/", text)
    assert not re.search(r"https?://", text)
    assert not re.search(r"<script[^>]+src|<link[^>]+stylesheet|@import|@font-face|url\(", text)


def test_a_stream_says_what_the_whole_says(client: openai.OpenAI) -> None:
    """Catches a piece that is lost or sent twice, a role or an end in the wrong chunk, and usage that nobody asked for."""
    asked: dict[str, Any] = {"seed": 1, "max_tokens": 40, "logprobs": True, "top_logprobs": 1}
    whole = chat(client, **asked)
    *parts, last = chunks = list(chat(client, **asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content for c in parts) == whole.choices[0].message.content
    assert [c.choices[0].delta.role for c in parts] == ["assistant"] + [None] * (len(parts) - 1)
    ends = [c.choices[0].finish_reason for c in parts]
    assert ends == [None] * (len(parts) - 1) + [whole.choices[0].finish_reason]
    assert (last.choices, last.usage) == ([], whole.usage)
    assert [c.usage for c in parts] == [None] * len(parts)
    scores = [entry.token for c in parts for entry in c.choices[0].logprobs.content]
    assert scores == [entry.token for entry in whole.choices[0].logprobs.content]
    assert "".join(scores) == whole.choices[0].message.content
    assert len({c.id for c in chunks}) == 1
    assert all(c.choices != [] for c in chat(client, seed=1, max_tokens=4, stream=True)), "no usage unless asked for"


def test_a_completion_streams_too(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a chunk per step where nobody asked for steps, one with steps of two answers, a score that gets lost, and offsets
    that begin anew with every chunk or count tokens which are not shown."""
    monkeypatch.setattr(exchange, "PAUSE_S", 1e9)
    special = "<|assistant|>"
    told = ((seed, complete(client, n=2, seed=seed, logprobs=2, extra_body=FIXED)) for seed in range(100))
    seed, whole = next((seed, whole) for seed, whole in told if special in whole.choices[0].logprobs.tokens)
    chunks = list(complete(client, n=2, seed=seed, logprobs=2, stream=True, extra_body=FIXED))
    assert [chunk.choices[0].index for chunk in chunks] == [0, 0, 1]  # the first step at once, all others with the end
    for i, choice in enumerate(whole.choices):
        parts = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == i]
        assert "".join(part.text for part in parts) == choice.text
        assert [token for part in parts for token in part.logprobs.tokens] == choice.logprobs.tokens
        offsets = [offset for part in parts for offset in part.logprobs.text_offset]
        assert offsets == choice.logprobs.text_offset
        shown = [(at, token) for at, token in zip(offsets, choice.logprobs.tokens, strict=True) if token != special]
        assert all(choice.text[at:].startswith(token) for at, token in shown)
        assert parts[-1].finish_reason == choice.finish_reason


def test_several_answers_have_their_own_seeds(client: openai.OpenAI) -> None:
    """Catches answers that are all the same, or that depend on how many there are."""
    several = complete(client, n=3, seed=5)
    alone = [complete(client, seed=5 + i) for i in range(3)]
    assert [choice.text for choice in several.choices] == [one.choices[0].text for one in alone]
    below = complete(client, n=2, seed=-1)
    assert [choice.text for choice in below.choices] == [complete(client, seed=seed).choices[0].text for seed in (-1, 0)]
    assert len({choice.text for choice in several.choices}) == 3
    assert several.usage.prompt_tokens == alone[0].usage.prompt_tokens


def test_prompts_may_be_ids_and_may_be_several(client: openai.OpenAI, pair: Pair) -> None:
    """Catches prompts that are joined, or answered in another order."""
    other = "def add(a, b):"
    ids = [encode(pair, text) for text in (TEXT, other)]
    alone = [complete(client, prompt=text, temperature=0).choices[0].text for text in (TEXT, other)]
    assert alone[0] != alone[1]
    for prompt in ([TEXT, other], ids):
        told = complete(client, prompt=prompt, temperature=0)
        assert [choice.text for choice in told.choices] == alone
        assert told.usage.prompt_tokens == sum(map(len, ids))
    assert complete(client, prompt=ids[1], temperature=0).choices[0].text == alone[1]


def test_stop_strings_end_the_answer(client: openai.OpenAI) -> None:
    """Catches a stop string that is shown, or an end that is called length."""
    whole = complete(client, temperature=0, max_tokens=32).choices[0].text
    stop = whole[10:13]
    told = complete(client, temperature=0, max_tokens=32, stop=["never there", stop]).choices[0]
    assert (told.text, told.finish_reason) == (whole[: whole.index(stop)], "stop")
    assert complete(client, temperature=0, max_tokens=3).choices[0].finish_reason == "length"


def test_speculation_can_be_chosen_and_changes_no_greedy_text(client: openai.OpenAI) -> None:
    """Catches a policy or verification that is not used, and sums that do not fit."""
    hows: list[Any] = [True, False, {"policy": "fixed:3"}]
    replies = [chat(client, temperature=0, max_tokens=32, extra_body={"speculative": how}) for how in hows]
    assert len({told.choices[0].message.content for told in replies}) == 1
    for told in replies:
        block = told.speculative
        assert block["num_tokens"] == told.usage.completion_tokens
        assert sum(block["acceptance_histogram"].values()) == block["num_spec_steps"]
        assert sum(block["time_shares"].values()) == pytest.approx(1)
    default, alone, fixed = (told.speculative for told in replies)
    assert (alone["policy"], alone["num_draft_tokens"]) == ("none", 0)
    assert (fixed["policy"], fixed["num_spec_tokens"]) == ("fixed:3", 3)
    assert fixed["mean_acceptance_length"] > 1.2
    assert default["policy"].startswith("cost-aware")
    block = chat(client, seed=1, extra_body={"speculative": {"policy": "fixed:3", "verification": "block"}})
    assert block.speculative["verification"] == "block"


def test_details_have_every_step_as_it_comes(client: openai.OpenAI) -> None:
    """Catches details that leave a step out, that differ between stream and whole, or that come unasked."""
    asked = {"speculative": {"policy": "specdecpp:0.5", "details": True}}
    whole = complete(client, seed=7, extra_body=asked)
    chunks = list(complete(client, seed=7, stream=True, extra_body=asked))
    steps = [chunk.speculative["step"] for chunk in chunks]
    timed = {"at_s", "times"}
    assert [{k: v for k, v in r.items() if k not in timed} for r in steps] == [
        {k: v for k, v in r.items() if k not in timed} for r in whole.speculative["steps"][0]
    ]
    assert "".join(piece["text"] for r in steps for piece in r["pieces"]) == whole.choices[0].text
    assert {r["survival_of"] for r in steps if r["survival"]} == {"head"}
    assert sum(r["num_drafted"] for r in steps) == chunks[-1].speculative["num_draft_tokens"]
    at = [r["at_s"] for r in steps]
    assert at == sorted(at)
    plain = complete(client, seed=7, extra_body={"speculative": {"policy": asked["speculative"]["policy"]}})
    assert plain.speculative["steps"] is None
    assert plain.choices[0].text == whole.choices[0].text


REFUSED: list[tuple[dict, str | None, str | None]] = [
    ({"logit_bias": {"5": 1}}, "logit_bias", "unsupported_parameter"),
    ({"store": True}, "store", "unsupported_parameter"),
    ({"tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
    ({"frobnicate": None}, "frobnicate", "unknown_parameter"),
    ({"metadata": {"a": 1}}, "metadata.a", None),
    ({"temperature": 2.5}, "temperature", None),
    ({"temperature": 1e-9}, "temperature", None),
    ({"max_tokens": 9000}, "max_tokens", None),
    ({"stream_options": {"include_usage": True}}, "stream_options", None),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", None),
    ({"max_tokens": 2000}, "prompt", "context_length_exceeded"),
    ({"prompt": "apples " * 1200}, "prompt", "context_length_exceeded"),
    ({"prompt": [4096]}, "prompt", None),
    ({"prompt": None}, "prompt", "missing"),
    ({"\ud800": 1}, None, None),
    ({"prompt": []}, "prompt", None),
    ({"prompt": ["a", 1]}, "prompt.1", None),
    ({"prompt": [[1], ["a"]]}, "prompt.1.0", None),
    ({"prompt": ["a", "ab\ud83d"]}, "prompt", None),
    ({"stop": ["a", ""]}, "stop.1", None),
    ({"speculative": {"bool": True}}, "speculative.bool", "unknown_parameter"),
    ({"speculative": {"policy": "warp"}}, "speculative", None),
    ({"speculative": {"policy": "fixed:1000000000"}}, "speculative", None),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", None),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0", None),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type", None),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages.0.tool_calls.0", None),
    ({"messages": [{"role": "user", "content": "x", "refusal": "no"}]}, "messages.refusal", "unsupported_parameter"),
    ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs", None),
    ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice", None),
    ({"messages": MESSAGES, "max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", None),
    ({"n_predict": 0}, "n_predict", None),
    ({"n_predict": "8"}, "n_predict", None),
    ({"n_predict": 1, "repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n", None),
    ({"n_predict": 1, "speculative": {"details": True}}, "speculative.details", None),
    ({"n_predict": 1, "grammar": "root ::= x"}, "grammar", "unsupported_parameter"),
]


@pytest.mark.parametrize(("asked", "param", "code"), REFUSED, ids=[str(asked)[:40] for asked, *_ in REFUSED])
def test_what_is_not_supported_is_refused_by_name(server: Served, asked: dict, param: str | None, code: str | None) -> None:
    """Catches a field that is ignored, an error in another shape than OpenAI's, and the name of a type in a field's place."""
    path = "/v1/chat/completions" if "messages" in asked else "/completion" if "n_predict" in asked else "/v1/completions"
    given = {} if "messages" in asked else {"prompt": TEXT}
    reply = server.post(path, content=json.dumps(given | asked), headers={"content-type": "application/json"})
    error = reply.json()["error"]
    assert (reply.status_code, set(error)) == (400, {"message", "type", "param", "code"})
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)


def test_values_that_ask_for_nothing_are_let_through(server: Served) -> None:
    """Catches a refusal of what common clients send unasked, and content in parts that is read otherwise."""
    nothing = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "tools": [], "tool_choice": "none"}
    nothing |= {"response_format": {"type": "text"}, "seed": None, "n": None, "stop": None, "audio": None, "user": "ann"}
    nothing |= {"metadata": {"team": "a"}, "store": False, "safety_identifier": "u1", "prompt_cache_key": "k"}
    nothing |= {"service_tier": "auto", "stream_options": None}
    message = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None}
    parts = [{"type": "text", "text": TEXT[:9]}, {"type": "text", "text": TEXT[9:]}]
    told = []
    for content, more in ((TEXT, {}), (parts, nothing)):
        messages = [*MESSAGES, message, {"role": "user", "content": content}]
        reply = server.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 9} | more)
        assert reply.status_code == 200, reply.text
        told.append(reply.json()["choices"])
    assert told[0] == told[1]


def test_paths_methods_and_types_that_do_not_exist(server: Served) -> None:
    """Catches errors of the framework in a shape that clients cannot read, and a 405 without Allow (RFC 9110, 15.5.6)."""
    plain = server.post("/v1/completions", content='{"prompt": "x"}', headers={"content-type": "text/plain"})
    for reply, status in ((server.get("/v1/embeddings"), 404), (plain, 400)):
        assert (reply.status_code, set(reply.json()["error"])) == (status, {"message", "type", "param", "code"})
    for method, path, allowed in (("DELETE", "/v1/models", "GET"), ("HEAD", "/v1/completions", "POST")):
        reply = httpx2.request(method, f"{server.url}{path}")
        assert (reply.status_code, reply.headers["allow"]) == (405, allowed)


def test_head_is_get_without_a_body(server: Served) -> None:
    """Catches a 405 for the monitors that ask /health so, and a body that the next answer on the connection begins with."""
    with httpx2.Client() as client:
        head, got = (client.request(method, f"{server.url}/health") for method in ("HEAD", "GET"))
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers["content-length"] == got.headers["content-length"] == str(len(got.content))


@pytest.mark.parametrize(
    ("content", "status"),
    [
        ("{", 400),
        ("[" * 100_000, 400),
        ("1" * 9000, 400),
        ('{"prompt": "x", "temperature": NaN}', 400),
        (b"", 400),
        ('"' + "x" * 2**20 + '"', 413),
        ((b" " * 2**16 for _ in range(20)), 413),
    ],
    ids=["half", "deep", "long number", "NaN", "empty", "too long", "too long in pieces"],
)
def test_a_bad_body_is_an_error_of_the_client(server: Served, content: Any, status: int) -> None:
    """Catches a parser's exception that becomes a 500, and a body that is read without a bound."""
    reply = server.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert (reply.status_code, reply.json()["error"]["type"]) == (status, "invalid_request_error")


def test_answers_are_the_same_in_any_company(server: Served) -> None:
    """Catches requests that leak into each other: caches, memories or costs that one changes for the others."""
    client = server.client()

    def answered(i: int) -> Any:
        how: Any = {"temperature": 0, "logprobs": 0} if i < 3 else {"seed": i}
        return complete(client, prompt=f"{TEXT} {i}", **how).choices[0].model_dump()

    alone = [answered(i) for i in range(6)]
    with ThreadPoolExecutor(12) as pool:
        noise = [pool.submit(chat, client, max_tokens=32) for _ in range(3)]
        assert list(pool.map(answered, range(6))) == alone, "to the last digit"
        assert all(future.result() for future in noise)


def test_the_document_has_every_endpoint(server: Served) -> None:
    """Catches a page of documentation that loads scripts from the network, and a document without the endpoints."""
    assert server.get("/docs").status_code == 404
    document = server.get("/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics"} <= set(document["paths"])
    assert "422" not in str(document["paths"]), "what is wrong with a body is told with 400"
