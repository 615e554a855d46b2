"""The demo: a live answer, and a bench with a fixed plan."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import call, named, save_head

from specdecpp.bench.results import Results
from specdecpp.cli import demo
from specdecpp.cli.common import PairNames
from specdecpp.loading import shipped
from specdecpp.loading.pair import load_pair
from specdecpp.policies import CostAware, SpecDecPP


@pytest.fixture(scope="module", autouse=True)
def few_tokens() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "MAX_TOKENS", 12)
        yield


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    save_head(folder, stopping={"threshold": 0.6})
    return folder


def test_the_result_is_that_of_a_bench_and_the_text_goes_to_stderr_under_json(folder: Path, tmp_path: Path):
    """Catches a demo with figures of its own, a plan that does not arrive, and text that gets into the JSON."""
    spoken = call("demo", *named(folder, has_head=True), "--num", 2, "--cycles", 1, "--json")
    assert spoken.exit_code == 0, spoken.output
    assert spoken.stdout.count("\n") == 1
    (tmp_path / "r.json").write_text(spoken.stdout)
    found = Results.read(tmp_path / "r.json")
    assert [row.role for row in found.rows] == ["target", "fixed", "free", "specdecpp", "cost_aware"]
    assert {(row.temperature, row.verification, row.num_prompts) for row in found.rows} == {(1.0, "token", 2)}
    assert {(row.speedup_interval, row.gain_interval) for row in found.rows} == {(None, None)}, "two prompts are too few"
    plan = found.provenance["plan"]
    assert (plan["num_dev"], plan["num_test"], plan["num_cycles"], plan["max_tokens"]) == (3, 2, 1, 12)
    assert "Ana has" in spoken.stderr
    assert len(re.findall(r"accepted \d+   correction \d+   bonus \d+", spoken.stderr)) == 2


def test_the_contestants_are_the_ones_promised(folder: Path):
    """Catches a threshold of the head's card that is not used, and a demo that fails without a head or lacks the default."""
    head = load_pair(folder / "target", draft=folder / "draft", head=folder / "head").head
    assert head is not None
    with_head, without = ([rule.settings for rule in demo.field(of)] for of in (head, None))
    assert with_head[2:] == [(SpecDecPP.tuned(head),), (CostAware(),)]
    assert without == [*with_head[:2], (CostAware(),)]
    assert [*demo.field(load_pair("reference").head)][3].settings == (CostAware(),), "the default asks no head that ships"


def usual(**names: str) -> str | None:
    none = dict.fromkeys(("target", "draft", "head", "device", "backend"))
    return PairNames(**none | names, dtype="auto", copies=False).usual


def test_the_usual_pair_is_the_real_one_where_it_can_be_had(monkeypatch: pytest.MonkeyPatch):
    """Catches a demo of the reference pair beside an installed SmolLM2, and one that needs it."""
    assert usual() == "reference"
    assert "SmolLM2 is not installed" in call("demo", "--num", 1, "--cycles", 1).stderr
    monkeypatch.setattr(shipped, "_packaged", lambda: Path("SmolLM2.gguf"))
    assert usual() == "smollm2"
    assert usual(head="head") == "reference"
    assert usual(target="target", draft="draft") == "target"
