"""The bookkeeping of a step: caches, origins, counts, and why an answer ends."""

import math
from dataclasses import replace

import pytest
import torch
from distributions import Request, finish, random_head, total_variation

from specdecpp.detokenize import Detokenizer
from specdecpp.errors import PromptError, UnsoundError
from specdecpp.lab import AutoOff, Bandit, Heuristic
from specdecpp.policies import CumulativeConfidence, Fixed, MaxConfidence, SpecDecPP
from specdecpp.sampling import Sampling, probabilities, streams
from specdecpp.testing import TableModel, tiny_tokenizer
from specdecpp.verify import BlockVerification, CompareVerification, GreedyVerification, TokenVerification

VERIFICATIONS = [TokenVerification(), BlockVerification(), CompareVerification()]
POLICIES = [
    Fixed(k=0),
    Fixed(k=3),
    Heuristic(start_tokens=2),
    CumulativeConfidence(threshold=0.3),
    MaxConfidence(threshold=0.4),
    SpecDecPP(head=random_head(4, seed=1), min_tokens=0),
    AutoOff(policy=Fixed(k=3), patience=1, probe_every=3),  # the draft falls behind by whole steps
    Bandit(arms=(Fixed(k=0), Fixed(k=2))),
]
TABLES = Request(
    target=TableModel.random(vocab_size=4, depth=3, seed=1),
    draft=TableModel.random(vocab_size=4, depth=3, seed=2),
    max_tokens=15,
    ends=(3,),
)


def always(weights):
    """A model that says the same after every context."""
    return TableModel({(): [w / sum(weights) for w in weights]}, depth=0)


def sure(successor, vocab_size, **more):
    """A model that is sure of the next token, given the last one."""
    rows = torch.eye(vocab_size).tolist()
    table = {(): rows[0], **{(t,): rows[successor(t)] for t in range(vocab_size)}}
    return TableModel(table, depth=1, **more)


def counting(*, wrong_after=None, vocab_size=8, **more):
    """A model that is sure of the next number; after `wrong_after` it is sure of 0 instead."""
    return sure(lambda t: 0 if t == wrong_after else (t + 1) % vocab_size, vocab_size, **more)


def count(*, wrong_after=None, policy=Fixed(k=3), target_length=None, draft_length=None, **request):  # noqa: B008 (frozen)
    """Finish a session of two counting models: the target counts on, the draft errs after `wrong_after`."""
    target, draft = counting(max_length=target_length), counting(wrong_after=wrong_after, max_length=draft_length)
    session = Request(target=target, draft=draft, **{"prompt": (0,), **request}).session(
        policy, TokenVerification(), streams(0)
    )
    return session, finish(session)


def told(steps):
    """Tokens and origins, step by step: 1a is an accepted 1, 4c a correction, 4b a bonus."""
    return [" ".join(f"{p.token}{p.origin[0]}" for p in r.pieces) for r in steps]


