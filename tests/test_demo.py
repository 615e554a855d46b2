"""The demo: whether its comparison is fair, its numbers agree with each other, and it says plainly when it loses."""

import io
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from specdecpp import cli, demo
from specdecpp.decoder import Decoder
from specdecpp.demo import Comparison, DemoEntry, DemoPlan
from specdecpp.head import AcceptanceHead, HeadCard
from specdecpp.loading.pair import Pair, load_pair
from specdecpp.metrics import Metrics
from specdecpp.policies import CostAware, CumulativeConfidence, Fixed, Policy, SpecDecPP
from specdecpp.report import render
from specdecpp.sampling import Sampling
from specdecpp.testing import save_tiny_pair

PROMISED = {"tokens_per_second", "speedup", "mean_acceptance_length", "discard_rate", "verification_rate"}
RIVALS: dict[str, Policy] = {"fixed": Fixed(k=3), "cumulative": CumulativeConfidence(threshold=0.1)}
SHORT = ["--max-tokens", "12", "--num", "2", "--cycles", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_tiny_pair(folder)
    torch.manual_seed(0)
    AcceptanceHead(HeadCard(hidden_size=32, num_layers=1, stopping={"threshold": 0.6})).save_pretrained(folder / "head")
    return folder


@pytest.fixture(scope="module")
def names(folder: Path) -> list[str]:
    return ["--target", str(folder / "target"), "--draft", str(folder / "draft"), "--head", str(folder / "head")]


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    return load_pair(folder / "target", draft=folder / "draft", head=folder / "head")


def call(*arguments: str) -> Result:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(cli.app, ["demo", *arguments])
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def spoken(names: list[str]) -> Result:
    """One demo under --json: what a script reads on stdout, what a person reads on stderr."""
    return call(*names, *SHORT, "--json")


# Numbers


def test_json_is_one_line_of_the_promised_shape(spoken: Result):
    """Catches text that gets into the JSON, and a policy or figure that has lost its name."""
    assert spoken.stdout.count("\n") == 1
    policies = json.loads(spoken.stdout)["policies"]
    assert set(policies) == {"target", "fixed", "cumulative", "specdecpp", "cost_aware"}
    assert all(set(figures) >= PROMISED for figures in policies.values())
    assert policies["fixed"]["k"] in range(1, 9)


def test_the_numbers_agree_with_each_other(spoken: Result):
    """Catches a speed-up against the wrong base, a target that drafts, and shares that do not add up."""
    policies = json.loads(spoken.stdout)["policies"]
    target = policies["target"]
    assert (target["speedup"], target["verification_rate"], target["discard_rate"]) == (1.0, 1.0, 0.0)
    assert target["mean_acceptance_length"] == 1.0
    for figures in policies.values():
        assert figures["speedup"] == pytest.approx(figures["tokens_per_second"] / target["tokens_per_second"])
        assert figures["tokens_per_second"] == pytest.approx(figures["num_tokens"] / figures["elapsed_s"])
        assert sum(figures["time_shares"].values()) == pytest.approx(1)
        assert figures["verification_rate"] <= 1 <= figures["mean_acceptance_length"]


def test_greedy_answers_are_equally_long_under_every_policy(names: list[str]):
    """Catches a policy that is given other prompts, another length or other sampling than the rest."""
    result = call(*names, *SHORT, "--json", "--quiet", "--temperature", "0")
    assert result.stderr == ""
    assert len({figures["num_tokens"] for figures in json.loads(result.stdout)["policies"].values()}) == 1


# Fairness


class Recorder(Decoder):
    """Stands in for the decoder: notes who was asked what, and answers at a speed of its own."""

    asked: list[tuple[Policy, str, dict]]

    def __init__(self, pair: Pair, *, policy: Policy, reuses: bool = True):
        self.policy, self.reuses = policy, reuses

    def generate(self, prompt: str, **options: int | float) -> object:
        Recorder.asked.append((self.policy, prompt, options))
        assert self.reuses == (options.get("max_tokens") == 16)  # the warm-up: else what one rule reads is free for the next
        k = self.policy.limit(None)
        return type("Answer", (), {"metrics": metrics(seconds=1 + abs(k - 5))})()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Policy, str, dict]]:
    monkeypatch.setattr(demo, "Decoder", Recorder)
    Recorder.asked = []
    return Recorder.asked


