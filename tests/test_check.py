"""The check of a pair: whether a bad pair is told so, whether its estimates are right, when it ends, and what is said when."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from command_line import call, named, save_head
from interrupted import interrupted

from specdecpp import Decoder
from specdecpp.bench import check, turns
from specdecpp.bench.check import Check, Option, Trial
from specdecpp.bench.questions import BUILT_IN, Questions, encoded
from specdecpp.bench.turns import LENGTHS, Sums
from specdecpp.errors import DataError
from specdecpp.head import Calibration
from specdecpp.loading.pair import Pair, load_pair
from specdecpp.policies import CostAware, Costs, Fixed
from specdecpp.replay.intervals import of_few, resampled
from specdecpp.report import advice, render
from specdecpp.testing import TableModel, tiny_model, tiny_tokenizer

SHORT = ("--minutes", "30")


@pytest.fixture(scope="module", autouse=True)
def short_answers(one_thread: None) -> Iterator[None]:
    """Practice answers of 12 tokens, after some of which a check ends by itself, however slow the machine is; one thread."""
    start = turns.Turns._start

    def short(self: turns.Turns, *rest: Any) -> Any:
        self.max_tokens = min(self.max_tokens, turns.ANSWER)
        return start(self, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns, "ANSWER", 12)
        patch.setattr(check, "REQUESTS", 2)
        patch.setattr(turns.Turns, "_start", short)
        yield


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    """A tiny pair with a calibrated head, and `bad`: a draft that is larger than the target and knows nothing of it."""
    save_head(folder, calibration=Calibration(num_labels=9))
    tiny_model("llama", seed=9, layers=8, hidden_size=64).save_pretrained(folder / "bad")
    tiny_tokenizer().save_pretrained(folder / "bad")
    for name in ("target", "draft"):  # room for answers that do not end while a test looks
        path = folder / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 200_000}))
    return folder


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    return load_pair(folder / "target", draft=folder / "draft", head=folder / "head")


@pytest.fixture(scope="module")
def found(pair: Pair) -> Check:
    """A real check, which ends by itself: there is time for weeks of steps."""
    sets = [encoded(pair, BUILT_IN, num_dev=2, num_test=3)]
    told: list[Check] = []
    done = check.check(pair, sets, Trial(max_tokens=12, seconds=1e6), tell=told.append)
    assert 0 < told[0].elapsed_s < done.elapsed_s
    return done


# A real pair


def test_the_parts_of_a_check_agree(found: Check):
    """Catches a speed-up on the wrong costs, an option that is left out, and a check that does not end when all is known."""
    assert found.num_seen == found.num_prompts == 5
    assert 0 < found.acceptance < 1
    assert found.best in (*found.lengths, found.own)
    assert [option.policy for option in found.lengths] == [Fixed(k=k) for k in range(1, found.longest + 1)]
    for option in (*found.lengths, found.own):
        assert option is not None
        assert option.interval is not None
        assert option.interval[0] <= option.speedup <= option.interval[1]
        assert option.tokens_per_second == pytest.approx(option.decoding / found.costs.verify_s(1))
    one = found.lengths[0]
    assert one.tokens_per_pass is not None
    assert one.decoding == pytest.approx(one.tokens_per_pass / check.step_of(found.total, 1))
    assert found.own is not None
    assert isinstance(found.own.policy, CostAware)


def test_a_check_teaches_the_requests_that_follow(found: Check, pair: Pair):
    """Catches a check whose steps nobody remembers, and one that teaches requests with a seed or of another sampling."""
    assert found
    taught = [Decoder(pair).start("3 + 4 =", temperature=t)._memory.past.num_requests for t in (1.0, 0.5)]
    assert taught[0]
    assert not taught[1]
    assert not Decoder(pair).start("3 + 4 =", temperature=1.0, seed=1)._memory.past.num_requests


def test_a_bad_pair_is_told_so(folder: Path):
    """Catches a check that recommends a draft which is dearer than the target and is mostly rejected."""
    result = call("check", "--target", folder / "target", "--draft", folder / "bad", *SHORT)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "Not worth it: " in text
    assert "This is sure to 95 %" in text
    assert "First of all, " in text
    assert "Until then use the target alone" in text
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_json_is_one_line_with_everything(folder: Path, tmp_path: Path):
    """Catches text that gets into the JSON, a figure that is only in the sentences, one that is no JSON (NaN), and --prompts
    that does not arrive: the built-in prompts are seven."""
    path = tmp_path / "asked.jsonl"
    path.write_text("".join(json.dumps({"q": f"what is {i}"}) + "\n" for i in range(40)), encoding="utf-8")
    result = call(
        "check", *named(folder, has_head=True), *SHORT, "--num", 4, "--prompts", path, "--prompt", "field:q", "--json"
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    assert "NaN" not in result.stdout
    said = json.loads(result.stdout)
    assert said["verdict"] in ("worth it", "not worth it", "too close to call")
    assert said["is_sure"] == (said["verdict"] != "too close to call")
    assert (said["is_interrupted"], said["num_prompts"]) == (False, 4)
    assert said["c"] == pytest.approx(said["costs"]["draft_s"] / said["costs"]["passes"]["1"])
    assert {"sentences", "acceptance_by_depth", "policy", "speedup", "decoding_interval", "what_if", "options"} <= set(said)


# When it ends


class Counted(TableModel):
    """Notes when each of its passes began."""

    began: list[float]

    def extend(self, *args: Any, **options: Any) -> Any:
        Counted.began.append(perf_counter())
        return super().extend(*args, **options)


def constant(distribution: list[float], kind: type[TableModel] = TableModel) -> Any:
    """A model that says the same after every text."""
    return kind({(): distribution} | {(i,): distribution for i in range(len(distribution))}, depth=1)


P, Q = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]


def practised(seconds: float, *, num_prompts: int = 5, kind: type[TableModel] = TableModel) -> Check:
    """A check of two distributions that accept 0.7 of what is drafted, at any depth."""
    own = Pair(target=constant(P, kind), draft=constant(Q), tokenizer=tiny_tokenizer())
    prompts = tuple((0, 1, i % 3) for i in range(num_prompts))
    return check.check(own, [Questions(dataset="toy", dev=(), test=prompts)], Trial(seconds=seconds))


def test_no_step_begins_when_time_is_over():
    """Catches a step that is bounded by a count of tokens: with no time left at all, the steps in hand are the last."""
    Counted.began = []
    found = practised(0.2, kind=Counted)
    began = perf_counter() - found.elapsed_s
    late = [at for at in Counted.began if at > began + 0.2]
    assert len(Counted.began) > 20
    assert len(late) <= 2, "at most a step of the lengths and one of the default rule"


def test_acceptance_is_that_of_the_two_distributions_at_every_depth():
    """Catches depths that are off by one, and rejections that are counted where nothing was tested: sum min(p, q) is known."""
    found = practised(1.0)
    assert found.by_depth == pytest.approx([0.7] * len(found.by_depth))
    assert found.acceptance == pytest.approx(0.7)
    assert [option.tokens_per_pass for option in found.lengths[:2]] == pytest.approx([1.7, 1.7 + 0.49])


def test_without_enough_prompts_nothing_is_sure():
    """Catches an interval from two prompts, whose spread says nothing."""
    found = practised(1.0, num_prompts=2)
    assert (found.best.interval, found.is_worth, found.is_tight) == (None, None, False)
    assert "unsure: an interval takes 4 prompts" in advice.sentences(found)[1]


def test_nothing_is_known_before_a_length_was_timed():
    """Catches a verdict, or a traceback, from no steps."""
    with pytest.raises(DataError, match="no length could be timed within 1e-09 s"):
        practised(1e-9)


# Interrupts


def endless(folder: Path) -> list[str]:
    """A check that does not end by itself: two prompts give no interval, and answers are long."""
    return ["check", *named(folder), "--num", "2", "--minutes", "5"]


def test_an_interrupt_on_a_terminal_leaves_the_verdict(folder: Path, tmp_path: Path):
    """Catches Ctrl-C that throws away what was measured, and an estimate that is not written anew in place."""
    ended = interrupted(*endless(folder), at="so far", folder=tmp_path, terminal=True, NO_COLOR="1")
    assert ended.code == 0, ended.chatter
    assert "The pair" in ended.stdout
    assert "interrupted" in ended.stdout
    assert "\r" in ended.chatter.replace("\r\n", "\n"), "it was written anew in place"


@pytest.mark.slow
def test_an_interrupt_before_anything_is_known_ends_with_130(folder: Path, tmp_path: Path):
    """Catches a verdict from nothing: here the prompts are still being read."""
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps({"q": f"{i} " + "what is it " * 12_000}) + "\n" for i in range(40)), encoding="utf-8")
    data = ["--prompts", str(path), "--prompt", "field:q"]
    ended = interrupted(*endless(folder), *data, "--json", at="Ctrl-C ends it", folder=tmp_path)
    assert (ended.code, ended.stdout) == (130, ""), ended.chatter
    assert "interrupted before anything was known" in ended.chatter


def test_without_a_terminal_the_estimate_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a minute of silence in a log, and a log that is full of one line."""
    for every_s, seen in ((60.0, ["checking, 0 s"]), (0.0, ["checking, 0 s", "checking, 1 s"])):
        with render.live("checking", every_s=every_s) as tell:
            tell("0 s")
            tell("1 s")
        assert [line.strip() for line in capsys.readouterr().err.splitlines()] == seen


