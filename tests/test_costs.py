"""What a step costs: the cost model as a value, and its measurement on this machine, kept in a file."""

import json
import math
import random
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pytest
import torch
from distributions import outcome

from specdecpp import Decoder, Fixed, Pair, load_pair
from specdecpp.costs import CostClock, chain_tokens, measuring
from specdecpp.costs.clock import COUPLING, FIRST, LONG_WARM_UP, MEMORY, PAUSE, QUICK_S, WAIT, WARM_UP
from specdecpp.costs.curve import is_switch
from specdecpp.lab import ArgmaxLength
from specdecpp.metrics import Step
from specdecpp.policies import CostAware, Costs, CumulativeConfidence
from specdecpp.testing import TableModel, tiny_tokenizer

CURVE = Costs(draft_s=0.5, passes={1: 1.0, 3: 2.0, 5: 2.5})
RISING = Costs(draft_s=0.5, passes={1: 6.0, 2: 7.0, 3: 8.0, 5: 10.0, 9: 14.0})


# The value


def test_passes_lie_on_a_curve_that_never_falls():
    """Catches a wrong segment, a curve that ends at the last width, and noise that pays for draft tokens."""
    expected = {1: 1.0, 2: 1.5, 3: 2.0, 4: 2.25, 5: 2.5, 6: 2.75, 9: 3.5}
    assert {n: CURVE.verify_s(n) for n in expected} == pytest.approx(expected)
    noisy = Costs(draft_s=0.0, passes={5: 1.1, 1: 1.0, 2: 0.7, 9: 1.05})
    assert [noisy.verify_s(n) for n in (1, 2, 5, 9, 20)] == pytest.approx([1.0, 1.0, 1.1, 1.1, 1.1])
    assert [Costs.relative(0.22).verify_s(n) for n in (1, 2, 40)] == [1.0, 1.0, 1.0]


def test_parts_of_a_step_add_up():
    """Catches a start that is spread over draft tokens or taken twice, a switch in every step, a head paid twice."""
    costs = Costs(draft_s=0.2, passes={1: 1.0, 3: 1.4}, start_s=0.5, switch_s=3.0)
    assert [costs.step_s(k) for k in range(3)] == pytest.approx([1.0, 1.2 + 0.5 + 0.2, 1.4 + 0.5 + 0.4])
    assert [costs.added_s(k) for k in (0, 1)] == pytest.approx([0.2 + 0.5 + 0.2, 0.2 + 0.2])
    assert [is_switch(*steps) for steps in ((0, 2), (2, 2), (2, 0), (0, 0))] == [True, False, False, False]
    judged = Costs(draft_s=0.25, passes={1: 1.0}, head_s=0.125)
    assert judged.with_head() == judged.with_head().with_head() == Costs(draft_s=0.375, passes={1: 1.0})


@pytest.mark.parametrize(
    "bad",
    [
        {"draft_s": -0.1, "passes": {1: 1.0}},
        {"draft_s": 0.1, "passes": {}},
        {"draft_s": 0.1, "passes": {0: 1.0}},
        {"draft_s": math.nan, "passes": {1: 1.0}},
        {"draft_s": 0.1, "passes": {1: math.inf}},
    ],
)
def test_impossible_costs_are_refused(bad: dict):
    """Catches a file or a typing error that makes every comparison of costs false."""
    with pytest.raises(ValueError, match=r"costs need finite figures.*got {'draft_s'"):
        Costs(**bad)


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("c", [0.0, 0.1, 0.5, 1.5])
def test_the_best_length_is_the_best_of_all(acceptance: float, c: float):
    """Catches a search that stops at a first hill, an off-by-one between draft tokens and positions, and, of equals, draft
    tokens that are drafted for nothing."""
    costs = Costs(draft_s=c, passes={1: 1.0, 4: 1.0, 5: 1.6, 21: 2.0})
    for lengths in (range(21), range(2, 5), range(3, 4)):
        rates = {g: sum(acceptance**i for i in range(g + 1)) / (g * c + costs.verify_s(g + 1)) for g in lengths}
        assert rates[costs.best_length(acceptance, lengths)] == pytest.approx(max(rates.values()))
    assert Costs.relative(0.0).best_length(0.0, range(1, 9)) == 1
    assert chain_tokens(0.5, 2) == 1.75


# Running means


