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
POLICIES: dict[str, Policy] = {
    "fixed": Fixed(k=3),
    "alone": Fixed(k=0),
    "cost-aware": CostAware(),
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "nucleus": {"temperature": 0.7, "top_p": 0.9},
    "penalised": {"temperature": 0.8, "repetition_penalty": 1.3},
}


@pytest.fixture(scope="module")
def pair() -> Pair:
    return compiled_pair()


def runner_of(pair: Pair, tokens: list[int]) -> Any:
    backend: Any = pair.target.new_cache()
    backend.extend(tokens, rows=1)
    return backend


def test_a_copy_of_a_cache_has_its_bits_and_a_life_of_its_own(pair: Pair) -> None:
    first = runner_of(pair, SYSTEM)
    copy = first.fork(LEAST + 3)
    alone = runner_of(pair, SYSTEM[: LEAST + 3])
    assert copy.length == LEAST + 3
    before = first.extend([7, 8], rows=1)[0]
    first.rollback(len(SYSTEM))
    assert torch.equal(copy.extend([9, 9, 9], rows=3)[0], alone.extend([9, 9, 9], rows=3)[0])
    assert torch.equal(first.extend([7, 8], rows=1)[0], before)
    assert first.fork(0).length == 0
    with pytest.raises(ValueError, match="the cache holds"):
        copy.fork(200)
    assert copy.num_bytes == copy._capacity * 8 * sum(1 for _ in copy.model.weights.family.layers) * 2 * 16


def test_caches_that_nobody_uses_are_taken_again_and_others_texts_in_them_forgotten(pair: Pair) -> None:
    """Catches memory that is new for each of many requests, a cache that keeps another text, and one whose size is mistaken."""
    many = [runner_of(pair, [3 + i, *SYSTEM * 9]) for i in range(12)]
    sequences = {backend._memory for backend in many}
    assert many[0]._capacity > 256, "more than a cache has at first"
    del many
    first = runner_of(pair, SYSTEM)
    copies = [first.fork(LEAST + num) for num in range(4)]
    assert sum(backend._memory in sequences and backend._capacity > 256 for backend in copies) == 4
    for num, copy in enumerate(copies):
        alone = runner_of(pair, SYSTEM[: LEAST + num])
        assert torch.equal(copy.extend([9, 9, 9], rows=3)[0], alone.extend([9, 9, 9], rows=3)[0])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_conversation_is_answered_as_if_each_turn_were_read_whole(pair: Pair, policy: str, sampling: str) -> None:
    """Catches rows that depend on the pass that made them, a rejected draft token that stays in a cache, and nothing reused."""
    pair = replace(pair)
    reusing, anew = (Decoder(pair, policy=POLICIES[policy], costs=COSTS, reuses=reuses) for reuses in (True, False))
    options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "seed": 3} | SAMPLINGS[sampling]
    prompt = list(SYSTEM)
    for turn in range(4):
        found, wanted = reusing.generate(prompt, **options), anew.generate(prompt, **options)
        assert found.tokens == wanted.tokens
        assert wanted.metrics.num_cached_tokens == 0
        least = len(prompt) - 4 if turn else 0  # the question, and the answer's last token
        assert least <= found.metrics.num_cached_tokens < len(prompt)
        prompt += [*found.tokens, 6, 7 + turn, 8]
    other = [*SYSTEM, 9, 9, 9, 9]
    found = reusing.generate(other, **options)
    assert found.tokens == anew.generate(other, **options).tokens
    assert found.metrics.num_cached_tokens == len(SYSTEM)


def test_another_conversation_takes_a_copy_and_the_first_goes_on(pair: Pair) -> None:
    """Catches a common system prompt that costs a long conversation its cache."""
    pair = replace(pair)
    decoder = Decoder(pair, policy=Fixed(k=2))
    options: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "temperature": 0}
    long = [*SYSTEM, *(3 + i % 17 for i in range(60))]
    answer = decoder.generate(long, **options).tokens
    assert decoder.generate([*SYSTEM, 2, 2, 2], **options).metrics.num_cached_tokens == len(SYSTEM)
    assert decoder.generate([*long, *answer, 4], **options).metrics.num_cached_tokens == len(long) + len(answer) - 1