# Formulas


def made_of(acceptance: float, c: float, *, wide: float = 1.2, reading: tuple[float, float] = (0.0, 0.0)) -> Sums:
    """What a prompt would show: a pass of the target takes 0.1 s, a step of k draft tokens c k + `wide` passes."""
    sums = Sums.empty(1)
    sums.lengths[0, 0] = 2.0, 0.0, 2 * math.log(0.1)
    for i, k in enumerate(LENGTHS[1:4], 1):
        sums.lengths[0, i] = 2.0, 2 * math.log(c * k), 2 * math.log(wide)
    sums.depths[0, : LENGTHS[3]] = 100.0, 100 * acceptance
    sums.reading[0] = (2.0, 2 * reading[0]), (2.0, 2 * reading[1])
    return sums


def checked(*sums: Sums, **more: Any) -> Check:
    values = {"default": CostAware(), "trial": Trial(), "elapsed_s": 9.0, "num_prompts": len(sums)}
    names = ("lengths", "depths", "reading", "default")
    return Check(seen=Sums(*(np.concatenate([getattr(one, name) for one in sums]) for name in names)), **values | more)


def test_speed_is_tokens_over_the_time_of_a_step():
    """Catches an exponent or a width that is off by one, and a length between two measured ones that is not between them. All
    prompts are alike, so that the interval has no width."""
    found = checked(*[made_of(0.8, 0.1)] * 4)
    assert found.costs.draft_s == pytest.approx(0.01)
    assert found.costs.passes == pytest.approx({1: 0.1, 2: 0.12, 3: 0.12, 5: 0.12})
    for k, option in enumerate(found.lengths, 1):
        tokens = sum(0.8**j for j in range(k + 1))
        assert option.tokens_per_pass == pytest.approx(tokens)
        assert option.decoding == pytest.approx(tokens / (0.1 * k + 1.2))
        assert option.decoding_interval == pytest.approx((option.decoding, option.decoding), rel=1e-9)
        assert option.tokens_per_second == pytest.approx(option.decoding / 0.1)
    assert found.by_depth == pytest.approx([0.8] * 4)


