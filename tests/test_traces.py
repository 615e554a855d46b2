"""Traces against what they are made of, and their replay against decoding a real pair."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from distributions import finish, random_head, unchecked
from kinds import model_of
from records import Process, record_of

from specdecpp import Sampling
from specdecpp.backends import EagerModel
from specdecpp.errors import DataError
from specdecpp.head import Calibration
from specdecpp.policies import CostAware, Costs, CumulativeConfidence, Fixed, Policy, SpecDecPP
from specdecpp.replay.replay import replay
from specdecpp.replay.replayed import Replayed
from specdecpp.replay.trace import Trace
from specdecpp.sampling import streams
from specdecpp.session import Session
from specdecpp.testing import tiny_draft
from specdecpp.training.labels import Labelling, Record, Sampled, label
from specdecpp.training.responses import sample_responses
from specdecpp.training.traces import Terms, trace, traces
from specdecpp.verify import TokenVerification

PROCESS = Process.random(6, seed=1, end=5)
CHECKED = Calibration(rejection_weight=3.0, temperature=1.5, bias=0.3, num_labels=1)
COSTS = Costs(draft_s=0.2, passes={1: 1.0, 5: 1.3})


def record(answer: Sequence[int] = (1, 4, 2, 0, 3), *, length: int = 4, **more: Any) -> Record:
    return record_of(PROCESS, answer, generator=torch.Generator().manual_seed(2), length=length, **more)


TERMS = Terms(ends=(5,), max_tokens=5)


def test_every_number_is_that_of_its_token() -> None:
    """Catches a column off by one between answer and branches, and a belief of the position after the token."""
    made = record()
    found, branches = trace(made, TERMS), made.branches
    assert branches is not None
    assert found.tokens.tolist() == torch.cat([made.answer[:, None], branches.token], 1).tolist()
    assert found.branch_length.tolist() == branches.length.tolist()
    for i, length in enumerate(branches.length.tolist()):
        last = int(made.answer[i - 1]) if i else 0
        contexts = [last, last, *branches.token[i, : length - 1].tolist()] if length else [last]
        for column, context in enumerate(contexts):
            q, token = PROCESS.q[context], int(found.tokens[i, column])
            assert found.log_q[i, column] == pytest.approx(float(q[token].log()), rel=1e-5)
            assert found.entropy[i, column] == pytest.approx(float(torch.special.entr(q).sum()), rel=1e-5)
            assert found.gap[i, column] == pytest.approx(float(q.topk(2).values.diff().abs()), rel=1e-4)
        assert found.is_closed[i] == (length > 0 and int(branches.token[i, length - 1]) == 5)
        assert found.odds[i] == pytest.approx(
            min(1, float(PROCESS.q[last, found.tokens[i, 0]] / PROCESS.p[last, found.tokens[i, 0]]))
        )


def test_answers_leave_the_places_that_the_session_had() -> None:
    """Catches an answer that ended by itself taken for one that was cut, and the reverse."""
    cut, ended = record(), record([1, 4, 5])
    assert [trace(ended, terms).num_places for terms in (TERMS, replace(TERMS, max_tokens=9))] == [4, 8]
    assert trace(cut, TERMS).num_places == 4
    assert trace(cut, replace(TERMS, max_tokens=9)).num_places == 4, "the context was full"
    assert not trace(cut, TERMS).is_ended
    assert trace(ended, TERMS).is_ended


@pytest.mark.parametrize("form", ["lagged", "look_ahead"])
@pytest.mark.parametrize("scalars", [(), ("log_q", "entropy", "gap"), ("depth", "log_q")], ids=["none", "free", "depth"])
def test_heads_say_what_they_say_when_they_decode(form: str, scalars: tuple[str, ...]) -> None:
    """Catches the state before the token for the one at it, a depth off by one, no calibration, another head's opinion."""
    card: dict[str, Any] = {"form": form, "scalars": scalars, "calibration": CHECKED}
    card |= {"vocab_size": 6} if form == "look_ahead" else {}
    head, other = (random_head(6, seed=seed, scale=1.0, **card) for seed in (3, 4))
    made = record()
    found, branches = trace(made, TERMS, heads=[other, head]), made.branches
    assert branches is not None
    states = torch.eye(6)
    for calibrated in (False, True):
        opinion, estimate = found.opinions[head, calibrated], head.estimator(calibrated=calibrated)
        assert opinion.next is None
        assert opinion.accept.shape == (5, 5, 4 if "depth" in scalars else 1)
        for i, length in enumerate(branches.length.tolist()):
            last = int(made.answer[i - 1]) if i else 0
            contexts = [last, last, *branches.token[i, : length - 1].tolist()] if length else [last]
            for column, context in enumerate(contexts):
                token = int(found.tokens[i, column])
                state = states[context if form == "look_ahead" else token]
                for place in range(opinion.accept.shape[2]):
                    known = {name: float(getattr(found, name)[i, column]) for name in ("log_q", "entropy", "gap")}
                    known["depth"] = float(place + 1)
                    said = estimate(state, token, tuple(known[name] for name in scalars))
                    assert opinion.accept[i, column, place] == pytest.approx(said, abs=1e-5)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.7, top_p=0.5), Sampling(temperature=0.0)], ids=["top-p", "greedy"])
