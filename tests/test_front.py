"""`Decoder` as somebody uses it who has not read the manual: what it takes, and what it refuses before anything is decoded."""

import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from distributions import unchecked
from transformers import BatchEncoding

import specdecpp as sd
from specdecpp import lab
from specdecpp.loading.pair import Pair
from specdecpp.testing import TableModel, tiny_tokenizer

OPTIONS: dict[str, Any] = {"max_tokens": 5, "seed": 0}


@pytest.fixture(autouse=True)
def as_users_see_it() -> Iterator[None]:
    """Without the checks of types that tests have, and users have not."""
    with unchecked():
        yield


@pytest.fixture(scope="module")
def pair() -> Pair:
    target, draft = (TableModel.random(vocab_size=8, depth=1, seed=seed) for seed in (1, 2))
    return Pair(target=target, draft=draft, tokenizer=tiny_tokenizer(8))


class Untouched(sd.Policy):
    """A rule that nothing may be decoded with."""

    def limit(self, memory: Any) -> int:
        pytest.fail("a step was run")


@pytest.fixture(scope="module")
def decoder(pair: Pair) -> sd.Decoder:
    return sd.Decoder(pair, policy=Untouched())


# What is taken


def test_a_policy_may_be_given_by_its_short_form(pair: Pair) -> None:
    """Catches a spec of the command line that Python does not take (test_policy_spec.py has all of them), and a second rule
    beside `Fixed(k=0)`, which tables and reports would take for another."""
    assert sd.Decoder(pair, policy="auto-off:fixed:2").policy == lab.AutoOff(policy=sd.Fixed(2))
    assert sd.Decoder(pair, policy="none").policy == sd.NoDraft() == sd.Fixed(0) == sd.Fixed(k=0)
    assert sd.NoDraft().max_tokens == 0


def test_a_list_of_texts_is_several_prompts(pair: Pair) -> None:
    """Catches texts that are joined, or taken for token ids."""
    decoder = sd.Decoder(pair, policy="fixed:2")
    texts = ["abc", "b", "ca"]
    expected = [decoder.generate(text, **OPTIONS).tokens for text in texts]
    for given in (texts, tuple(texts)):
        assert [output.tokens for output in decoder.generate(given, **OPTIONS)] == expected


IDS = [3, 4, 5]
ROWS = {
    "a list": IDS,
    "a tuple": tuple(IDS),
    "a range": range(3, 6),
    "numpy's integers": [np.int64(3), np.int32(4), 5],
    "an array [n]": np.array(IDS),
    "an array [1, n]": np.array([IDS]),
    "a tensor [n]": torch.tensor(IDS),
    "a tensor [1, n]": torch.tensor([IDS]),
    "a tokenizer's encoding": BatchEncoding({"input_ids": IDS, "attention_mask": [1, 1, 1]}),
    "an encoding of tensors": BatchEncoding({"input_ids": torch.tensor([IDS]), "attention_mask": torch.ones(1, 3)}),
    "an encoding as a dict": {"input_ids": [IDS]},
}


@pytest.mark.parametrize("given", ROWS.values(), ids=ROWS)
def test_ids_may_come_in_what_tokenizers_give(pair: Pair, given: Any) -> None:
    """Catches an array or an encoding that ends in an error of another library, or that loses an id."""
    decoder = sd.Decoder(pair, policy="fixed:2")
    expected = decoder.generate(IDS, **OPTIONS).tokens
    assert decoder.generate(given, **OPTIONS).tokens == expected
    assert decoder.start(given, **OPTIONS).tokens == IDS
    assert tuple(t for r in decoder.stream(given, **OPTIONS) for t in r.tokens) == expected
    assert decoder.generate_all([given], **OPTIONS)[0].tokens == expected