def test_several_at_once_share_no_cache(pair: Pair) -> None:
    decoder, anew = (Decoder(replace(pair), policy=Fixed(k=3), reuses=reuses) for reuses in (True, False))
    options: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True, "seed": 1, "temperature": 1.0}
    prompts = [[*SYSTEM, i + 2] for i in range(5)] + [SYSTEM, SYSTEM]
    wanted = [out.tokens for out in anew.generate_all(prompts, at_once=3, **options)]
    assert [out.tokens for out in decoder.generate_all(prompts, at_once=3, **options)] == wanted
    found = decoder.generate_all(prompts, at_once=3, **options)
    assert [out.tokens for out in found] == wanted
    assert all(out.metrics.num_cached_tokens >= len(SYSTEM) - 1 for out in found)


def test_an_answer_that_nobody_waits_for_is_kept_as_far_as_it_came(pair: Pair) -> None:
    pair = replace(pair)
    decoder = Decoder(pair, policy=Fixed(k=3))
    options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "temperature": 0}
    stream = decoder.stream(SYSTEM, **options)
    said = [token for _ in range(3) for token in next(stream).tokens]
    stream.close()  # type: ignore[attr-defined]
    found = decoder.generate([*SYSTEM, *said, 3], **options)
    assert found.metrics.num_cached_tokens == len(SYSTEM) + len(said) - 1
    assert found.tokens == Decoder(pair, policy=Fixed(k=3), reuses=False).generate([*SYSTEM, *said, 3], **options).tokens


def test_short_beginnings_and_other_runners_are_read(pair: Pair) -> None:
    """Catches a cache of transformers that is reused, whose rows are rounded by the pass they were read in."""
    decoder = Decoder(replace(pair), policy=Fixed(k=2))
    for _ in range(2):
        assert decoder.generate(SYSTEM[: LEAST // 2], max_tokens=3, temperature=0).metrics.num_cached_tokens == 0
    model = tiny_model("llama", seed=1)
    eager = Pair(target=EagerModel(model), draft=EagerModel(tiny_draft(model, noise=0.3)), tokenizer=tiny_tokenizer())
    for _ in range(2):
        found = Decoder(eager, policy=Fixed(k=2)).generate(SYSTEM, max_tokens=3, temperature=0)
        assert found.metrics.num_cached_tokens == 0
    assert not eager.kept._texts


def test_what_is_kept_is_bounded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Kept()
    for i in range(MOST + 3):
        shelf.put([i] * LEAST, runner_of(pair, [i] * LEAST))
    assert len(shelf._texts) == MOST
    assert shelf.begin([0] * (LEAST + 1), pair.target)[0].length == 0
    (found,) = shelf.begin([MOST] * LEAST, pair.target)  # its last token is left to read, and it is not there any more
    assert found.length == 0
    (found,) = shelf.begin([MOST] * (LEAST + 1), pair.target)
    assert (found.length, len(shelf._texts)) == (LEAST, MOST - 1)
    monkeypatch.setattr(kept, "MOST_BYTES", 1)
    shelf.put(SYSTEM, runner_of(pair, SYSTEM))
    assert [text.tokens for text in shelf._texts] == [SYSTEM]
    shelf.clear()
    assert shelf.begin([*SYSTEM, 3], pair.target)[0].length == 0


def test_a_request_that_is_refused_takes_nothing_away(pair: Pair) -> None:
    """Catches a text that is gone with a request that never began."""
    decoder = Decoder(replace(pair), policy=Fixed(k=2))
    decoder.generate(SYSTEM, max_tokens=3, ignore_eos=True)
    with pytest.raises(ValueError, match="max_tokens"):
        decoder.generate([*SYSTEM, 3], max_tokens=-1)
    assert decoder.generate([*SYSTEM, 3], max_tokens=3).metrics.num_cached_tokens == len(SYSTEM)