def test_a_token_that_rounding_took_out_of_the_nucleus_can_be_replayed(sampling: Sampling) -> None:
    """Catches a whole recording that is refused for one token: sampled at the edge of the nucleus, it is beyond that edge in
    the pass that labels it (a batch sums in another order), and where the draft has the same few tokens as the target there was
    no branch then."""
    target, _ = backends()
    prompt, answer = [5, 9, 7], [4, 8, 6, 11, 12, 20]  # nothing the target would say under this sampling
    how = Labelling(features=(), branch_length=LENGTH, ends=ENDS, branch_odds=True, sampling=sampling)
    made = label(target, target, [Sampled(prompt=prompt, answer=answer)], how, torch.Generator().manual_seed(0))
    odd = made[0].answer_odds < 1
    assert odd.any()
    [found] = traces(made, Terms(ends=ENDS, max_tokens=len(answer)))
    assert (found.branch_length[odd.numpy()] > 0).all()
    with unchecked():
        assert replay([found], Fixed(k=2), COSTS, repeats=4).tokens.sum() == 4 * len(answer)


def test_what_the_labels_lack_is_said() -> None:
    """Catches a truth made up for older labels, and a trace without branches."""
    made = record()
    assert trace(made, TERMS).truth is not None
    assert trace(replace(made, answer_log_ratio=None), TERMS).truth is None
    assert made.branches is not None
    assert trace(replace(made, branches=replace(made.branches, overlap=None)), TERMS).truth is None
    with pytest.raises(DataError, match="no branches"):
        traces([replace(made, branches=None)], TERMS)


def test_terms_are_those_of_the_collection() -> None:
    """Catches terms that are read from the wrong place."""
    about = {"pair": {"ends": [2, 7]}, "collect": {"max_tokens": 224}}
    assert Terms.of(about) == Terms(ends=[2, 7], max_tokens=224)
    with pytest.raises(DataError, match="collect"):
        Terms.of({"pair": {"ends": [2]}})


# Against a real pair

NUM, MAX_TOKENS, LENGTH, ENDS = 100, 14, 6, (1, 9, 17)
CARD: dict[str, Any] = {"scalars": ("log_q", "depth"), "calibration": CHECKED}
AHEAD = random_head(32, seed=5, scale=0.3, form="look_ahead", vocab_size=64, **CARD)
LAGGED = random_head(32, seed=7, scale=0.3, calibration=CHECKED)


@cache
def backends() -> tuple[EagerModel, EagerModel]:
    target = model_of("llama")
    return EagerModel(target), EagerModel(tiny_draft(target))


SERVED = Sampling(temperature=0.7, top_p=0.9)