def moved(costs: Costs, *steps: Step) -> Costs:
    """The means after these steps, at once."""
    clock, alike = CostClock(now=costs), 0
    for i, one in enumerate(steps):
        alike = alike + 1 if i and (one.num_drafted > 0) is (steps[i - 1].num_drafted > 0) else 0
        clock.update(one, num_before=i, num_alike=alike)
    return clock._found()


def test_costs_move_towards_what_was_timed():
    """Catches a mean over the wrong thing (the head belongs to the draft token, other work to the pass), a measurement of two
    seconds that outweighs a hundred steps, and drafting that becomes free when it is not done."""
    one = outcome(2, 1, draft_s=1.0, head_s=0.4, verify_s=1.8, other_s=0.4)
    after, later = moved(CURVE, one), moved(CURVE, *[one] * 100)
    assert CURVE.draft_s < after.draft_s < later.draft_s <= 0.7
    assert CURVE.verify_s(3) < after.verify_s(3) < later.verify_s(3)
    assert later.draft_s + later.start_s / 2 == pytest.approx(0.7, rel=0.02)
    assert later.verify_s(3) - later.start_s == pytest.approx(2.2, rel=0.02)
    assert 1.0 < after.verify_s(1) < 1.0 + COUPLING * MEMORY
    assert later.verify_s(1) < 1.05, "the error of a measurement is told from a machine that slows down"
    assert moved(CURVE, outcome(0, 0, draft_s=0.3, verify_s=1.0)).draft_s == CURVE.draft_s


@pytest.mark.parametrize("num_together", [3, 4])
def test_how_steps_of_many_rise_is_found_out(num_together: int):
    """Catches one level for all that requests take together, so that every step is two draft tokens too long where passes rise
    twice as much with their rows as was measured and drafting takes five times as long; what three taught is lost on four."""
    costs, dice = Costs(draft_s=0.1, passes={1: 6.0, 2: 7.0, 3: 8.0, 5: 10.0, 9: 14.0, 17: 22.0}), random.Random(1)
    clock, of_some = CostClock(now=costs), costs.shared(num_together)
    for _ in range(3000):
        num, near = dice.choice((1, 2, 2, 3)), dice.gauss(1, 0.1)
        pass_s = of_some.pass_s(2) + 2 * (of_some.pass_s(num + 1) - of_some.pass_s(2))
        one = outcome(num, 1, draft_s=num * 5 * of_some.draft_s, verify_s=near * pass_s)
        clock.update(replace(one, costs=clock.shared(num_together)))
    for num in (3, 4):
        now, before = clock.shared(num), costs.shared(num)
        assert now.pass_s(4) - now.pass_s(2) == pytest.approx(2 * (before.pass_s(4) - before.pass_s(2)), rel=0.15)
        assert now.draft_s == pytest.approx(5 * before.draft_s, rel=0.15)
    assert clock.now is costs, "steps of many mislead nobody about one alone"
    assert clock.shared(4) is clock.shared(4)
    assert replace(clock.shared(8), is_new_load=False) == costs.shared(8)


def test_at_a_new_load_the_target_alone_goes_first():
    """Catches a batch that drafts at once and for ever because nobody has timed the target alone there, one that learns from
    the cold steps behind its prompts, shares of one step that count as steps, and the reading of prompts as drafting."""
    for unit_s, num_cold in ((QUICK_S / 2, LONG_WARM_UP), (2 * QUICK_S, 0)):
        clock = CostClock(now=(costs := Costs(draft_s=unit_s / 2, passes={1: unit_s, 3: 2 * unit_s})))
        before, near, one = (
            costs.shared(4),
            [*range(num_cold + FIRST)],
            outcome(0, 0, verify_s=1.5 * costs.shared(4).verify_s(1)),
        )
        for i in (i for i in near for _ in range(4)):
            assert clock.shared(4) == replace(before, is_new_load=True), "cold steps teach nothing"
            assert CostAware().rule(CostAware().start(), clock.shared(4)).threshold(0) > 1
            clock.update(replace(one, costs=clock.shared(4)), num_before=i, num_alike=i)
        now, late = clock.shared(4), outcome(2, 1, draft_s=99 * unit_s, verify_s=before.verify_s(3))
        assert (now.is_new_load, now.verify_s(1)) == (False, pytest.approx(1.5 * before.verify_s(1), rel=0.05))
        assert 1.1 * before.draft_s < now.draft_s < 1.5 * before.draft_s, "what slows the target slows the draft"
        for i in range(99 * WARM_UP):
            clock.update(replace(late, costs=now), num_before=99, num_alike=i % WARM_UP)
        assert clock.shared(4) is now