def test_policies_take_turns_on_the_same_prompts_and_seeds(pair: Pair, asked: list[tuple[Policy, str, dict]]):
    """Catches a policy that always runs first, or that is spared a prompt, a seed or a token."""
    policies = demo.contestants(pair, RIVALS)
    told: list[str] = []
    demo.compare(pair, policies, DemoPlan(num_prompts=3, num_cycles=2, max_tokens=9, seed=7), told.append)
    assert len(asked) == len(told) == 5 * 3 * 2
    blocks = [asked[i : i + 5] for i in range(0, len(asked), 5)]
    for block in blocks:
        assert len({id(policy) for policy, _, _ in block}) == 5
        assert all((prompt, options) == block[0][1:] for _, prompt, options in block)
    assert {block[0][0] for block in blocks} == set(policies.values())
    assert [block[0][1] for block in blocks] == [*demo.PROMPTS[:3]] * 2
    assert len({block[0][2]["seed"] for block in blocks}) == 6
    assert asked[0][2] == {"max_tokens": 9, "sampling": Sampling(), "seed": 7}


def test_the_rivals_are_tuned_on_prompts_of_their_own(pair: Pair, asked: list[tuple[Policy, str, dict]]):
    """Catches the slowest setting, one that is never tried, and one tuned on the prompts it is judged by."""
    told: list[str] = []
    assert demo.tuned_rivals(pair, DemoPlan(), told.append)["fixed"] == Fixed(k=5)
    assert len(told) == DemoPlan().num_dev_runs
    assert {policy for policy, _, _ in asked} == {*demo.RIVALS["fixed"], *demo.RIVALS["cumulative"]}
    assert not {prompt for _, prompt, _ in asked} & set(demo.PROMPTS)


def test_the_contestants_are_the_ones_promised(pair: Pair, folder: Path):
    """Catches a threshold of the head's card that is not used, a demo that fails without a head, or lacks the default rule."""
    policies = demo.contestants(pair, RIVALS)
    assert pair.head is not None
    assert policies == {
        "target": Fixed(k=0),
        **RIVALS,
        "specdecpp": SpecDecPP(head=pair.head, threshold=0.6),
        "cost_aware": CostAware(),
    }
    headless = load_pair(folder / "target", draft=folder / "draft")
    assert demo.contestants(headless, RIVALS) == {"target": Fixed(k=0), **RIVALS, "cost_aware": CostAware()}


@pytest.mark.parametrize(
    "wrong", [{"num_prompts": 0}, {"num_prompts": 5}, {"num_cycles": 0}, {"max_tokens": 1}, {"temperature": -1.0}]
)
def test_a_plan_that_cannot_be_run_is_refused(wrong: dict):
    """Catches a demo that divides by zero after half a minute."""
    with pytest.raises(ValueError, match="got"):
        DemoPlan(**wrong)


# What is said


def metrics(*, seconds: float, tokens: int = 100) -> Metrics:
    """A run with a third of its time in the draft."""
    return Metrics(
        num_tokens=tokens,
        num_spec_steps=40,
        num_draft_tokens=90,
        num_accepted_draft_tokens=60,
        draft_s=seconds / 3,
        verify_s=seconds / 2,
        prefill_s=seconds / 6,
    )


def comparison(**seconds: Iterable[float]) -> Comparison:
    """A comparison whose runs took these seconds for 100 tokens each."""
    labels = {
        "target": "target alone",
        "fixed": "fixed K = 3",
        "cumulative": "cumulative 0.2",
        "specdecpp": "SpecDec++ 0.7",
        "cost_aware": "cost-aware",
    }
    entries = {
        name: DemoEntry(name=name, label=labels[name], policy=Fixed(k=3), runs=tuple(metrics(seconds=s) for s in of))
        for name, of in seconds.items()
    }
    return Comparison(plan=DemoPlan(), entries=entries)


