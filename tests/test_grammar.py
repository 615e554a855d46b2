"""Answers under a grammar: the target's distribution under it, enumerated; random schemas; one answer in any company."""

import gc
import json
import random
import re
import weakref
from collections import Counter
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from distributions import Request, finish, largest_difference, unchecked
from engine_cases import ENDS, VOCAB, models_of
from kinds import needs_compiler
from policies_list import heads_for, policies

from specdecpp.backends.native.following import Following
from specdecpp.backends.native.library import Drafting
from specdecpp.decoder import Decoder
from specdecpp.drafters import SuffixDrafter
from specdecpp.grammar import Grammar, Matcher, allowed_rows, fitting
from specdecpp.lab import TreePolicy
from specdecpp.loading.pair import load_pair
from specdecpp.policies import Fixed, Policy
from specdecpp.sampling import Sampling, streams
from specdecpp.session import Session
from specdecpp.step import Host
from specdecpp.testing import TableModel
from specdecpp.verify import BlockVerification, CompareVerification, TokenVerification, verification_for

END = 3
RULES: dict[str, dict[str, dict[int, str]]] = {
    # begin -> a word of two tokens that leave no choice, or any number of 0s and an end
    "choices": {
        "begin": {0: "word", 1: "loop"},
        "word": {2: "rest"},
        "rest": {1: "last"},
        "last": {0: "over", 2: "begin"},
        "loop": {0: "loop", 1: "over", END: "over"},
        "over": {},
    },
    "one text": {"begin": {2: "a"}, "a": {1: "b"}, "b": {0: "over"}, "over": {}},
    "from the first on": {"begin": {2: "a"}, "a": {0: "a", 1: "a", 2: "a", END: "over"}, "over": {}},
    "to the end": {"begin": {0: "a", 1: "begin", 2: "a"}, "a": {END: "over"}, "over": {}},
}


class Automaton(Matcher):
    """A matcher that is a table: the tokens that may follow in each state, and the states after them."""

    SIZE = 4

    def __init__(self, rules: dict[str, dict[int, str]], state: str = "begin"):
        self._rules, self._state = rules, state

    @property
    def is_over(self) -> bool:
        return not self._rules[self._state]

    def allowed(self) -> torch.Tensor:
        return torch.tensor([self.is_over or token in self._rules[self._state] for token in range(self.SIZE)])

    def forced(self) -> list[int]:
        found, state = [], self._state
        while len(self._rules[state]) == 1 and len(found) < 9:
            ((token, state),) = self._rules[state].items()
            found.append(token)
        return found

    def push(self, token: int) -> None:
        self._state = self._rules[self._state][token]

    def fork(self) -> Matcher:
        return type(self)(self._rules, self._state)


@dataclass(frozen=True, kw_only=True)
class Sometimes(Fixed):
    """No draft token of its own in every other step: those that are forced come all the same."""

    k: int = 3

    def start(self, given: Any = None) -> int:
        return 0

    def limit(self, memory: int) -> int:
        return memory % 2

    def learn(self, memory: int, outcome: Any) -> int:
        return memory + 1


def table(seed: int, sparsity: float = 0.0) -> TableModel:
    return TableModel.random(vocab_size=4, depth=2, seed=seed, sparsity=sparsity)


def request(rules: str, *, draft: Any = None, **more: Any) -> Request:
    # a draft with zeros gives nothing to all that is allowed, here and there
    return Request(
        target=table(1),
        draft=draft or table(2, sparsity=0.5),
        ends=(END,),
        grammar=Automaton(RULES[rules]),
        **{"max_tokens": 4, "prompt": (0, 1)} | more,
    )


@cache
def all_policies() -> dict[str, Policy]:
    found = policies(heads_for(4, 4), 3)
    return {name: policy for name, policy in found.items() if policy.engine() is None}