@pytest.mark.parametrize(
    ("passes", "bump_s"),
    [((7.5, 8.0, 8.5), 0.0), ((7.5, 9.5, 11.5), 0.0), ((7.5, 7.6, 7.7), 0.0), ((7.5, 8.5, 9.5), 0.4), ((7.5, 7.5, 9.5), 0.0)],
)
def test_the_seconds_of_each_length_are_found_out(passes: tuple[float, ...], bump_s: float):
    """Catches one level for all widths: with a rise that was measured as too small every step is one draft token too long, and
    three rows in the time of two, then a leap, are no even rise. What was not tried rises from there as was measured."""
    clock, dice = CostClock(now=RISING), random.Random(1)
    for _ in range(600):
        num, near = dice.choice((1, 1, 2, 3)), dice.gauss(1, 0.1)
        clock.update(outcome(num, 1, draft_s=bump_s + 0.8 * num, verify_s=near * passes[num - 1]))
    now = clock.now
    assert [now.pass_s(n) for n in (2, 3, 4)] == pytest.approx(passes, rel=0.08)
    assert [now.start_s + now.draft_s, now.draft_s] == pytest.approx([bump_s + 0.8, 0.8], rel=0.05)
    assert now.pass_s(9) - now.pass_s(2) >= 3.4, "rows that nobody has tried are not free"


def test_a_wrong_shape_is_corrected_by_the_lengths_that_are_tried():
    """Catches a length that is never tried because costs from a busy minute say that a longer one takes no more."""
    clock, dice = CostClock(now=Costs(draft_s=0.1, passes={2: 6.0, 3: 6.1, 4: 6.2, 6: 6.3, 9: 6.4})), random.Random(3)
    for _ in range(40):
        num = dice.choice((3, 4, 5, 6, 8))
        clock.update(outcome(num, 1, draft_s=0.1 * num, verify_s=dice.gauss(1, 0.05) * (3 + 0.5 * num)))
    assert clock.now.pass_s(4) - clock.now.pass_s(2) == pytest.approx(1.0, abs=0.5)


def test_steps_that_no_curve_fits_do_not_move_the_target_alone_for_ever():
    """Catches a level that a lasting difference between curve and steps moves at every look, until all passes are off."""
    costs = Costs(draft_s=0.1, passes={1: 1.0, 2: 1.2, 3: 1.4, 5: 1.8, 9: 2.6, 13: 3.4})
    clock, dice = CostClock(now=costs), random.Random(4)
    for _ in range(200 * WAIT):
        num = dice.choice((1, 1, 1, 8))
        clock.update(outcome(num, 1, draft_s=0.1 * num, verify_s=1.2))
    assert clock.now.verify_s(1) == pytest.approx(1.0, rel=0.1)
    for _ in range(2 * WAIT):
        clock.update(outcome(0, 0, verify_s=1.0))
    assert clock.now.verify_s(2) == pytest.approx(1.2, rel=0.15)


def test_costs_stay_costs_whatever_the_clock_reads():
    """Catches passes or a start below zero, and a pause that is measured by a draft of 0 s alone."""
    clock, dice = CostClock(now=Costs(draft_s=0.01, passes={1: 0.7, 2: 0.9, 3: 1.0, 9: 4.0}, start_s=0.5)), random.Random(2)
    for _ in range(20 * WAIT):
        num, fast = dice.choice((0, 1, 2, 8)), dice.choice((0.01, 0.2, 1.0))
        clock.update(outcome(num, 0, draft_s=fast * num, verify_s=fast))
        assert [n for n in (1, 2, 3, 9, 17) if not clock.now.pass_s(n) > 0] == []
    free = outcome(1, 1, draft_s=0.5, verify_s=1.0)
    assert 0 < moved(Costs.relative(0.0), free).step_s(1) - 1 < 0.5
    assert moved(Costs.relative(0.0), *[free] * 999).step_s(1) == pytest.approx(1.5, rel=0.02)


