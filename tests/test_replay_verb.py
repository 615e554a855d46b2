"""The bench in replay: settings chosen on one split, measured on another, at any costs; and the verb."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import call, refused
from distributions import unchecked
from records import Process, knowing_head, records, save

from specdecpp.bench import replays
from specdecpp.bench.contestants import Contender, default_field, fixed_rule
from specdecpp.bench.replays import Stage, recorded
from specdecpp.bench.results import Machine, Results, Row
from specdecpp.errors import DataError
from specdecpp.head import AcceptanceHead, Calibration
from specdecpp.policies import Costs, CumulativeConfidence, Fixed, Policy, SpecDecPP
from specdecpp.replay.replay import replay

EASY = Process.random(6, seed=1, noise=0.4)
HARD = Process.random(6, seed=2, noise=2.5)
ABOUT: dict[str, Any] = {
    "pair": {"ends": []},
    "collect": {"max_tokens": 30},
    "sampling": {"temperature": 1.0},
    "digest": "abc",
    "names": {"target": "/somewhere/far/target", "draft": "draft"},
}
PAPER = Machine.relative(0.22)


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Development answers of an easy process, test answers of an easy and of a hard one."""
    made = [
        *records(EASY, 6, num_tokens=30, seed=1, split="dev", source="easy"),
        *records(EASY, 6, num_tokens=30, seed=2, split="test", source="easy"),
        *records(HARD, 6, num_tokens=30, seed=3, split="test", source="hard"),
    ]
    return save(tmp_path_factory.mktemp("made") / "labels", made, **ABOUT)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that knows the easy process."""
    folder = tmp_path_factory.mktemp("heads") / "knowing"
    knowing_head(EASY, calibration=Calibration(num_labels=5)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def stage(labels: Path, head: Path) -> Stage:
    own = AcceptanceHead.from_pretrained(head)
    return Stage(recorded(labels, {"knowing": own}), default_field([own]), repeats=2)


@pytest.fixture(scope="module")
def table(stage: Stage) -> tuple[Row, ...]:
    with unchecked():
        return stage.rows(PAPER)


def by_label(rows: tuple[Row, ...], dataset: str) -> dict[str, Row]:
    return {row.label: row for row in rows if row.dataset == dataset}


# The table


def test_settings_are_chosen_on_the_development_split(stage: Stage, table: tuple[Row, ...]):
    """Catches a K that is picked on the answers it is measured on: the hard test answers would have chosen another."""
    dev = {k: replay(stage.recording.dev, Fixed(k=k), PAPER.costs, repeats=2, max_tokens=10) for k in range(1, 11)}
    best = max(dev, key=lambda k: dev[k].tokens_per_second)
    for dataset in ("easy", "hard"):
        fixed = [row for row in table if row.role == "fixed" and row.dataset == dataset]
        assert [row.policy for row in fixed if row.chosen] == [f"fixed:{best}"]
        assert {row.policy for row in fixed} == {f"fixed:{k}" for k in range(1, 11)}
    hard = {row.policy: row.tokens_per_second for row in table if row.role == "fixed" and row.dataset == "hard"}
    assert max(hard, key=lambda policy: hard[policy]) != f"fixed:{best}", "the case tells the two apart"


def test_rows_are_those_of_replay(stage: Stage, table: tuple[Row, ...]):
    """Catches a row that is made of another data set, other costs, or another policy."""
    traces = [t for t in stage.recording.test if t.source == "hard"]
    found = replay(traces, CumulativeConfidence(threshold=0.2), PAPER.costs, repeats=2, max_tokens=10)
    row = by_label(table, "hard")["cumulative 0.2"]
    assert row.tokens_per_second == pytest.approx(found.tokens_per_second)
    assert row.speedup == pytest.approx(found.speed_up)
    assert row.discard_rate == pytest.approx(found.discard_rate)
    assert row.verification_rate == pytest.approx(found.verification_rate)
    assert row.num_tokens == found.tokens.sum() / 2 == 180
    assert row.num_prompts == 6
    assert row.mean_acceptance_length == pytest.approx(1 + found.accepted.sum() / found.passes.sum())
    assert row.time_shares is not None
    assert sum(row.time_shares.values()) == pytest.approx(1)
    assert row.time_shares["draft"] == pytest.approx(0.22 * found.drafted.sum() / found.seconds.sum())


def test_headroom_goes_from_the_best_fixed_k_to_the_oracles(table: tuple[Row, ...]):
    """Catches a share against the wrong end, an oracle that a rule passes, and oracles that are missing."""
    for dataset in ("easy", "hard"):
        rows = by_label(table, dataset)
        hindsight, perfect = rows["hindsight"], rows["perfect probability"]
        assert "pre-sampling" in rows
        assert all(row.speedup <= hindsight.speedup + 1e-12 for row in rows.values())
        assert (hindsight.share_of_headroom["hindsight"], perfect.share_of_headroom["perfect"]) == (1, 1)
        fixed = next(row for row in rows.values() if row.role == "fixed" and row.chosen)
        assert fixed.share_of_headroom == {"hindsight": 0, "perfect": 0}
        ours = rows["cost-aware"]
        share = (ours.speedup - fixed.speedup) / (hindsight.speedup - fixed.speedup)
        assert ours.share_of_headroom["hindsight"] == pytest.approx(share)
        assert ours.gain_interval is not None
        assert ours.gain_over_best_fixed is not None
        assert ours.gain_interval[0] <= ours.gain_over_best_fixed <= ours.gain_interval[1]
        if dataset == "easy":
            assert ours.speedup > 0.97 * perfect.speedup, "the head knows this process"


def test_other_costs_choose_other_settings_and_replay_no_more_than_needed(labels: Path, monkeypatch: pytest.MonkeyPatch):
    """Catches a table at old costs, and a rule that never looks at costs being replayed again for each of them."""
    played: list[Policy] = []

    def counted(traces: Any, policy: Policy, *rest: Any, **options: Any) -> Any:
        played.append(policy)
        return replay(traces, policy, *rest, **options)

    monkeypatch.setattr(replays, "replay", counted)
    stage = Stage(recorded(labels, {}), default_field())
    cheap, dear = (stage.rows(Machine.relative(c)) for c in (0.02, 0.5))
    k = {
        name: next(r.policy for r in rows if r.role == "fixed" and r.chosen)
        for name, rows in (("cheap", cheap), ("dear", dear))
    }
    assert int(k["cheap"].removeprefix("fixed:")) > int(k["dear"].removeprefix("fixed:"))
    assert played.count(Fixed(k=3)) == 3, "once for development, once for each data set"
    speed = {c: by_label(rows, "easy")["fixed K = 3"].speedup for c, rows in ((0.02, cheap), (0.5, dear))}
    assert speed[0.02] > speed[0.5]


def test_a_replay_charges_a_head_to_the_rules_that_ask_it(stage: Stage):
    """Catches costs that a caller must have added up before a replay, and a head that is added twice where somebody has."""
    policy, costs = SpecDecPP(head=stage.recording.heads["knowing"]), Costs(draft_s=0.2, passes={1: 1.0}, head_s=0.1)
    for given in (costs, costs.with_head()):
        assert replay(stage.recording.dev, policy, given, max_tokens=10).costs == Costs(draft_s=0.2 + 0.1, passes={1: 1.0})
    assert replay(stage.recording.dev, Fixed(k=2), costs).costs == costs


def test_the_time_of_a_head_counts_where_it_is_known(stage: Stage):
    """Catches a head that is free on a machine where it was timed, and one that slows down rules without it."""
    own = stage.recording.heads["knowing"]
    rules = [Contender(role="fixed", settings=(Fixed(k=2),)), Contender(role="specdecpp", settings=(SpecDecPP(head=own),))]
    free, timed = (Stage(stage.recording, rules).rows(replace(PAPER, costs=replace(PAPER.costs, head_s=s))) for s in (0.0, 0.1))
    for before, after in zip(free, timed, strict=True):
        assert before.time_shares is not None
        assert after.time_shares is not None
        if before.role == "specdecpp":
            num = before.discard_rate + 1 - before.verification_rate
            assert 1 / after.tokens_per_second == pytest.approx(1 / before.tokens_per_second + 0.1 * num)
            assert after.time_shares["head"] == pytest.approx(0.1 * num * after.tokens_per_second)
        else:
            assert before == after


def test_steps_end_where_the_branches_do(labels: Path):
    """Catches a K of 15 that is replayed as one of 10 and shown as 15, and a bound that nobody is told of."""
    rules = [
        Contender(role="fixed", settings=(Fixed(k=8), Fixed(k=15))),
        Contender(role="free", settings=(CumulativeConfidence(threshold=0.0),)),
    ]
    stage = Stage(recorded(labels, {}), rules)
    rows = stage.rows(PAPER)
    assert [row.policy for row in rows if row.role == "fixed" and row.dataset == "easy"] == ["fixed:8"]
    whole = by_label(rows, "easy")["cumulative 0"]
    num_drafted = whole.discard_rate + 1 - whole.verification_rate
    assert 7 < num_drafted / whole.verification_rate <= 10
    assert any("branches have 10 tokens" in note for note in stage.notes)
    assert Stage(stage.recording, [Contender(role="fixed", settings=(Fixed(k=15),))]).rules == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_are_of_what_the_labels_know(tmp_path: Path, temperature: float):
    """Catches rows of temperature 0 that go by token verification, and an error, or a made-up figure, for collections that
    cannot know the perfect probability."""
    made = [*records(EASY, 2, num_tokens=30, seed=1, split="dev"), *records(EASY, 2, num_tokens=30, seed=2, split="test")]
    if temperature:
        bare = [replace(record.branches, log_ratio=None, overlap=None) for record in made if record.branches is not None]
        made = [replace(record, branches=branches) for record, branches in zip(made, bare, strict=True)]
    folder = save(tmp_path / "labels", made, **ABOUT | {"sampling": {"temperature": temperature}})
    rows = Stage(recorded(folder, {}), [fixed_rule()]).rows(PAPER)
    assert {(row.temperature, row.verification) for row in rows} == {(temperature, "token" if temperature else "greedy")}
    assert all(row.gain_over_best_fixed is not None for row in rows)
    if temperature:
        assert [row.policy for row in rows if row.role == "oracle"] == ["hindsight"]
        assert all(row.share_of_headroom["perfect"] is None for row in rows)


def test_both_splits_are_needed(tmp_path: Path):
    """Catches settings that are chosen on nothing."""
    folder = save(tmp_path / "labels", records(EASY, 2, num_tokens=30, seed=1, split="test"), **ABOUT)
    with pytest.raises(DataError, match="have no split dev, only test"):
        recorded(folder, {})


# Machines


def test_costs_come_from_a_file_of_their_own_or_from_results(tmp_path: Path):
    """Catches a costs file whose widths stay text, and results whose costs cannot be used again."""
    costs = {"draft_s": 0.02, "passes": {"1": 0.1, "5": 0.14}}
    path = tmp_path / "a100.json"
    path.write_text(json.dumps(costs), encoding="utf-8")
    machine = Machine.read(path)
    assert (machine.name, machine.costs) == ("a100", Costs(draft_s=0.02, passes={1: 0.1, 5: 0.14}))
    path.write_text(json.dumps({"kind": "bench", "costs": costs | {"name": "measured", "c": 0.2}}), encoding="utf-8")
    assert Machine.read(path).name == "measured"
    assert Machine.read(path).to_dict() == costs | {
        "name": "measured",
        "c": pytest.approx(0.2),
        "head_s": 0.0,
        "start_s": 0.0,
        "switch_s": 0.0,
    }
    wrong = ('{"draft_s": 1}', '{"draft_s": -1, "passes": {"1": 1}}', '{"draft_s": 1, "passes": {"x": 1}}')
    for text in ("{", "[]", '"x"', '{"costs": 3}', *wrong):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(DataError, match="does not hold costs"):
            Machine.read(path)
    with pytest.raises(DataError, match=r"does not hold costs \(No such file"):
        Machine.read(tmp_path / "missing.json")


# The verb


def test_the_table_at_given_costs(labels: Path, head: Path, tmp_path: Path):
    """Catches a head or costs that do not arrive, a file that is not where it was asked for, and JSON with text in it."""
    out = tmp_path / "r.json"
    options = ["--head", head, "--costs", 0.05, "--out", out, "--json", "--policy", "cumulative:0.2"]
    result = call("bench", "--replay", labels, *options, "--policy", "cost-aware", "--policy", "fixed:3")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    said = json.loads(result.stdout)
    assert Results.read(out).to_dict() == said
    assert (said["costs"]["name"], said["costs"]["c"]) == ("c = 0.05", 0.05)
    assert {r["role"] for r in said["rows"]} == {"target", "fixed", "free", "cost_aware", "oracle"}
    assert said["provenance"]["labels"]["names"] == {"target": "far/target", "draft": "draft"}
    assert str(tmp_path) not in json.dumps(said)
    again = call("bench", "--replay", str(labels), "--costs", str(out), "--policy", "heuristic")
    assert again.exit_code == 0, again.output
    assert max(map(len, again.stdout.splitlines())) <= 80
    assert "easy, T = 1" in again.stdout
    assert "hindsight" in again.stdout


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ("", 2, "--replay needs --costs"),
        ("--costs 0.2 --policy specdecpp:0.5", 2, "needs an acceptance head"),
        ("--costs 0.2 --policy max-confidence:drop=true", 2, "drops a draft token"),
        ("--costs 0.2 --head /nowhere", 1, "there is no head at"),
        ("--costs /nowhere.json", 1, "does not hold costs"),
        ("--costs -1", 2, "error: c, the time of a draft step"),
        ("--costs nan", 2, "must be finite and at least 0, got nan"),
        ("--costs 0.2 --target x", 2, "--target is for the clock"),
        ("--costs 0.2 --out .", 1, "is a folder"),
        ("--costs 0.2 --quick", 2, "--quick is for the clock"),
        ("--costs 0.2 --temperature 0", 2, "--temperature is for the clock"),
    ],
)
def test_bad_usage_is_told_in_a_line(labels: Path, options: str, code: int, words: str):
    """Catches a value that runs into a traceback, or a refusal that does not say what is wrong."""
    said = refused("bench", "--replay", labels, *options.split(), code=code)
    assert words in said
    assert said.count("\n") == 1


def test_labels_that_are_not_there_or_have_no_branches(tmp_path: Path):
    """Catches a traceback where a folder is missing, or where labels were collected without branches."""
    assert "holds no labels" in call("bench", "--replay", str(tmp_path / "nowhere"), "--costs", "0.2").stderr
    made = [*records(EASY, 1, num_tokens=9, seed=1, split="dev", branches=False)]
    folder = save(tmp_path / "labels", [*made, *records(EASY, 1, num_tokens=9, seed=1, split="test")], **ABOUT)
    result = call("bench", "--replay", str(folder), "--costs", "0.2")
    assert result.exit_code == 1
    assert "collect.branches" in result.stderr