VERIFICATIONS = {"token": TokenVerification(), "block": BlockVerification(), "compare": CompareVerification()}
SAMPLINGS = {
    "plain": Sampling(),
    "warm": Sampling(temperature=1.3),
    "top-p": Sampling(top_p=0.7),
    "top-k": Sampling(top_k=2),
    "penalty": Sampling(repetition_penalty=1.7),
}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("verification", VERIFICATIONS)
@pytest.mark.parametrize("rules", RULES)
def test_the_output_has_the_targets_distribution_under_the_grammar(rules: str, verification: str, sampling: str):
    case = request(rules, sampling=SAMPLINGS[sampling])
    for policy in (Fixed(k=2), Fixed(k=0), Sometimes()):
        found = case.distribution(policy, VERIFICATIONS[verification])
        assert largest_difference(found, case.own_distribution()) < 1e-12


@pytest.mark.parametrize("policy", all_policies().values(), ids=all_policies())
def test_whatever_stops_the_draft(policy: Policy):
    verification = CompareVerification() if policy.drops_last else TokenVerification()
    case = request("choices", max_tokens=3)
    assert largest_difference(case.distribution(policy, verification), case.own_distribution()) < 1e-12


def test_the_distribution_under_the_grammar_is_another_one():
    case = request("choices")
    assert largest_difference(case.own_distribution(), replace(case, grammar=None).own_distribution()) > 0.1
    free = replace(case, grammar=None).distribution(Fixed(k=2), TokenVerification())
    assert largest_difference(free, case.own_distribution()) > 0.1


@pytest.mark.parametrize("rules", RULES)
def test_greedy_answers_are_those_without_a_draft(rules: str):
    case = request(rules, sampling=Sampling(temperature=0), max_tokens=8)
    alone = verification_for(case.sampling, TokenVerification())
    (expected,) = case.own_distribution()
    for name, policy in all_policies().items():
        (found,) = case.distribution(policy, alone)
        assert found == expected, name


def test_copies_end_where_the_grammar_forbids_them():
    case = request("choices", draft=SuffixDrafter(4), prompt=(0, 2, 1, 0, 2, 1, 2), max_tokens=5)
    found = case.distribution(Fixed(k=3), TokenVerification())
    assert largest_difference(found, case.own_distribution()) < 1e-12


class Counted(TableModel):
    """A table that counts its passes."""

    passes = 0

    def extend(self, tokens: list[int], *, rows: int) -> Any:
        type(self).passes += 1
        return super().extend(tokens, rows=rows)


def test_tokens_without_a_choice_cost_no_pass_of_the_draft():
    case = request("one text", draft=Counted.random(vocab_size=4, depth=2, seed=2))
    session = case.session(Sometimes(), TokenVerification(), streams(0))
    session.prefill()
    before = Counted.passes
    (step,) = finish(session)
    assert (step.tokens, step.num_accepted, session.finish_reason) == ([2, 1, 0], 3, "grammar")
    assert Counted.passes == before


def random_rules(seed: int) -> dict[str, dict[int, str]]:
    """Rules over the vocabulary of the engines' cases: few tokens, one, or many in each state."""
    rng, states = random.Random(seed), [f"s{i}" for i in range(7)]
    rules: dict[str, dict[int, str]] = {"over": {}}
    for state in ["begin", *states]:
        num = rng.choice([1, 1, 2, 5, 40, VOCAB])
        rules[state] = {token: rng.choice(states) for token in rng.sample(range(VOCAB), num)}
        if rng.random() < 0.3:
            rules[state] |= {rng.randrange(VOCAB): "over", ENDS[0]: "over"}
    return rules


class WideAutomaton(Automaton):
    SIZE = VOCAB


@needs_compiler
@pytest.mark.parametrize("verification", ["token", "block", "compare"])
@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0), Sampling(temperature=1.3), Sampling(top_p=0.8, repetition_penalty=1.3)]
)
def test_compiled_code_decides_as_the_host_does(sampling: Sampling, verification: str):
    """Catches a mask or a forced token in another place, uniforms that one of them uses up, a rule that sees other evidence."""
    models = models_of("native")
    num_forced, ends = 0, Counter[str]()
    with unchecked():
        for i, (name, policy) in enumerate(policies(heads_for(32, VOCAB), 6).items()):
            if policy.engine() is not None or (policy.drops_last and verification != "compare" and not sampling.is_greedy):
                continue
            for seed in (i, i + 100):
                matcher = WideAutomaton(random_rules(seed))
                steps = []
                for by_host in (False, True):
                    session = models.session(policy, sampling, verification, seed=seed, by_host=by_host, grammar=matcher.fork())
                    taken = finish(session)
                    reasons = [re.sub(r"[\d.]+e-\d+", "0", str(step.stop_reason)) for step in taken]  # last bits differ
                    steps.append([(s.tokens, s.num_drafted, s.num_accepted, of) for s, of in zip(taken, reasons, strict=True)])
                assert steps[0] == steps[1], (name, seed)
                num_forced += sum(1.0 in step.judged for step in taken)
                ends[str(session.finish_reason)] += 1
    assert num_forced > 0
    assert set(ends) == {"grammar", "eos", "length"}