def test_whole_answers_count_the_reading_of_their_prompts():
    """Catches a draft that reads for nothing, and a draft that shares the target's passes and pays for its own (read_along)."""
    sums = [made_of(0.8, 0.1, reading=(0.5, 0.2))] * 4
    trial = Trial(max_tokens=20)
    for along, draft_s in ((0.0, 0.2), (0.5, 0.1)):
        option = checked(*sums, trial=trial, read_along=along).lengths[0]
        assert option.speedup == pytest.approx((0.5 + 20 * 0.1) / (0.5 + draft_s + 20 * 0.1 / option.decoding))


def test_a_resample_without_a_length_takes_it_from_all_prompts():
    """Catches a division by nothing where few prompts had the longest steps."""
    short = made_of(0.8, 0.1)
    short.lengths[0, 3:], short.depths[0, 2:] = 0.0, 0.0
    found = checked(made_of(0.8, 0.1), short, short, short)
    assert found.lengths[3].interval is not None
    assert np.isfinite(found.lengths[3].interval).all()


def test_prompts_that_differ_widen_the_interval():
    """Catches steps that are taken for independent: four prompts of each of two kinds are eight draws, not 1,600."""
    interval = checked(*[made_of(0.5, 0.1)] * 4, *[made_of(0.9, 0.1)] * 4).lengths[1].decoding_interval
    assert interval is not None
    assert interval[1] - interval[0] > 0.1