def test_steps_next_to_a_switch_and_pauses_are_no_measurement():
    """Catches plain passes, slow because a draft has just run, that make the target alone look slower than it is, and one
    hiccup that makes drafting look hopeless for a hundred steps."""
    plain, slow = outcome(0, 0, verify_s=1.0), outcome(0, 0, verify_s=2.0)
    drafted = outcome(2, 1, draft_s=1.0, verify_s=CURVE.verify_s(3))
    assert moved(CURVE, plain, drafted, *[slow] * LONG_WARM_UP) == moved(CURVE, plain)
    assert moved(CURVE, plain, drafted, *[slow] * (LONG_WARM_UP + 1)).verify_s(1) > 1.01
    slow = replace(drafted, draft_s=2.0, verify_s=2 * CURVE.verify_s(3))
    assert moved(CURVE, plain, *[slow] * WARM_UP) == moved(CURVE, plain)
    assert moved(CURVE, plain, *[slow] * (WARM_UP + 1)).step_s(2) > CURVE.step_s(2)
    copying = CostClock(now=CURVE, is_copying=True)
    for i, one in enumerate((plain, slow)):
        copying.update(one, num_before=i, num_alike=0)
    assert copying._found().step_s(2) > CURVE.step_s(2), "no model has driven another from the caches"
    after = moved(CURVE, *[drafted] * 100, outcome(2, 1, draft_s=1000.0, verify_s=1000.0))
    assert 3.0 < after.step_s(2) < 3.0 * (1 + 2 * MEMORY * (PAUSE - 1))