@pytest.mark.parametrize("verification", VERIFICATIONS, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
def test_every_step_keeps_its_books(policy, verification):
    """Catches a cache cut in the wrong place, tokens that are not in the pieces, and miscounted draft tokens."""
    for seed in range(8):
        session = TABLES.session(policy, verification, streams(seed))
        session.prefill()
        while session.finish_reason is None:
            before = list(session.tokens)
            left = session.num_tokens_left
            outcome = session.step()
            after = session.tokens
            origins = [p.origin for p in outcome.pieces]

            assert after == before + outcome.tokens
            assert len(outcome.pieces) <= left
            assert outcome.num_accepted == origins.count("accepted") <= outcome.num_drafted
            assert outcome.num_drafted < left
            own = "bonus" if outcome.num_accepted == outcome.num_drafted else "correction"
            if outcome.finish_reason == "eos" and origins[-1] == "accepted":
                own = "accepted"
            assert origins == ["accepted"] * (len(origins) - 1) + [own]
            assert outcome.finish_reason == session.finish_reason
            assert len(outcome.judged) == (max(0, outcome.num_drafted - 1) if isinstance(policy, SpecDecPP) else 0)
            if session.finish_reason is None:
                # The last token is still to be read; the draft has not read its last draft token either.
                assert session.target.tokens == after[:-1]
                read = len(before) + outcome.num_drafted - 1 if outcome.num_drafted else session.draft.length
                assert session.draft.tokens == after[: min(read, len(after) - 1)]


@pytest.mark.parametrize("how", [{"policy": Fixed(k=0)}, {"draft_length": 2}])
def test_a_draft_that_is_not_asked_reads_nothing(how):
    """Catches a draft that reads the prompt for `Fixed(k=0)`, or one that is longer than its context (the tables assert)."""
    session, steps = count(max_tokens=4, prompt=(5, 6, 7), **how)
    assert session.draft.length == 0
    assert told(steps) == ["0b", "1b", "2b", "3b"]


def test_origins_after_acceptance_and_rejection():
    """Catches a correction called bonus, or accepted draft tokens after a rejected one."""
    _, steps = count(wrong_after=5, max_tokens=10)
    assert told(steps) == ["1a 2a 3a 4b", "5a 6c", "7a 0a 1a 2b"]
    assert [r.num_drafted for r in steps] == [3, 3, 3]
    assert [r.stop_reason for r in steps] == ["limit", "limit", "tokens left"]


@pytest.mark.parametrize(
    ("ends", "wrong_after", "expected"),
    [
        ((2,), None, ["1a 2a"]),  # inside the draft tokens: nothing is drafted after it, nothing follows it
        ((1,), None, ["1a"]),
        ((4,), None, ["1a 2a 3a 4b"]),
        ((2,), 1, ["1a 2c"]),
        ((5, 3), None, ["1a 2a 3a"]),
        ((0,), 2, ["1a 2a 3c", "4a 5a 6a 7b", "0a"]),  # the draft's 0 after 2 is an end that is rejected
    ],
)
def test_the_end_of_the_text_ends_the_answer(ends, wrong_after, expected):
    """Catches tokens after the end, an end that is missed by its origin, and an end that was only a draft token."""
    session, steps = count(ends=ends, wrong_after=wrong_after, max_tokens=20)
    assert told(steps) == expected
    assert session.finish_reason == steps[-1].finish_reason == "eos"
    assert session.tokens[-1] in ends
    if steps[-1].pieces[-1].origin == "accepted":
        assert steps[-1].stop_reason == "end of text"
        assert steps[-1].num_drafted == steps[-1].num_accepted


@pytest.mark.parametrize(("target_length", "draft_length"), [(6, None), (None, 6), (6, 3), (3, 6), (9, 1), (2, 2)])
def test_contexts_are_used_to_their_end(target_length, draft_length):
    """Catches an overrun context (the tables assert), and an answer that stops where only the draft's context ends."""
    session, steps = count(target_length=target_length, draft_length=draft_length, max_tokens=9)
    assert len(session.tokens) == (target_length or 10)
    assert session.finish_reason == "length"
    if draft_length and not target_length:
        assert [r.num_drafted for r in steps][:2] == [3, 2]  # 6 places: 4 tokens read, then 1 + 1 draft token read
        assert {r.num_drafted for r in steps[2:]} == {0}


@pytest.mark.parametrize(("max_tokens", "target_length"), [(0, None), (5, 3), (0, 3)])
def test_a_request_without_room_is_finished_at_once(max_tokens, target_length):
    """Catches a token beyond the limit when the prompt fills the context, or when none was asked for."""
    session, steps = count(prompt=(0, 1, 2), max_tokens=max_tokens, target_length=target_length)
    assert (session.finish_reason, steps, session.tokens) == ("length", [], [0, 1, 2])


def test_bad_requests_are_refused():
    """Catches a prompt that fails deep in a model, and a message without the two lengths that clash."""
    with pytest.raises(PromptError, match=r"no tokens.*at least one"):
        count(prompt=())
    with pytest.raises(PromptError, match=r"4 tokens.*holds 3.*Shorten"):
        count(prompt=(0, 1, 2, 3), target_length=3)
    with pytest.raises(ValueError, match=r"max_tokens must be a whole number, at least 0, got -1"):
        count(max_tokens=-1)


@pytest.mark.parametrize("most", [None, 1, 2])
@pytest.mark.parametrize("prompt", [(0,), (4, 5, 6, 7)])
def test_prefill_reads_all_but_the_last_token(prompt, most):
    """Catches a token that is read twice or never, in parts or without prefill, and a draft that is not read to its end."""
    request = Request(target=counting(), draft=counting(max_length=len(prompt)), prompt=prompt, max_tokens=9)
    sessions = [request.session(Fixed(k=1), TokenVerification(), streams(0)) for _ in range(2)]
    num = max(1, math.ceil((len(prompt) - 1) / (most or 9)))
    assert [sessions[0].prefill(most) for _ in range(num)] == [False] * (num - 1) + [True]
    assert sessions[0].target.tokens == sessions[0].draft.tokens == list(prompt[:-1])
    assert sessions[0].step().tokens == sessions[1].step().tokens
    assert sessions[0].target.tokens == sessions[1].target.tokens


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_who_watches_sees_raw_logits_and_the_distribution_made_of_them(temperature):
    """Catches logits that are already penalised or p under both names, and a greedy p that is only good for its argmax."""
    sampling = Sampling(temperature=temperature, repetition_penalty=1.7)
    session = replace(TABLES, sampling=sampling, ends=()).session(
        Fixed(k=2), GreedyVerification() if sampling.is_greedy else TokenVerification(), streams(0)
    )
    rows = []

    def watch(plan, result):
        for i in range(result.num_drafted + 1):
            context = [*session.tokens, *result.tokens[:i]]
            seen = torch.tensor([t in context for t in range(4)])
            assert torch.equal(result.rows.logits[i], TABLES.target.distribution(context).log())
            assert torch.equal(result.rows.p[i], probabilities(result.rows.logits[i], sampling, seen))
            rows.append(result.rows.p[i])

    session.watch = watch
    finish(session)
    assert len(rows) > 15


@pytest.mark.parametrize("verification", [TokenVerification(), BlockVerification()])
def test_temperature_0_is_refused_where_q_is_needed(verification):
    """Catches a failure in the middle of a step: greedy draft tokens carry no distribution."""
    request = replace(TABLES, sampling=Sampling(temperature=0.0))
    with pytest.raises(UnsoundError, match=r"no distribution q.*GreedyVerification"):
        request.session(Fixed(k=1), verification, streams(0))
    session = request.session(Fixed(k=2), CompareVerification(), streams(0))
    greedy = request.session(Fixed(k=2), GreedyVerification(), streams(0))
    finish(session)
    finish(greedy)
    assert session.tokens == greedy.tokens


# Tokens: 4 is a, 5 is b, 6 is c.
SPELLING = tiny_tokenizer(7)
SPELLED = Request(target=always([0, 0, 0, 0, 4, 3, 2]), draft=always([0, 0, 0, 0, 1, 2, 0]), prompt=(4,), max_tokens=3)


def read_with(*stop):
    return lambda: Detokenizer(SPELLING, stop)


@pytest.mark.parametrize("verification", VERIFICATIONS, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("policy", [Fixed(k=0), Fixed(k=3), MaxConfidence(threshold=0.4)], ids=["0", "3", "adaptive"])
def test_a_stop_string_cuts_the_targets_text(policy, verification):
    """Catches a stop string that changes the distribution of the text before it, or leaks, wherever the steps fall."""

    def text_of(_, steps):
        return "".join(r.text for r in steps)

    def cut(session, steps):
        text = text_of(session, steps)
        at = text.find("ab")
        return text[:at] if at >= 0 else text

    whole = replace(SPELLED, detokenizer=read_with()).distribution(Fixed(k=0), TokenVerification(), cut)
    stopped = replace(SPELLED, detokenizer=read_with("ab")).distribution(policy, verification, text_of)
    assert total_variation(whole, stopped) < 1e-12


def test_a_stop_string_ends_the_answer_inside_a_step():
    """Catches draft tokens after the stop string that stay in the answer, a reason that says length, and an accepted token that
    rules learn from as a rejected one."""
    spell = sure(lambda t: 4 + (t - 3) % 3, 7)  # abcabc...
    request = Request(target=spell, draft=spell, prompt=(4,), max_tokens=9, detokenizer=read_with("ca"))
    session = request.session(Fixed(k=5), TokenVerification(), streams(0))
    (outcome,) = finish(session)
    assert (outcome.text, outcome.finish_reason, session.finish_reason) == ("b", "stop", "stop")
    assert told([outcome]) == ["5a 6a 4a"]
    assert (outcome.num_accepted, outcome.num_tested) == (3, 3)


@pytest.mark.parametrize(("ends", "max_tokens", "reason"), [((6,), 9, "eos"), ((6,), 3, "eos"), ((), 2, "length")])
def test_text_held_back_comes_with_the_end(ends, max_tokens, reason):
    """Catches a tail that looked like a stop string and is lost when the answer ends otherwise."""
    spell = sure(lambda t: min(t + 1, 6), 7)  # abccc...
    request = Request(target=spell, draft=spell, prompt=(3,), ends=ends, max_tokens=max_tokens, detokenizer=read_with("abcc"))
    session = request.session(Fixed(k=1), TokenVerification(), streams(0))
    steps = finish(session)
    assert session.finish_reason == reason
    assert "".join(r.text for r in steps) == "ab"


def test_the_parts_of_a_step_are_its_whole_time(monkeypatch):
    """Catches a part that is counted twice or nowhere, and one reading of the prompt that is forgotten for another. The clock
    moves by one whenever it is looked at: twice for a forward pass or a judgement, once where a part of a step ends."""
    clock = iter(map(float, range(100))).__next__
    for module in ("step", "scheduler"):
        monkeypatch.setattr(f"specdecpp.{module}.perf_counter", clock)
    policy = SpecDecPP(head=random_head(4, seed=1), threshold=1.0, max_tokens=3)
    session = replace(TABLES, prompt=(0, 1, 2), ends=()).session(policy, TokenVerification(), streams(0))
    assert [session.prefill(1), session.prefill()] == [False, True]
    assert session.prefill_s == 2
    outcome = session.step()
    assert (outcome.num_drafted, len(outcome.judged)) == (3, 2)
    assert (outcome.draft_s, outcome.head_s, outcome.verify_s, outcome.other_s) == (3 * 2 + 2 * 1 + 1, 2, 2, 2)
    assert outcome.forward_s == 3 + 1