def test_numpys_numbers_and_no_stop_are_fine(pair: Pair) -> None:
    """Catches a check that refuses what numpy or another API's defaults give for a number or for nothing."""
    decoder = sd.Decoder(pair, policy="fixed:2")
    plain = decoder.generate(IDS, max_tokens=5, seed=1, temperature=1, top_k=3, top_p=0.5)
    given: dict[str, Any] = {
        "max_tokens": np.int64(5),
        "seed": np.int32(1),
        "top_k": np.int64(3),
        "temperature": np.float32(1),
        "stop": None,
    }
    assert decoder.generate(IDS, top_p=np.float64(0.5), **given).tokens == plain.tokens


def test_a_list_of_messages_is_one_conversation(pair: Pair) -> None:
    """Catches messages that are taken for several prompts."""
    told: list[Any] = []

    def apply_chat_template(messages: list[dict[str, str]], **options: Any) -> str:
        told.append(messages)
        return "abc"

    tokenizer = tiny_tokenizer(8)
    tokenizer.chat_template = "of a sort"
    tokenizer.apply_chat_template = apply_chat_template
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    decoder = sd.Decoder(Pair(target=pair.target, draft=pair.draft, tokenizer=tokenizer), policy="fixed:2")
    assert decoder.generate(chat, **OPTIONS).tokens == decoder.generate("abc", **OPTIONS).tokens
    assert told == [chat]


# What is refused

PROMPTS = {
    "bytes": (b"abc", "bytes b'abc'"),
    "floats": ([1.9, 2.2], r"a list of float, \[1.9, 2.2\]"),
    "bools": ([True, False], "a list of bool"),
    "a bool among ids": ([3, True, 4], "a list of int and bool"),
    "a number": (123, "int 123"),
    "None": (None, "None"),
    "a dict": ({"role": "user", "content": "hi"}, "dict {"),
    "a generator": ((i for i in IDS), "generator"),
    "texts and ids": (["abc", 3], "a list of str and int"),
    "ids and messages": ([3, {"role": "user", "content": "hi"}], "a list of int and dict"),
    "lists of ids": ([[3, 4], [5]], "a list of list"),
    "an array of numbers": (np.array([1.0, 2.0]), "a list of float"),
    "an array of no axes": (np.array(3), "array"),
    "a tensor of numbers": (torch.tensor([[1.0, 2.0]]), "a list of float"),
    "a tensor of two rows": (torch.tensor([[3, 4], [5, 3]]), "a list of list"),
    "an encoding of two texts": (BatchEncoding({"input_ids": [[3, 4], [5]]}), "a list of list"),
    "an encoding with padding": (BatchEncoding({"input_ids": [[0, 4]], "attention_mask": [[0, 1]]}), "attention_mask"),
    "a path-like object": (SimpleNamespace(text="abc"), "SimpleNamespace"),
}