def go_on(session: Session, steps: list[list[int]]) -> None:
    while not session.finish_reason:
        steps.append([*session.step().tokens])


@needs_compiler
def test_an_interrupt_where_nothing_can_be_caught_is_told(monkeypatch: pytest.MonkeyPatch):
    """Catches a Ctrl-C that ends a call of compiled code before its first line, and a mask of another place behind it."""
    calls, follow, session = 0, Following._follow, models_of("native").session
    rules = {"begin": {token: ("seven" if token % 9 == 0 else "begin") for token in range(VOCAB)}, "seven": {7: "begin"}}
    given: Any = {"policy": Fixed(k=3), "sampling": Sampling(), "grammar": WideAutomaton(rules), "ends": (70,)}
    expected = [[*step.tokens] for step in finish(session(**given))]
    for missed in range(1, 9):
        calls = 0

        def missing(self: Following, missed: int = missed) -> None:
            nonlocal calls
            calls += 1
            if calls != missed:
                follow(self)

        monkeypatch.setattr(Following, "_follow", missing)
        interrupted, steps = session(**given), []
        with pytest.raises(KeyboardInterrupt):
            go_on(interrupted, steps)
        interrupted.rewind()
        go_on(interrupted, steps)
        assert steps == expected


def test_what_follows_a_draft_is_freed_with_its_request():
    """Catches rows of a vocabulary that wait for the garbage collector."""
    gc.disable()
    try:
        seen = weakref.ref(Following(Drafting(), is_greedy=True, skips=True))
        assert seen() is None
    finally:
        gc.enable()


@needs_compiler
def test_a_reduced_draft_knows_the_tokens_that_were_forced():
    """Catches a token of the text that the draft does not score, for it was forced before the first draft token."""
    models, listed = copy(models_of("native")), [*range(0, VOCAB, 3)]
    models.draft = models.draft.reduced(listed)
    num_own = 0
    for seed in range(40):
        session = models.session(Fixed(k=3), Sampling(), seed=seed, grammar=WideAutomaton(random_rules(seed)))
        while not session.finish_reason:
            session.step()
            if session.finish_reason:  # the caches are not cut then
                break
            text = session.draft.text
            fresh = type(text)(text._listed)
            fresh.read(session.tokens[: session.draft.length], 0)
            assert text.ids == fresh.ids
            num_own += len(text.ids)
    assert num_own > 0


def test_graphs_leave_grammars_to_the_host():
    """Catches an engine of recorded passes that takes a grammar and does not ask it; run on a CPU, on a GPU never yet."""
    texts = []
    for k in (0, 3):
        session = models_of("device").session(Fixed(k), Sampling(temperature=0), grammar=WideAutomaton(random_rules(0)))
        assert isinstance(session.engine, Host)
        finish(session)
        texts.append(session.tokens)
    assert texts[0] == texts[1]


def test_rows_of_a_grammar_and_tokens_that_fit_leave_the_matcher_where_it_was():
    matcher = Automaton(RULES["choices"])
    rows = allowed_rows(matcher, [0, 2])
    assert rows.int().tolist() == [[1, 1, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0]]
    assert fitting(matcher, [0, 2, 2]) == 2
    assert fitting(matcher, [1, 1, 0]) == 2  # nothing follows the end
    assert matcher.allowed().int().tolist() == [1, 1, 0, 0]


