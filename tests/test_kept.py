"""Caches of requests that have ended: what begins alike is not read again, and the answers are the same."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from batched import compiled_pair

from specdecpp import Decoder, Pair
from specdecpp.backends import EagerModel, kept, native
from specdecpp.backends.kept import LEAST, MOST, Kept
from specdecpp.policies import CostAware, Costs, Fixed, Policy
from specdecpp.testing import tiny_draft, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")

COSTS = Costs(draft_s=0.1, passes={1: 1.0, 17: 2.0}, switch_s=0.2)
SYSTEM = [5 + i % 40 for i in range(2 * LEAST)]
POLICIES: dict[str, Policy] = {"fixed": Fixed(k=3), "alone": Fixed(k=0), "cost-aware": CostAware()}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "nucleus": {"temperature": 0.7, "top_p": 0.9},
    "penalised": {"temperature": 0.8, "repetition_penalty": 1.3},
}
GREEDY: dict[str, Any] = {"ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def pair() -> Pair:
    return compiled_pair()


def decoders(pair: Pair, policy: Policy = Fixed(k=3)) -> tuple[Decoder, Decoder]:  # noqa: B008 (it is frozen)
    """One that keeps its caches, none of them at first, and one that reads every prompt anew."""
    return Decoder(replace(pair), policy=policy, costs=COSTS), Decoder(replace(pair), policy=policy, costs=COSTS, reuses=False)


def cache_of(pair: Pair, tokens: list[int]) -> Any:
    cache: Any = pair.target.new_cache()
    cache.extend(tokens, rows=1)
    return cache


def test_a_copy_of_a_cache_has_its_bits_and_a_life_of_its_own(pair: Pair) -> None:
    first = cache_of(pair, SYSTEM)
    copy = first.fork(LEAST + 3)
    alone = cache_of(pair, SYSTEM[: LEAST + 3])
    assert copy.length == LEAST + 3
    before = first.extend([7, 8], rows=1)[0]
    first.rollback(len(SYSTEM))
    assert torch.equal(copy.extend([9, 9, 9], rows=3)[0], alone.extend([9, 9, 9], rows=3)[0])
    assert torch.equal(first.extend([7, 8], rows=1)[0], before)
    assert first.fork(0).length == 0
    with pytest.raises(ValueError, match="the cache holds"):
        copy.fork(200)
    assert copy.num_bytes == copy._capacity * 8 * len(copy.model.weights.family.layers) * 2 * 16


def test_caches_that_nobody_uses_are_taken_again_and_others_texts_in_them_forgotten(pair: Pair) -> None:
    """Catches memory that is new for each of many requests, a cache that keeps another text, and one whose size is mistaken."""
    many = [cache_of(pair, [3 + i, *SYSTEM * 9]) for i in range(12)]
    sequences = {cache._memory for cache in many}
    assert many[0]._capacity > 256, "more than a cache has at first"
    del many
    first = cache_of(pair, SYSTEM)
    copies = [first.fork(LEAST + num) for num in range(4)]
    assert all(cache._memory in sequences and cache._capacity > 256 for cache in copies)
    for num, copy in enumerate(copies):
        alone = cache_of(pair, SYSTEM[: LEAST + num])
        assert torch.equal(copy.extend([9, 9, 9], rows=3)[0], alone.extend([9, 9, 9], rows=3)[0])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_conversation_is_answered_as_if_each_turn_were_read_whole(pair: Pair, policy: str, sampling: str) -> None:
    """Catches rows that depend on the pass that made them, a rejected draft token that stays in a cache, nothing reused, and a
    text that is gone with a request that was refused."""
    reusing, anew = decoders(pair, POLICIES[policy])
    options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "seed": 3} | SAMPLINGS[sampling]
    prompt = list(SYSTEM)
    for turn in range(4):
        found, wanted = reusing.generate(prompt, **options), anew.generate(prompt, **options)
        assert found.tokens == wanted.tokens
        assert wanted.metrics.num_cached_tokens == 0
        least = len(prompt) - 4 if turn else 0  # the question, and the answer's last token
        assert least <= found.metrics.num_cached_tokens < len(prompt)
        prompt += [*found.tokens, 6, 7 + turn, 8]
        with pytest.raises(ValueError, match="max_tokens"):
            reusing.generate(prompt, max_tokens=-1)
    other = [*SYSTEM, 9, 9, 9, 9]
    found = reusing.generate(other, **options)
    assert found.tokens == anew.generate(other, **options).tokens
    assert found.metrics.num_cached_tokens == len(SYSTEM)


def test_another_conversation_takes_a_copy_and_the_first_goes_on(pair: Pair) -> None:
    """Catches a common system prompt that costs a long conversation its cache."""
    decoder, _ = decoders(pair)
    long = [*SYSTEM, *(3 + i % 17 for i in range(60))]
    answer = decoder.generate(long, max_tokens=4, **GREEDY).tokens
    for prompt, num in (([*SYSTEM, 2, 2, 2], len(SYSTEM)), ([*long, *answer, 4], len(long) + len(answer) - 1)):
        assert decoder.generate(prompt, max_tokens=4, **GREEDY).metrics.num_cached_tokens == num


def test_several_at_once_share_no_cache(pair: Pair) -> None:
    decoder, anew = decoders(pair)
    options: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True, "seed": 1, "temperature": 1.0}
    prompts = [[*SYSTEM, i + 2] for i in range(5)] + [SYSTEM, SYSTEM]
    wanted, first, again = (list(one.generate_all(prompts, at_once=3, **options)) for one in (anew, decoder, decoder))
    assert [out.tokens for out in first] == [out.tokens for out in again] == [out.tokens for out in wanted]
    assert all(out.metrics.num_cached_tokens >= len(SYSTEM) - 1 for out in again)


def test_an_answer_that_nobody_waits_for_is_kept_as_far_as_it_came(pair: Pair) -> None:
    decoder, anew = decoders(pair)
    stream = decoder.stream(SYSTEM, max_tokens=40, **GREEDY)
    said = [token for _ in range(3) for token in next(stream).tokens]
    stream.close()  # type: ignore[attr-defined]
    found = decoder.generate([*SYSTEM, *said, 3], max_tokens=40, **GREEDY)
    assert found.metrics.num_cached_tokens == len(SYSTEM) + len(said) - 1
    assert found.tokens == anew.generate([*SYSTEM, *said, 3], max_tokens=40, **GREEDY).tokens


def test_a_request_without_room_leaves_the_caches(pair: Pair) -> None:
    decoder, _ = decoders(pair)
    for max_tokens in (4, 0, 4):
        answer = decoder.generate(SYSTEM, max_tokens=max_tokens, **GREEDY)
    assert answer.metrics.num_cached_tokens == len(SYSTEM) - 1


def test_short_beginnings_and_other_backends_are_read(pair: Pair) -> None:
    """Catches a cache of transformers that is reused, whose rows are rounded by the pass they were read in."""
    model = tiny_model("llama", seed=1)
    eager = Pair(target=EagerModel(model), draft=EagerModel(tiny_draft(model, noise=0.3)), tokenizer=tiny_tokenizer())
    for of, prompt in ((replace(pair), SYSTEM[: LEAST // 2]), (eager, SYSTEM)):
        for _ in range(2):
            assert Decoder(of, policy=Fixed(k=2)).generate(prompt, max_tokens=3, **GREEDY).metrics.num_cached_tokens == 0
    assert not eager.kept._texts


def test_what_is_kept_is_bounded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Kept()
    for i in range(MOST + 3):
        shelf.put([i] * LEAST, cache_of(pair, [i] * LEAST))
    assert len(shelf._texts) == MOST
    gone, whole, one_more = [0] * (LEAST + 1), [MOST] * LEAST, [MOST] * (LEAST + 1)
    for prompt, num in ((gone, 0), (whole, 0), (one_more, LEAST)):  # the last token of a prompt is left to read
        assert shelf.begin(prompt, pair.target)[0].length == num
    assert len(shelf._texts) == MOST - 1
    monkeypatch.setattr(kept, "MOST_BYTES", 1)
    shelf.put(SYSTEM, cache_of(pair, SYSTEM))
    assert [text.tokens for text in shelf._texts] == [SYSTEM]
