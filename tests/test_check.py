"""The check of a pair: whether a bad pair is told so, whether its parts agree, and what is said when."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from specdecpp import Decoder, cli
from specdecpp.bench import check
from specdecpp.bench.check import Check, Trial
from specdecpp.bench.machines import Machine
from specdecpp.bench.questions import BUILT_IN, encoded
from specdecpp.bench.results import Row
from specdecpp.errors import RunnerError
from specdecpp.head import AcceptanceHead, Calibration, HeadCard
from specdecpp.loading.pair import Pair, load_pair
from specdecpp.policies import Costs, Fixed
from specdecpp.report import advice, render
from specdecpp.testing import TableModel, save_tiny_pair, tiny_model, tiny_tokenizer

SHORT = ("--max-tokens", "8", "--prompts", "4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pair with a calibrated head, and `bad`: a draft that is larger than the target and knows nothing of it."""
    folder = tmp_path_factory.mktemp("pair")
    save_tiny_pair(folder)
    torch.manual_seed(0)
    card = HeadCard(hidden_size=32, num_layers=1, calibration=Calibration(num_labels=9))
    AcceptanceHead(card).save_pretrained(folder / "head")
    tiny_model("llama", seed=9, layers=8, hidden_size=64).save_pretrained(folder / "bad")
    tiny_tokenizer().save_pretrained(folder / "bad")
    return folder


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    return load_pair(folder / "target", draft=folder / "draft", head=folder / "head")


@pytest.fixture(scope="module")
def found(pair: Pair) -> tuple[Check, list[str]]:
    """A real check, and the steps it told of."""
    told: list[str] = []
    sets = [encoded(pair, BUILT_IN, num_dev=2, num_test=3)]
    return check.check(pair, sets, Trial(max_tokens=12, num_timed=4), tick=told.append), told