def test_losing_is_said_plainly():
    """Catches a sentence that turns a loss into a win, and one about a rival that is left out."""
    times = {"target": [1.0] * 6, "fixed": [1.25] * 6, "cumulative": [0.5] * 6, "specdecpp": [2.0] * 6}
    said = demo.verdicts(comparison(**times))
    assert said == [
        "On this machine SpecDec++ is 50 % slower than the target alone (± 0.0 %).",
        "It is 38 % slower than the best fixed K (± 0.0 %).",
        "It is 75 % slower than cumulative confidence (± 0.0 %).",
        "The best fixed K is 20 % slower than the target alone (± 0.0 %).",
    ]
    won = demo.verdicts(comparison(**{**times, "specdecpp": [0.4] * 6}))
    assert won[0] == "On this machine SpecDec++ is 150 % faster than the target alone (± 0.0 %)."


def test_a_pair_that_does_not_pay_is_said():
    """Catches a demo that ends on a rule of ours being the best of those that all lose, and one that says so when one wins."""
    slow = {"target": [1.0] * 4, "fixed": [1.5] * 4, "cumulative": [1.4] * 4, "specdecpp": [1.2] * 4, "cost_aware": [1.1] * 4}
    said = demo.verdicts(comparison(**slow))
    assert sum("does not pay" in sentence for sentence in said) == 1
    assert any(sentence.startswith("The rule without a threshold is") and "slower" in sentence for sentence in said)
    assert not any("does not pay" in sentence for sentence in demo.verdicts(comparison(**slow | {"fixed": [0.9] * 4})))


def test_the_usual_pair_is_the_real_one_where_it_can_be_had(monkeypatch: pytest.MonkeyPatch, names: list[str]):
    """Catches a demo of the reference pair beside an installed SmolLM2, one that needs it, and a plan of the other pair."""
    from specdecpp.cli import common
    from specdecpp.loading import shipped

    assert common.usual(None, None, None) == "reference"
    assert "SmolLM2 is not installed" in call("--num", "1", "--cycles", "1", "--max-tokens", "2").stderr
    monkeypatch.setattr(shipped, "_packaged", lambda: Path("SmolLM2.gguf"))
    assert common.usual(None, None, None) == "smollm2"
    assert common.usual(None, None, "head") == "reference"
    assert common.usual("target", "draft", None) == "target"
    plan = DemoPlan.usual("smollm2", seed=3, max_tokens=None)
    assert (plan.temperature, plan.top_p, plan.num_cycles, plan.seed) == (0.7, 0.9, 1, 3)
    assert DemoPlan.usual("smollm2", temperature=0.0, top_p=1.0).temperature == 0.0
    assert DemoPlan.usual(names[1]) == DemoPlan.usual("reference") == DemoPlan()
    assert "SmolLM2 is not installed" not in call(*names, *SHORT).stderr


def test_top_p_reaches_every_answer(pair: Pair, asked: list[tuple[Policy, str, dict]]):
    """Catches rivals that are tuned, or compared, under other sampling than is shown."""
    plan = DemoPlan(num_prompts=1, num_cycles=1, max_tokens=4, top_p=0.9, is_short=True)
    demo.compare(pair, {"target": Fixed(k=0), **demo.tuned_rivals(pair, plan)}, plan)
    assert {options.get("top_p", 0.9) for _, _, options in asked} == {0.9}
    assert "top_p 0.9" in demo.conditions(plan)


def test_a_difference_within_the_noise_is_called_that():
    """Catches a victory by luck that is announced as one."""
    target = [1.0, 1.1, 0.9, 1.05, 0.95, 1.0]
    noisy = comparison(target=target, fixed=target, cumulative=target, specdecpp=[0.9, 1.0, 1.0, 0.8, 1.2, 0.95])
    assert "too close to call" in demo.verdicts(noisy)[0]
    once = comparison(target=[1.0], fixed=[1.0], cumulative=[1.0], specdecpp=[0.5])
    assert demo.verdicts(once)[0] == ("On this machine SpecDec++ is 100 % faster than the target alone: too close to call.")
    assert demo.verdicts(once)[1].startswith("It is 100 % faster")