@pytest.mark.parametrize(("given", "said"), PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("call", ["generate", "stream", "start", "generate_all"])
def test_what_is_no_prompt_is_refused(decoder: sd.Decoder, call: str, given: Any, said: str) -> None:
    """Catches numbers that are cut to ids (1.9 was 1, True was 1), and errors of Python's own from deep inside."""
    with pytest.raises(sd.PromptError, match=said) as refused:
        getattr(decoder, call)(["abc", given] if call == "generate_all" else given, **OPTIONS)
    assert "Give a text, a list of whole numbers" in str(refused.value) or "attention_mask" in str(refused.value)


@pytest.mark.parametrize("call", ["stream", "start"])
def test_one_prompt_is_taken_where_one_answer_is_given(decoder: sd.Decoder, call: str) -> None:
    """Catches a list of texts that a stream reads as one."""
    with pytest.raises(sd.PromptError, match=r"a list of str.*generate takes a list of texts too"):
        getattr(decoder, call)(["abc", "b"])


def test_one_text_is_no_list_of_prompts(decoder: sd.Decoder) -> None:
    """Catches a text whose characters are answered one by one."""
    with pytest.raises(sd.PromptError, match=r"takes a list of prompts, got one text, 'abc'"):
        decoder.generate_all("abc")


VALUES = [
    ({"stop": ["a", 5]}, r"stop must be a text or a list of texts, got \['a', 5\]"),
    ({"stop": b"a"}, "stop must be a text or a list of texts, got b'a'"),
    ({"stop": ["a", ""]}, "a stop string is empty"),
    ({"seed": 1.5}, "seed must be a whole number, got 1.5"),
    ({"seed": True}, "seed must be a whole number, got True"),
    ({"top_k": False}, "top_k must be a whole number, got False"),
    ({"max_tokens": 1.5}, "max_tokens must be a whole number, got 1.5"),
    ({"max_tokens": None}, "max_tokens must be a whole number, got None"),
    ({"max_tokens": -1}, "max_tokens must be a whole number, at least 0"),
    ({"temperature": "x"}, "temperature must be a number, got 'x'"),
    ({"temperature": -1}, "temperature must be a finite number of at least 0"),
    ({"top_p": "0.9"}, "top_p must be a number"),
    ({"min_p": [0.1]}, "min_p must be a number"),
    ({"sampling": {"temperature": 0}}, "sampling must be a Sampling"),
]


@pytest.mark.parametrize(("options", "said"), VALUES, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_a_value_of_the_wrong_kind_is_refused(decoder: sd.Decoder, options: dict[str, Any], said: str) -> None:
    """Catches values that fail in the middle of an answer (stop=b"a") or are cut to others (seed=1.5)."""
    for call in (decoder.generate, decoder.stream, decoder.start):
        with pytest.raises(ValueError, match=said):
            call("abc", **options)
    with pytest.raises(ValueError, match=said):
        decoder.generate(["abc", "b"], **options)


front: Any = sd
"""The package as a program uses it that no type checker has read."""
MADE: dict[str, tuple[Callable[[Pair], Any], str]] = {
    "the class of a rule": (lambda pair: front.Decoder(pair, policy=front.Fixed), r"must be a rule, as Fixed\(3\).*got <class"),
    "the name of a rule": (lambda pair: front.Decoder(pair, policy=front.NoDraft), r"must be a rule.*got <function NoDraft"),
    "a rule that is not there": (
        lambda pair: front.Decoder(pair, policy="nonsense"),
        "there is no policy 'nonsense'. Policies: none",
    ),
    "a number for a rule": (lambda pair: front.Decoder(pair, policy=3), r"must be a rule, as Fixed\(3\).*got 3"),
    "a rule without its head": (lambda pair: front.Decoder(pair, policy="specdecpp"), "needs an acceptance head"),
    "part of a draft token": (lambda pair: front.Fixed(2.5), "whole number k of at least 0, got 2.5"),
    "a truth value of draft tokens": (lambda pair: front.Fixed(True), "whole number k of at least 0, got True"),
    "a word for draft tokens": (lambda pair: front.Fixed("3"), "whole number k of at least 0, got '3'"),
    "a name for a pair": (
        lambda pair: front.Decoder("smollm2"),
        r"takes a pair, got 'smollm2'\. Load one first: Decoder\(load_pair",
    ),
    "nothing for a pair": (lambda pair: front.Decoder(None), r"takes a pair, got None"),
    "pickling a pair": (pickle.dumps, "cannot be pickled"),
    "pickling a decoder": (
        lambda pair: pickle.dumps(front.Decoder(pair)),
        "cannot be pickled.*call load_pair and Decoder there",
    ),
}


@pytest.mark.parametrize(("make", "said"), MADE.values(), ids=MADE)
def test_what_makes_no_decoder_is_refused(pair: Pair, make: Callable[[Pair], Any], said: str) -> None:
    """Catches a class, a name or a number that is taken and fails at the first request with an error of Python's own."""
    with pytest.raises((TypeError, ValueError), match=said):
        make(pair)