def test_trees_are_refused():
    with pytest.raises(ValueError, match="which follows no grammar"):
        request("choices").session(TreePolicy.__subclasses__()[0](), TokenVerification(), streams(0))


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(load_pair(), remember=False)


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose texts are short."""
    kinds = ["string", "enum", "integer", "number", "boolean", "null", "const", "pattern", "anyOf"]
    match kind := rng.choice(kinds + ["object", "array"] * 3 * (depth < 3)):
        case "object":
            names = rng.sample(["a", "name", "größe", "two words", 'quote"d', "list", "x1", "back\\slash"], rng.randint(0, 4))
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth + 1) for name in names},
                "required": rng.sample(names, rng.randint(0, len(names))),
                "additionalProperties": False,
            }
        case "array":
            least = rng.randint(0, 2)
            return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": least, "maxItems": least + 2}
        case "string":
            return {"type": "string", "maxLength": rng.randint(0, 8)}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[a-c]{2,4}$", "^(\\d{3})-(\\d{4})$", "^$", "^x?y{1,3}$"])}
        case "integer" | "number":
            least = rng.randint(-1000, 1000)
            bounds = {"minimum": least, "maximum": least + rng.randint(0, 500)}
            return {"type": "integer"} | bounds if kind == "integer" else {"type": "number", "multipleOf": 0.25} | bounds
        case "enum":
            return {"enum": rng.sample([1, "one", None, True, [1, 2], {"a": []}, "ünï", 2.5], rng.randint(1, 4))}
        case "const":
            return {"const": rng.choice(["", "fixed", 7, [], {"k": "v"}])}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
        case _:
            return {"type": kind}


def test_answers_fit_500_random_schemas(decoder: Decoder):
    from jsonschema import Draft202012Validator

    rng, num_forced, num_long = random.Random(0), 0, 0
    for seed in range(500):
        schema = random_schema(rng)
        output = decoder.generate(
            "Answer: ", json_schema=schema, max_tokens=1000, temperature=rng.choice([0, 0.7, 1]), seed=seed
        )
        num_forced += any(1.0 in step.judged for step in output.steps)
        if output.finish_reason == "length":  # lists of lists with a line of blanks at each place
            num_long += 1
            continue
        assert output.finish_reason in ("grammar", "eos"), (schema, output.text)
        Draft202012Validator(schema).validate(json.loads(output.text))
    assert num_long <= 5
    assert num_forced > 100


def test_a_real_pair_answers_as_the_target_alone(decoder: Decoder):
    alone = Decoder(decoder.pair, policy="none")
    for seed in range(20):
        schema = random_schema(random.Random(seed))
        greedy = {"json_schema": schema, "temperature": 0, "max_tokens": 200}
        assert decoder.generate("Answer: ", **greedy).tokens == alone.generate("Answer: ", **greedy).tokens


@pytest.mark.parametrize(
    "grammar", [Grammar("regex", "(yes|no)[.!]"), 'start: ("yes" | "no") ("." | "!")'], ids=["regex", "lark"]
)
def test_expressions_and_rules_are_grammars(decoder: Decoder, grammar: Any):
    found = {decoder.generate("Is it so? ", grammar=grammar, temperature=1.5, seed=seed).text for seed in range(9)}
    assert len(found) > 1
    assert found <= {"yes.", "yes!", "no.", "no!"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"json_schema": {"type": 5}}, "type must be a string"),
        ({"json_schema": '{"a"'}, "the JSON schema is no JSON"),
        ({"json_schema": [1]}, "must be an object or a bool"),
        ({"json_schema": {"if": {}}}, 'Unimplemented keys: \\["if"\\]'),
        ({"grammar": "start: /a(/"}, "unclosed group"),
        ({"grammar": 5}, "rules in Lark as a text, got 5"),
        ({"grammar": "start: /a/", "json_schema": {}}, "Give one of them"),
    ],
)
def test_a_bad_grammar_is_refused_before_anything_is_decoded(decoder: Decoder, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        decoder.start("x", **options)


def test_several_at_once_are_each_what_they_are_alone(decoder: Decoder):
    options: dict[str, Any] = {"json_schema": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 5}, "seed": 1}
    prompts = ["One: ", "Two: ", "Three: "]
    together = decoder.generate_all(prompts, **options)
    assert [one.tokens for one in together] == [decoder.generate(prompt, **options).tokens for prompt in prompts]