def test_a_pair_without_a_head_is_told_so():
    """Catches a demo that silently leaves its main character out."""
    said = demo.verdicts(comparison(target=[1.0] * 4, fixed=[0.5] * 4, cumulative=[0.4] * 4))
    assert said[0].startswith("On this machine cumulative confidence is 150 % faster than the target alone")
    assert "name one with --head" in said[-1]


def test_ratios_pool_before_they_divide():
    """Catches a mean of ratios, an error that ignores the pairing, and one that is not that of the logarithm."""
    slow, fast = [1.0, 4.0, 2.0, 3.0], [0.5, 2.0, 1.0, 1.5]
    paired = comparison(target=slow, fixed=fast)
    ratio = paired.ratio("fixed")
    assert ratio.value == pytest.approx(2)
    assert ratio.error == pytest.approx(0, abs=1e-12)
    other = comparison(target=slow, fixed=[0.5, 2.5, 1.0, 1.0]).ratio("fixed")
    left_out = [math.log((10 - s) / (5 - f)) for s, f in zip(slow, [0.5, 2.5, 1.0, 1.0], strict=True)]
    mean = sum(left_out) / 4
    assert other.value == pytest.approx(2)
    assert other.error == pytest.approx(math.sqrt(3 / 4 * sum((x - mean) ** 2 for x in left_out)))


# What is shown


def view(compared: Comparison, *, encoding: str = "utf-8", **options: bool) -> str:
    """The comparison on 80 columns."""
    raw = io.BytesIO()
    out = Console(file=io.TextIOWrapper(raw, encoding=encoding, errors="replace"), width=80, **options)
    out.print(render.comparison_table(compared))
    out.file.flush()
    return raw.getvalue().decode(encoding)


def test_the_table_is_aligned_complete_and_80_columns_wide():
    """Catches a column that is cut to fit, numerals that do not stand under each other, and a missing unit."""
    text = view(comparison(target=[1.0] * 4, fixed=[0.07] * 4, cumulative=[0.4] * 4, specdecpp=[1.5] * 4))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in text
    rows = [line for line in lines if re.match(r"(target alone|fixed K|cumulative|SpecDec)", line)]
    assert len(rows) == 4
    assert len({row.rindex(".") for row in rows[:4]}) == 1
    for unit in ("tokens", "/s", "/token"):
        assert unit in text
    assert "\x1b" not in text


def test_the_live_text_has_its_legend_and_tally(names: list[str]):
    """Catches a legend that does not reach the reader, escape codes without a terminal, and lines that are too long."""
    source = str(Path(demo.__file__).parents[1])
    env = {**os.environ, "NO_COLOR": "1", "COLUMNS": "80", "PYTHONPATH": source, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-m", "specdecpp", "demo", *names, *SHORT], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert len(re.findall(r"accepted \d+   correction \d+   bonus \d+", done.stdout)) == 2
    assert "Mara bakes 24 muffins" in done.stdout
    assert re.search(r"On this machine SpecDec\+\+ is (as fast as|[\d.]+ % (faster|slower) than) the target alone", done.stdout)


def test_quiet_leaves_the_result_only(names: list[str]):
    """Catches live text or progress in a run that asked for none."""
    result = call(*names, "--max-tokens", "4", "--num", "1", "--cycles", "1", "--quiet")
    assert result.stderr == ""
    assert "Mara" not in result.stdout
    assert "On this machine SpecDec++ is" in result.stdout


def test_the_text_goes_to_stderr_under_json(spoken: Result):
    """Catches a demo whose table is lost when its numbers are asked for."""
    assert "Mara bakes 24 muffins" in spoken.stderr
    assert "On this machine SpecDec++ is" in spoken.stderr