def test_an_uncertain_option_is_not_the_best_by_chance():
    """Catches a default rule that is recommended because its steps scatter: they take .14 or .7 passes a token."""
    sums = [made_of(0.8, 0.1) for _ in range(6)]
    for i, one in enumerate(sums):
        one.default[0] = 100.0, 100.0, 14.0 if i % 2 else 70.0, 0.0
    found = checked(*sums)
    assert found.own is not None
    assert found.own.speedup > max(option.speedup for option in found.lengths)
    assert isinstance(found.best.policy, Fixed)


def test_each_other_machine_lacks_one_fault():
    """Catches a cure that changes two things, or nothing."""
    found = checked(*[made_of(0.6, 0.3, wide=1.5)] * 4)
    depths = [0.6] * 4
    assert found.what_if == {
        "verification": pytest.approx(check.best_speedup(replace(found.costs, passes={1: 0.1}), depths)),
        "draft": pytest.approx(check.best_speedup(replace(found.costs, draft_s=0.005), depths)),
        "acceptance": pytest.approx(check.best_speedup(found.costs, [0.8])),
    }
    assert "draft" not in checked(*[made_of(0.6, 0.04)] * 4).what_if
    assert "acceptance" not in checked(*[made_of(0.9, 0.3)] * 4).what_if


def test_the_best_length_of_a_chain():
    """Catches an exponent or a width that is off by one: two draft tokens at 0.8 give 1 + 0.8 + 0.64 tokens."""
    costs = Costs(draft_s=0.2, passes={1: 2.0, 3: 2.2, 4: 50.0})
    assert check.best_speedup(costs, [0.8]) == pytest.approx(2 * 2.44 / 2.6)
    assert check.best_speedup(costs, [0.8, 0.2]) == pytest.approx(max(2 * 1.8 / 2.3, 2 * 1.96 / 2.6))


def test_the_interval_of_few_prompts_holds_the_truth():
    """Catches percentiles of four prompts that are said to hold it in 95 of 100 cases and do so in 80. 400 worlds: that fewer
    than 88 % do with a true rate of 94 happens once in a million."""
    rng, num_held = np.random.default_rng(3), 0
    for _ in range(400):
        speeds = rng.lognormal(0.0, 0.3, 4)
        sums = resampled(np.stack([speeds, np.ones(4)], 1), seed=1, resamples=500)
        low, high = of_few(sums[:, 0] / sums[:, 1], float(speeds.mean()), 4)
        num_held += low < np.exp(0.3**2 / 2) < high
    assert num_held > 0.88 * 400, num_held


# Words


def made_up(low: float, high: float) -> Check:
    """A check whose best rule lies between two bounds."""
    found = checked(*[made_of(0.6, 0.3, wide=1.5)] * 4)
    middle, bounds = (low + high) / 2, (low, high)
    found.__dict__["best"] = Option(
        policy=Fixed(k=2), speedup=middle, interval=bounds, decoding=middle, decoding_interval=bounds, tokens_per_second=9.0
    )
    return found


@pytest.mark.parametrize(
    ("low", "high", "verdict", "words"),
    [
        (1.1, 1.3, "worth it", "sure to 95 %"),
        (0.9, 1.3, "too close to call", "unsure: the 95 % interval"),
        (0.7, 0.9, "not worth it", "sure to 95 %"),
        (1.0, 1.001, "not worth it", "sure to 95 %"),
    ],
)
def test_the_verdict_needs_the_whole_interval(low: float, high: float, verdict: str, words: str):
    """Catches a verdict by the middle of an interval, and one that does not say how sure it is."""
    found = made_up(low, high)
    assert advice.verdict(found) == verdict
    said = advice.sentences(found)
    assert said[0].startswith(verdict.capitalize())
    assert words in said[1]
    assert any("Until then" in sentence for sentence in said) == (verdict != "worth it")


def test_what_helps_most_comes_first_and_what_helps_little_is_left_out():
    """Catches advice on the wrong fault, and figures that are another's."""
    said = advice.sentences(made_up(1.1, 1.3))
    assert [sentence.partition(" decoding would be ")[0] for sentence in said[3:]] == [
        "With a draft that takes 0.05 of a target pass",
        "With 80 % acceptance",
    ][: len(said[3:])]
    assert "First of all, the draft is too slow." in advice.sentences(made_up(0.7, 0.9))
    assert "A draft token takes 0.30 of a target pass (c), one over 5 positions 1.50 times as long" in said[2]
    assert "accepts 60 % of what is drafted (by depth: 60, 60, 60, 60 %)" in said[2]
    assert "1.20 times [1.10, 1.30]" in said[0]