@cache
def recorded(sampling: Sampling = Sampling()) -> list[Trace]:  # noqa: B008 (frozen)
    """Answers of the tiny target, labelled with branches."""
    target, draft = backends()
    prompts = [[3 + i % 50, 5] for i in range(NUM)]
    generator = torch.Generator().manual_seed(0)
    sampled = sample_responses(target, prompts, sampling=sampling, max_tokens=MAX_TOKENS, ends=ENDS, generator=generator)
    answers = [Sampled(prompt=p, answer=a) for p, a in zip(prompts, sampled, strict=True)]
    how = Labelling(features=(), branch_length=LENGTH, ends=ENDS, branch_odds=True, sampling=sampling)
    return traces(label(target, draft, answers, how, generator), Terms(ends=ENDS, max_tokens=MAX_TOKENS), heads=[AHEAD, LAGGED])


def decoded(policy: Policy, sampling: Sampling) -> np.ndarray:
    """(tokens, drafted, accepted, passes) of each of the prompts, decoded by the real session with other seeds."""
    target, draft = backends()
    rows = []
    for i in range(NUM):
        session = Session(
            target=target.new_cache(),
            draft=draft.new_cache(),
            policy=policy,
            verification=TokenVerification(),
            sampling=sampling,
            prompt=[3 + i % 50, 5],
            max_tokens=MAX_TOKENS,
            randomness=streams(1000 + i),
            ends=ENDS,
            costs=COSTS,
        )
        steps = finish(session)
        rows.append(
            [sum(getattr(r, name) for r in steps) for name in ("num_tokens", "num_drafted", "num_accepted")] + [len(steps)]
        )
    return np.array(rows)


def rate(top: np.ndarray, bottom: np.ndarray) -> tuple[float, float]:
    """(ratio of sums, its variance), by the delta method."""
    value = top.sum() / bottom.sum()
    return float(value), float(((top - value * bottom) ** 2).sum() / bottom.sum() ** 2)


RULES: dict[str, Policy] = {
    "fixed": Fixed(k=4),
    "cumulative": CumulativeConfidence(threshold=0.3, max_tokens=LENGTH),
    "lagged": SpecDecPP(head=LAGGED, calibrated=True, threshold=0.4, min_tokens=0, max_tokens=LENGTH),
    "cost-aware": CostAware(head=AHEAD, max_tokens=LENGTH),
}


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        *(pytest.param(name, Sampling(), marks=[pytest.mark.slow] * (name in ("fixed", "cumulative"))) for name in RULES),
        pytest.param("cumulative", SERVED, marks=pytest.mark.slow),
        ("cost-aware", SERVED),
    ],
    ids=[*RULES, "cumulative-served", "cost-aware-served"],
)
def test_replay_predicts_what_a_real_pair_does(name: str, sampling: Sampling) -> None:
    """Catches labels that do not say what a policy meets: wrong branches, odds, states. Other answers, other seeds; three rates
    of six cases, each beyond 4.5 sigmas once in 150,000: a false alarm once in 8,000."""
    with unchecked():
        real, replayed = decoded(RULES[name], sampling), replay(recorded(sampling), RULES[name], COSTS, repeats=4)
    for top in ("discarded", "passes", "drafted"):
        (a, a_variance), (b, b_variance) = rate(_column(real, top), real[:, 0]), rate(_of(replayed, top), replayed.tokens)
        assert abs(a - b) < 4.5 * (a_variance + b_variance) ** 0.5, f"{top} per token: {a:.3f} decoded, {b:.3f} replayed"


def _column(rows: np.ndarray, name: str) -> np.ndarray:
    return {"discarded": rows[:, 1] - rows[:, 2], "passes": rows[:, 3], "drafted": rows[:, 1]}[name]


def _of(replayed: Replayed, name: str) -> np.ndarray:
    return _column(np.stack([replayed.tokens, replayed.drafted, replayed.accepted, replayed.passes], 1), name)