def call(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(cli.app, ["check", *arguments])


# A real pair


def test_the_parts_of_a_check_agree(found: tuple[Check, list[str]]):
    """Catches a prediction on the wrong costs, a limit that a rule passes, and a step that is not told of."""
    checked, told = found
    assert told == list(check.STEPS)
    assert 0 < checked.acceptance < 1
    assert checked.best.speedup <= checked.limit
    target = next(row for row in checked.rows if row.role == "target")
    assert target.tokens_per_second == pytest.approx(1 / checked.costs.verify_s(1))
    assert checked.best.tokens_per_second == pytest.approx(checked.best.speedup / checked.costs.verify_s(1))
    assert checked.machine.head_s > 0
    assert checked.measured > 0
    assert sum(checked.time_shares.values()) == pytest.approx(1)
    roles = {row.role for row in checked.rows}
    assert {"target", "fixed", "free", "specdecpp", "cost_aware", "oracle"} <= roles
    assert {"acceptance", "verification", "head"} <= set(checked.what_if) | (
        {"acceptance"} if checked.acceptance >= 0.8 else set()
    )


def test_a_pair_without_faults_is_no_slower(found: tuple[Check, list[str]]):
    """Catches a what-if that replays on the wrong machine: curing a fault cannot slow the best rule down by more than the
    choice of settings on a few answers."""
    checked = found[0]
    assert "verification" in checked.what_if, "the one fault that every machine is taken to have"
    for name in {"draft", "verification", "head"} & set(checked.what_if):
        assert checked.what_if[name] > 0.9 * checked.best.speedup, name


def test_a_check_teaches_the_requests_that_follow(found: tuple[Check, list[str]], pair: Pair):
    """Catches a check whose rounds nobody remembers, and one that teaches requests with a seed or of another sampling."""
    assert found
    taught = [Decoder(pair).start("3 + 4 =", temperature=t)._memory.acceptance_before for t in (1.0, 0.5)]
    assert taught[0] is not None
    assert taught[1] is None
    assert Decoder(pair).start("3 + 4 =", temperature=1.0, seed=1)._memory.acceptance_before is None


def test_a_bad_pair_is_told_so(folder: Path):
    """Catches a check that recommends a draft which is dearer than the target and is mostly rejected."""
    result = call(str(folder / "target"), "--draft", str(folder / "bad"), *SHORT)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "Not worth it: " in text
    assert "First of all, " in text
    assert "Until then use the target alone" in text
    assert "no rule is faster than the target alone" in text
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_json_is_one_line_with_everything(folder: Path):
    """Catches text that gets into the JSON, and a figure that is only in the sentences."""
    names = [str(folder / "target"), "--draft", str(folder / "draft"), "--head", str(folder / "head")]
    result = call(*names, *SHORT, "--json")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    assert {line.split(":")[0].strip() for line in result.stderr.splitlines()} <= {"checking"}
    said = json.loads(result.stdout)
    assert said["verdict"] in ("worth it", "not worth it", "too close to call")
    assert said["c"] == pytest.approx(said["costs"]["draft_s"] / said["costs"]["passes"]["1"])
    assert {"sentences", "acceptance", "policy", "speedup", "speedup_interval", "limit", "what_if", "measured", "rows"} <= set(
        said
    )


def test_what_is_being_done_is_told_while_it_takes(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Catches minutes of silence on a large pair: every step says that it has begun, and the long ones how far they are."""
    sets = [encoded(pair, BUILT_IN, num_dev=1, num_test=1)]
    doing: list[str] = []
    check.check(pair, sets, Trial(max_tokens=8, num_timed=1), tell=doing.append)
    assert list(dict.fromkeys(what.partition(":")[0] for what in doing)) == list(check.STEPS)
    assert f"{check.STEPS[2]}: 4 of 4 answers" in doing
    assert f"{check.STEPS[4]}: 4 of 4 answers" in doing
    monkeypatch.setattr(render, "LINE_S", 0.0)
    with render.stages("checking", 2) as (tick, tell):
        tell("answers: 0")
        tell("answers: 8")
        monkeypatch.setattr(render, "LINE_S", 60.0)
        tick("answers")
    with render.stages("checking", 2) as (_, tell):
        for what in ("labels: 0", "labels: 1", "labels: 2", "the rest: 0"):
            tell(what)
    lines = [line.strip() for line in capsys.readouterr().err.splitlines()]
    assert lines == ["checking: answers: 0", "checking: answers: 8", "checking: labels: 0", "checking: the rest: 0"]


def test_prompts_of_a_file_are_used(folder: Path, tmp_path: Path):
    """Catches --data that does not arrive."""
    path = tmp_path / "asked.jsonl"
    path.write_text("".join(json.dumps({"q": f"what is {i}"}) + "\n" for i in range(40)), encoding="utf-8")
    names = [str(folder / "target"), "--draft", str(folder / "draft")]
    said = json.loads(call(*names, *SHORT, "--data", str(path), "--prompt", "field:q", "--json").stdout)
    assert {row["dataset"] for row in said["rows"]} == {"asked"}
    assert {row["num_prompts"] for row in said["rows"]} == {4}


def test_settings_are_chosen_on_other_answers_than_those_that_are_measured(pair: Pair):
    """Catches a prediction that is tuned on itself."""
    recording = check.record(pair, "toy", [(3, 4, 5), (6, 7)], Trial(max_tokens=12), tick=lambda step: None)
    assert (len(recording.dev), len(recording.test)) == (2, 2)
    texts = [[tuple(t.tokens[:, 0].tolist()) for t in side] for side in (recording.dev, recording.test)]
    assert texts[0] != texts[1]
    assert recording.longest == check.BRANCH


def test_models_that_cannot_run_in_batches_are_refused(pair: Pair):
    """Catches a traceback for runners of one's own."""
    table = TableModel.random(vocab_size=3, depth=1, seed=0)
    own = Pair(target=table, draft=table.fresh(), tokenizer=pair.tokenizer)
    with pytest.raises(RunnerError, match="EagerRunner"):
        check.record(own, "toy", [(1, 2)], Trial(), tick=lambda step: None)


# Machines and formulas


def test_each_other_machine_lacks_one_fault():
    """Catches a cure that changes two things, or nothing."""
    here = Machine(name="measured", costs=Costs(draft_s=0.3, passes={1: 1.0, 5: 2.0}, head_s=0.1))
    others = check.others(here)
    assert set(others) == {"draft", "verification", "head"}
    assert others["draft"].costs == Costs(draft_s=0.05, passes={1: 1.0, 5: 2.0}, head_s=0.1)
    assert others["verification"].costs == Costs(draft_s=0.3, passes={1: 1.0}, head_s=0.1)
    assert others["head"].costs == Costs(draft_s=0.3, passes={1: 1.0, 5: 2.0})
    assert "draft" not in check.others(Machine(name="x", costs=Costs.relative(0.04)))
    assert "head" not in check.others(Machine(name="x", costs=Costs.relative(0.04)))


def test_the_chain_formula():
    """Catches an exponent or a width that is off by one: two candidates at 0.8 give 1 + 0.8 + 0.64 tokens."""
    costs = Costs(draft_s=0.2, passes={1: 2.0, 3: 2.2, 4: 50.0})
    speeds = [2.0 * sum(0.8**j for j in range(k + 1)) / (0.2 * k + costs.verify_s(k + 1)) for k in range(21)]
    assert check.chain_speedup(costs, 0.8) == pytest.approx(max(speeds))
    assert int(np.argmax(speeds)) == 2
    assert speeds[2] == pytest.approx(2 * 2.44 / 2.6)


# Words


def row(role: str, speed: float, interval: tuple[float, float] | None, **more: Any) -> Row:
    values: dict[str, Any] = {
        "dataset": "toy",
        "temperature": 1.0,
        "verification": "token",
        "role": role,
        "policy": role,
        "label": role,
        "chosen": role != "oracle",
        "tokens_per_second": speed,
        "speedup": speed,
        "speedup_interval": interval,
        "gain_over_best_fixed": None,
        "gain_interval": None,
        "mean_acceptance_length": 2.0,
        "discard_rate": 0.5,
        "verification_rate": 0.5,
        "share_of_headroom": {},
        "time_shares": None,
        "drafted_histogram": {},
        "num_prompts": 4,
        "num_tokens": 100,
    }
    return Row(**values | more)


def made_up(low: float, high: float, **more: Any) -> Check:
    """A check whose best rule, fixed K, is predicted between two bounds."""
    middle = (low + high) / 2
    rows = (row("target", 1.0, None), row("fixed", middle, (low, high)), row("oracle", 2 * middle, None, policy="hindsight"))
    values: dict[str, Any] = {
        "machine": Machine(name="measured", costs=Costs(draft_s=0.3, passes={1: 1.0, 5: 1.5}, head_s=0.001)),
        "acceptance": 0.6,
        "rows": rows,
        "what_if": {"draft": 1.02 * middle, "verification": 3.0, "head": middle, "acceptance": 2.5},
        "measured": middle,
        "measured_interval": (low, high),
        "time_shares": {"draft": 0.4, "verify": 0.5, "head": 0.0, "other": 0.1},
    }
    return Check(**values | more)


@pytest.mark.parametrize(
    ("low", "high", "measured", "verdict"),
    [
        (1.1, 1.3, (1.0, 1.4), "worth it"),
        (0.9, 1.3, (1.0, 1.4), "too close to call"),
        (0.7, 0.9, (1.0, 1.4), "not worth it"),
        (1.0, 1.001, (0.9, 1.1), "not worth it"),
        (1.1, 1.3, (0.5, 0.8), "too close to call"),
        (1.1, 1.3, None, "worth it"),
    ],
)
def test_the_verdict_needs_the_whole_interval(low: float, high: float, measured: tuple[float, float] | None, verdict: str):
    """Catches a verdict by the middle of an interval, and one that stands although the clock has seen otherwise."""
    checked = made_up(low, high, measured_interval=measured)
    assert advice.verdict(checked) == verdict
    said = advice.sentences(checked)
    assert said[0].startswith(verdict.capitalize())
    assert any("Until then" in sentence for sentence in said) == (verdict != "worth it")


def test_what_helps_most_comes_first_and_what_helps_little_is_left_out():
    """Catches advice on the wrong fault: a draft that is cheap enough, a head that takes no time."""
    said = advice.sentences(made_up(1.1, 1.3))
    assert [sentence.partition(" it would be ")[0] for sentence in said[3:]] == [
        "With wide passes as quick as narrow ones",
        "With 80 % acceptance and a fixed K",
    ]
    assert "First of all, verification is not flat." in advice.sentences(made_up(0.7, 0.9))
    assert "A candidate takes 0.30 of a target pass (c), one over 5 positions 1.50 times as long" in said[1]
    assert "accepts 60 %" in said[1]
    assert "1.20 times [1.10, 1.30]" in said[0]
    assert "better than 2.40 times" in said[0]


def test_time_lost_outside_the_passes_is_told():
    """Catches a prediction that is left to stand alone where the clock is far from it, and an alarm for noise."""
    slower = made_up(1.4, 1.6, measured=1.1, measured_interval=(1.0, 1.2))
    assert "less than its passes alone allow" in advice.sentences(slower)[2]
    noisy = replace(slower, measured=1.3, measured_interval=(0.9, 1.7))
    assert "less than" not in advice.sentences(noisy)[2]


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["TARGET"], 2, "--target and --draft go together"),
        (["TARGET", "--draft", "/nowhere"], 1, "there is no folder /nowhere"),
        (["--max-tokens", "2"], 2, "at least 8 tokens"),
        (["--temperature", "-1"], 2, "temperature must be a finite number"),
        (["--data", "./nowhere.jsonl"], 1, "there is no file ./nowhere.jsonl"),
        (["--prompts", "1"], 2, "greater than or equal to 2"),
    ],
)
def test_bad_usage_is_told_in_a_line(folder: Path, options: list[str], code: int, words: str):
    """Catches a value that runs into a traceback, or a refusal that does not say what is wrong."""
    result = call(*[str(folder / "target") if option == "TARGET" else option for option in options])
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert words in result.stderr


def test_the_real_run_compares_with_the_target_alone(pair: Pair):
    """Catches the two sides of the ratio swapped, and a rule that is not the one that was asked for."""
    machine = Machine(name="x", costs=Costs.relative(0.2))
    alone, own = check.decoded(pair, [(3, 4, 5), (6, 7)], Fixed(k=3), machine, Trial(max_tokens=10))
    assert (alone.num_drafted, set(alone.drafted_histogram)) == (0, {0})
    assert own.num_drafted > 0
    assert max(own.drafted_histogram) == 3