def test_the_first_steps_of_an_answer_are_no_measurement_of_quick_models(monkeypatch: pytest.MonkeyPatch):
    """Catches a rule that drafts at once, finds passes slow behind the prompt, stops, and then finds the target alone quick;
    a slow pair with short answers whose costs nothing corrects; and a request that does not say where it begins."""
    for unit_s, num in ((QUICK_S / 2, LONG_WARM_UP), (1.0, 0)):
        costs, times = Costs(draft_s=unit_s / 2, passes={1: unit_s, 3: 2 * unit_s}), []
        clock, slow = CostClock(now=costs), [outcome(k, k // 2, draft_s=k * unit_s, verify_s=4 * unit_s) for k in (0, 2)]
        for i in range(num + 1):
            times.append(clock._found().step_s(2))
            clock.update(slow[i > 0], num_before=i)
        assert {*times} == {costs.step_s(2)} < {*times, clock._found().step_s(2)}
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(CostClock, "update", lambda self, outcome, **near: seen.append((near["num_before"], near["num_alike"])))
    target, draft = (TableModel.random(vocab_size=8, depth=1, seed=seed) for seed in (6, 7))
    decoder = Decoder(Pair(target=target, draft=draft, tokenizer=tiny_tokenizer(8)), costs=CURVE)
    for _ in range(2):
        drafts = [one.num_drafted > 0 for one in decoder.generate([1, 2], max_tokens=99, ignore_eos=True).steps]
        alike = [len([*takewhile(lambda one: one is drafts[i], reversed(drafts[:i]))]) for i in range(len(drafts))]  # noqa: B023
        assert seen[-len(drafts) :] == [*enumerate(alike)]


def test_costs_are_the_same_object_while_steps_are_as_expected():
    """Catches costs that change with every step, so that every plan that rests on them is made anew for every step."""
    clock, dice = CostClock(now=CURVE), random.Random(0)
    for _ in range(200):
        clock.update(outcome(2, 1, draft_s=1.0, verify_s=CURVE.verify_s(3)))
    assert clock.now is CURVE
    for _ in range(1 + WAIT):
        clock.update(outcome(2, 1, draft_s=1.0, verify_s=2 * CURVE.verify_s(3)))
    assert clock.now.verify_s(3) > 1.2 * CURVE.verify_s(3)
    num_changes = 0
    for _ in range(50 * WAIT):  # a busy machine
        before, near = clock.now, [dice.expovariate(1.0) for _ in range(2)]
        clock.update(outcome(2, 1, draft_s=near[0], verify_s=near[1] * CURVE.verify_s(3)))
        num_changes += clock.now is not before
    assert 25 < num_changes <= 50


# The measurement


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    return load_pair(folder / "target", draft=folder / "draft", backend="lean")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache for one test, and quick measurements."""
    monkeypatch.setattr(measuring, "LENGTHS", (0, 1, 2, 4))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(measuring, "CYCLES", 1)
    return tmp_path / "cache" / "specdecpp"


def test_models_are_measured_at_widths_that_suit_their_speed(pair: Pair, home: Path):
    """Catches widths that are off by the unread token, and a minute of measuring before the first token of a large pair: no
    budget at all stands for a slow one, which two prompts of practice have to do for."""
    costs = measuring.measure(pair, budget_s=math.inf)
    assert list(costs.passes) == [k + 1 for k in measuring.LENGTHS]
    assert costs.draft_s > 0
    assert list(measuring.measure(pair, budget_s=0.0).passes) == [1, 2, 5, 9, measuring.WIDE]
    cycles, _ = measuring.timed(pair, 0.0)
    assert [{k: len(turn) for k, turn in cycle.runs.items()} for cycle in cycles] == [{0: 2, 1: 2, 4: 2, 8: 1}] * 2
    assert not home.exists(), "measuring alone writes nothing"


def test_several_requests_are_forecast_by_a_pass_as_wide_as_theirs(pair: Pair):
    """Catches a line through narrow passes, by which eight requests of a real pair always drafted, and a pass that was timed on
    a slower machine than the others."""
    runs = {k: [outcome(k, 0, draft_s=0.3 * k, verify_s=1.0 + 0.05 * k)] * 2 for k in (0, 1, 4, 8)}
    slower = {k: [replace(step, verify_s=2 * step.verify_s) for step in run] for k, run in runs.items()}
    cycles = [measuring.Cycle(runs, wide_s=2.6), measuring.Cycle(slower, wide_s=5.2), measuring.Cycle(runs, wide_s=2.6)]
    assert 8 * measuring.costs_of(pair, cycles).shared(8).pass_s(2) == pytest.approx(2.45)


def test_turns_that_share_a_cache_begin_behind_the_same_context(pair: Pair):
    """Catches a turn that goes on behind what another left, and a context that is read again for each."""
    caches = pair.target.new_cache(), pair.draft.new_cache()
    sessions = [session for k in (4, 1) if (session := measuring._session(pair, caches, (k,))) is not None]
    for session in (*sessions, *sessions):
        measuring._run(session, 3)
    seen: list[tuple[list[int], torch.Tensor]] = []
    for session in sessions:
        session.watch = lambda plan, result: seen.append((result.tokens, result.rows.logits))
        measuring._run(session, 1)
        prompt = session.tokens[: session.num_prompt_tokens]
        tokens, logits = seen[-1]
        expected, _ = pair.target.new_cache().extend([*prompt, *tokens], rows=len(tokens) + 1)
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
        assert caches[0].length == len(session.tokens) - 1


@pytest.mark.parametrize("room", [6, 7, 8, 13, 20, None])
def test_short_contexts_are_measured_as_far_as_they_go(room: int | None, home: Path):
    """Catches a measurement that overruns a context, or takes a step for one that is longer than there was room for."""
    target = TableModel.random(vocab_size=8, depth=1, seed=6, max_length=room)
    pair = Pair(target=target, draft=TableModel.random(vocab_size=8, depth=1, seed=7), tokenizer=tiny_tokenizer(8))
    widths = list(measuring.measured(pair).passes)
    assert widths == [k + 1 for k in measuring.LENGTHS if room is None or 2 * k + 6 <= room]
    assert not home.exists(), "models without a fingerprint cannot be told apart, so nothing is kept"


@pytest.mark.parametrize(("late_s", "switch_s"), [(0.05, 1.0), (5.0, 3.0)])
def test_a_switch_is_what_a_stay_and_the_way_back_take(late_s: float, switch_s: float, pair: Pair):
    """Catches a stay of one step, after which the target finds its caches full, a switch that is counted by steps, one that
    takes in the pauses of a busy machine, and a figure of it that would keep a rule from ever beginning."""
    alone, one = outcome(0, 0, verify_s=1.0), outcome(1, 0, draft_s=0.5, verify_s=1.5)
    late = [replace(alone, verify_s=1.0 + late_s)] * 10 + [alone] * (measuring.NUM_PLAIN - 10)
    stay = [replace(one, verify_s=2.0)] + [one] * (measuring.NUM_DRAFTED - 1)
    turns = {k: [outcome(k, 0, draft_s=0.5 * k, verify_s=1.5 if k else 1.0)] * 6 for k in (0, 1, 2, 3, 4)}
    steps, pause = [*late, *stay] * measuring.SWITCHES, replace(one, verify_s=9.0)
    cycles = [measuring.Cycle(turns, [*steps[:at], pause, *steps[at + 1 :]]) for at in (0, 9, 20)]
    assert measuring.costs_of(pair, cycles).switch_s == pytest.approx(switch_s)


def test_noise_makes_no_step_no_cheaper_pass_and_no_start():
    """Catches a bump of one width that a rule would stop in front of, a line that falls or goes below zero, a first step that
    is smoothed, a pass that is flat at first and is priced as if it rose evenly, and a start spread over draft tokens."""
    widths = (2, 3, 4, 5, 7, 9, 13, 17)
    straight = {1: 3.0} | {n: 4 + 0.1 * n for n in widths}
    bent = {1: 1.0} | {n: 1 + 0.01 * n**2 for n in widths}
    assert measuring._smooth(straight) == pytest.approx(straight)
    assert measuring._smooth(bent) == pytest.approx(bent)
    bumped = measuring._smooth(straight | {5: 5.5})
    assert bumped[1] == 3.0
    assert bumped[5] - bumped[4] < 0.2
    fitted = measuring._smooth({1: 0.1} | {n: n**0.5 for n in widths})
    assert fitted[17] - fitted[13] == pytest.approx(4 * (fitted[3] - fitted[2])), "a curve may bend upwards only"
    assert measuring._smooth({1: 1.0, 2: 3.0, 3: 2.0, 4: 1.0}) == pytest.approx({1: 1.0, 2: 2.0, 3: 2.0, 4: 2.0})
    assert min(measuring._smooth({1: 1.4, 2: 0.1, 3: 0.2, 5: 14.0}).values()) == 1.4
    assert measuring._line({k: 0.5 + 0.2 * k for k in (1, 2, 4, 8)}) == pytest.approx((0.5, 0.2))
    assert measuring._line({1: 0.1, 2: 0.3, 4: 0.7}) == (0.0, pytest.approx((0.1 + 0.15 + 0.175) / 3))
    assert [measuring._line(found) for found in ({}, {3: 0.6})] == [(0.0, 0.0), (0.0, pytest.approx(0.2))]


# The file


def test_a_second_process_weighs_the_same_costs_of_the_same_pair(folder: Path, pair: Pair, home: Path):
    """Catches figures that are measured anew, so that a seed gives another answer, and one pair's costs used for another."""
    first = measuring.measured(replace(pair))
    (file,) = home.glob("costs-*")
    assert json.loads(file.read_text())["draft_s"] == first.draft_s
    target, draft = folder / "target", folder / "draft"
    for num, (p, q) in enumerate(((target, draft), (draft, draft), (target, target)), 1):
        found = measuring.measured(load_pair(p, draft=q, backend="lean"))  # by name: another backend has costs of its own
        assert (found == first) == (num == 1)
        assert len(list(home.glob("costs-*"))) == num


@pytest.mark.parametrize(
    "content", ["", "null", '{"draft_s": "x", "passes": {"1": 1.0}}', '{"draft_s": NaN, "passes": {"1": 1}}']
)
def test_a_damaged_file_is_measured_again_and_mended(content: str, pair: Pair, home: Path):
    """Catches a crash at every start, or nonsense that is believed, after a kill in the middle of a write."""
    measuring.measured(replace(pair))
    (file,) = home.glob("costs-*")
    file.write_text(content)
    costs = measuring.measured(replace(pair))  # as of another process
    assert costs.draft_s > 0
    assert measuring.measured(replace(pair)) == costs
    assert list(home.glob("costs-*")) == [file], "nothing half-written stays"


def test_only_a_policy_that_asks_has_costs_measured(pair: Pair, home: Path):
    """Catches seconds that are spent before the first token for nothing, and made-up costs that are kept as measured ones."""
    for decoder in (Decoder(pair, policy=Fixed(k=2)), Decoder(pair, policy=CumulativeConfidence())):
        decoder.generate([3, 4], max_tokens=4, seed=0)
        assert decoder.costs is None
    given = Decoder(pair, policy=ArgmaxLength(), costs=CURVE)
    given.generate([3, 4], max_tokens=64, ignore_eos=True)
    assert given.costs is CURVE
    assert not list(home.glob("costs-*"))
    Decoder(replace(pair), policy=ArgmaxLength()).generate([3, 4], max_tokens=4, seed=0)
    assert len(list(home.glob("costs-*"))) == 1
