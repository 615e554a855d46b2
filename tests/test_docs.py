"""What the documentation says is run: every block of Python and every command of the README and of docs/.

Python is executed in order, one namespace a page; `specdecpp` runs in this process, in a folder of the page's own. What
stands for a name of the pages (TARGET, prompts.jsonl, ...) and what makes a command small is said here, in one place. Three
kinds of commands are checked without being run: `pip install` (its extras exist), `make` (its target does, by a dry run)
and `specdecpp serve` and `chat` (their options parse; both have tests of their own). A block that cannot run here says so.
"""

import contextlib
import doctest
import io
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
from doc_blocks import Block, blocks
from served import served
from typer.testing import CliRunner

import specdecpp
from specdecpp import cli
from specdecpp.bench.results import Results
from specdecpp.cli.common import POLICY_HELP
from specdecpp.costs import measuring
from specdecpp.loading import pair
from specdecpp.loading.pair import REFERENCE
from specdecpp.metrics import Metrics
from specdecpp.policy_spec import policy_names
from specdecpp.report.pictures import gallery
from specdecpp.report.tables import boards
from specdecpp.testing import practice_prompts
from specdecpp.training.prompts import split_of

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
REASONS = (
    "a GPU",
    "llama.cpp (run by tests/engines/gguf)",
    "two processes (run by tests/engines/tp)",
    "network",
    "two machines",
    "hours",
    "a quiet machine",
    "the engines' environments (make engines)",
)
TARGET, DRAFT, HEAD = (str(REFERENCE / name) for name in ("target", "draft", "head"))
STAND_INS = {
    "Qwen/Qwen3-8B": TARGET,
    "Qwen/Qwen3-0.6B": DRAFT,
    "models/Qwen3-0.6B": DRAFT,
    "TARGET": TARGET,
    "DRAFT": DRAFT,
    "HEAD": "head",
    "smollm2": "reference",
    "LABELS": "labels",
    "src/specdecpp/reference/head": HEAD,
}
"""Words of commands and names in recipes and in Python, and what stands for them. Files are made by `folder`."""
SMALL = {
    "generate": "--max-tokens 12",
    "demo": "--num 1 --cycles 1",
    "bench --replay": "--policy fixed:2 --policy cumulative:0.2",
    "bench": "--quick --num 4 --max-tokens 6 --temperature 0 --policy fixed:2 --policy cumulative:0.2",
    "check": "--minutes 0.02",
}
"""What is added to a verb's options, so that it is done in seconds; the last of two options counts."""
SHORT = {
    r"max_tokens: \d+": "max_tokens: 12",
    r"epochs: \d+": "epochs: 1",
    r"width: \d+": "width: 8",
    r"num_layers: \d": "num_layers: 1",
}
"""What makes a recipe small."""


@pytest.fixture(scope="module", autouse=True)
def one_pair() -> Iterator[None]:
    """The reference pair is loaded once for all pages and measured in a moment."""
    load = pair.load_pair
    kept, measure = cache(load), measuring.measure

    def load_pair(*names: Any, **options: Any) -> pair.Pair:
        given = [n for n in (*names, *options.values()) if isinstance(n, str | Path)]
        is_elsewhere = any(Path(n).exists() and not Path(n).is_absolute() for n in given)
        return (load if is_elsewhere else kept)(*names, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair, "load_pair", load_pair)
        patch.setattr(measuring, "measure", lambda pair: measure(pair, budget_s=0.0))
        yield


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small collection with branches, and a head trained on it: what LABELS and HEAD stand for."""
    folder = tmp_path_factory.mktemp("labels")
    write_prompts(folder)
    recipe = (
        "collect: {sources: [{path: prompts.jsonl, prompt: text}, {path: held_out.jsonl, prompt: text, split: test}], "
        "max_tokens: 12, branches: {length: 4}}\ntrain: {head: {width: 8, num_layers: 1, epochs: 1}}\nout: .\n"
    )
    (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
    called("train", str(folder / "recipe.yaml"))
    return folder


@pytest.fixture
def folder(tmp_path: Path, labels: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a page runs, with the files that it takes for granted."""
    monkeypatch.chdir(tmp_path)
    write_prompts(tmp_path)
    for name, source in (("labels", labels / "labels"), ("head", labels / "heads" / "head")):
        (tmp_path / name).mkdir()
        for path in source.iterdir():
            (tmp_path / name / path.name).write_bytes(path.read_bytes())
    for name in ("examples", "recipes", "benchmarks", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def write_prompts(folder: Path) -> None:
    """prompts.jsonl, with prompts on both sides of a split by hash, and held_out.jsonl."""
    texts = sorted(practice_prompts(), key=lambda text: split_of(text, dev_share=0.1))[:3] + practice_prompts()[:160:10]
    for name, some in (("prompts", texts), ("held_out", practice_prompts()[1:161:20])):
        rows = [json.dumps({"text": text, "question": text}) + "\n" for text in some]
        (folder / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")


def called(*arguments: str) -> str:
    """What a verb writes to stdout; fails with its stderr."""
    result = CliRunner().invoke(cli.app, arguments, prog_name="specdecpp", catch_exceptions=False)
    assert result.exit_code == 0, f"specdecpp {' '.join(arguments)}: exit {result.exit_code}\n{result.stderr}"
    return result.stdout


def run_script(path: Path, *arguments: str) -> None:
    """A script as `python` runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(path), *arguments])
        runpy.run_path(str(path), run_name="__main__")


# The pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_says_what_it_is(page: Path) -> None:
    """Catches a block that is neither run nor marked, and a mark whose reason nobody has agreed to."""
    for block in blocks(page):
        assert block.language, f"{block.where}: name the language of this block"
        assert block.needs is None or block.needs in REASONS, f"{block.where}: {block.needs!r} is none of {REASONS}"


@pytest.mark.parametrize(
    "page", [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] * (p.stem == "your-pair")) for p in PAGES]
)
def test_the_blocks_of_a_page_run(page: Path, folder: Path) -> None:
    """Catches code and commands in the documentation that no longer work, and output that is no longer what is shown."""
    with contextlib.ExitStack() as stack:
        run = Run(folder, stack)
        for block in blocks(page):
            if block.needs is None:
                run.block(block)


class Run:
    """The blocks of a page, run one after another; what Python prints is kept for the block that shows it."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack):
        self.folder, self.stack, self.names = folder, stack, {}
        self.printed: str | None = None

    def block(self, block: Block) -> None:
        printed, self.printed = self.printed, None
        try:
            if block.language == "python":
                self.printed = self.python(block)
            elif block.language == "pycon":
                self.session(block)
            elif block.is_shell:
                for words in block.commands:
                    self.command(words)
            elif block.language == "json":
                json.loads(block.code)
            elif block.language == "yaml":
                self.recipe(block)
            elif block.language == "text" and printed is not None:
                assert printed.strip() == block.code.strip()
        except Exception as error:
            raise AssertionError(f"{block.where} fails: {type(error).__name__}: {error}") from error

    def python(self, block: Block) -> str:
        code = stood_in(block.code)
        if "http://127.0.0.1:8000" in code:
            url = self.stack.enter_context(served(pair.load_pair(), name="reference")).url
            code = code.replace("http://127.0.0.1:8000", url)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, block.where, "exec"), self.names)
        return out.getvalue()

    def session(self, block: Block) -> None:
        test = doctest.DocTestParser().get_doctest(block.code + "\n", self.names, block.where, None, block.line)
        said = io.StringIO()
        assert not doctest.DocTestRunner().run(test, out=said.write, clear_globs=False).failed, said.getvalue()

    def recipe(self, block: Block) -> None:
        """A recipe is a file where its first line names one."""
        if name := re.match(r"# (\S+\.yaml)$", block.code.splitlines()[0]):
            text = stood_in(block.code)
            for pattern, short in SHORT.items():
                text = re.sub(pattern, short, text)
            (self.folder / name[1]).write_text(text, encoding="utf-8")

    def command(self, words: list[str]) -> None:
        program, *arguments = words
        if program == "specdecpp":
            self.verb(arguments)
        elif program == "python" and arguments[0].startswith("examples/"):
            run_script(ROOT / arguments[0], *arguments[1:])
        elif program == "make":
            done = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
        elif program == "pip":
            check_extras(arguments)
        else:
            raise AssertionError(f"{program} is not run here; mark the block with what it needs")

    def verb(self, arguments: list[str]) -> None:
        verb, *options = [stood_in(word) for word in arguments]
        if verb in ("serve", "chat"):
            typer.main.get_command(cli.app).commands[verb].make_context(verb, options)  # pyright: ignore
            return
        out = None
        if ">" in options:
            *options, _, out = options
        kind = f"{verb} --replay" if "--replay" in options else verb
        printed = called(verb, *options, *SMALL.get(kind, "").split())
        if out:
            (self.folder / out).write_text(printed, encoding="utf-8")


def stood_in(text: str) -> str:
    """A text with what stands for its names: whole words, so that HEAD is not found in AHEAD."""
    for name, other in STAND_INS.items():
        text = re.sub(rf"(?<![\w/.]){re.escape(name)}(?![\w.])", other.replace("\\", r"\\"), text)
    return text


def check_extras(arguments: list[str]) -> None:
    """Extras of this package that are installed by name must exist."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for words in arguments:
        if asked := re.fullmatch(r"(?:specdecpp|\.)\[(.+)\]", words):
            assert set(asked[1].split(",")) <= set(known), f"there is no extra {asked[1]}"


# The examples


def test_the_examples_rule_keeps_the_distribution(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an example of losslessness whose rule is not."""
    run_script(ROOT / "examples" / "own_policy.py")
    difference = re.search(r"distribution: (\S+)", capsys.readouterr().out)
    assert difference is not None
    assert float(difference[1]) < 1e-12


# The site


def test_every_metric_is_defined() -> None:
    """Catches a number in results that the page on reports does not explain."""
    text = (ROOT / "docs" / "decoding.md").read_text(encoding="utf-8")
    assert [name for name in Metrics().to_dict() if f"`{name}`" not in text] == []


def test_every_policy_is_on_its_page() -> None:
    """Catches a rule that nobody can find."""
    text = "".join((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in ("decoding", "lab"))
    names = [name.partition(":")[0] for name in policy_names()]
    assert [name for name in names if f"`{name}" not in text or name not in POLICY_HELP] == []


def test_the_walk_names_what_there_is() -> None:
    """Catches a page on the structure whose files, functions and methods are no longer there."""
    text = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src" / "specdecpp").rglob("*.py"))
    gone = []
    for name in re.findall(r"`([^` ]+)`", text):
        is_file, last = "/" in name or name.endswith(".py"), name.rpartition(".")[2]
        found = (ROOT / "src/specdecpp" / name).exists() if is_file else re.search(rf"(def|class) {last}\b|\b{last}:", source)
        gone += [] if found or name.endswith(".json") else [name]
    assert [name for name in gone if name not in ("train", "dev", "test", "generate")] == []


@pytest.mark.parametrize("page", [ROOT / "benchmarks/README.md", *ROOT.glob("recipes/*/README.md")], ids=str)
def test_commands_have_the_options_they_are_given(page: Path) -> None:
    """Catches a measurement that cannot be made again: a command that is written beside it and names an old option."""
    verbs: Any = typer.main.get_command(cli.app)
    text = re.sub(r"\\\n| #.*", " ", page.read_text(encoding="utf-8"))
    for verb, given in re.findall(r"specdecpp (\w+) ([^`\n|]*)", text):
        known = {name for parameter in verbs.commands[verb].params for name in parameter.opts + parameter.secondary_opts}
        assert set(re.findall(r"(?<!\S)--[a-z-]+", given)) <= known, verb


def test_files_that_contributing_names_are_there() -> None:
    """Catches instructions that send somebody to a file or a table that has moved."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    names = [name for name in re.findall(r"`([\w./-]+)`", text) if name.endswith(".py")]
    assert len(names) > 8
    assert [name for name in names if not any((ROOT / part / name).exists() for part in ("", "src/specdecpp"))] == []
    tables = re.findall(r"`([A-Z]{4,})`\s+(?:of|in)\s+`(tests/\w+\.py)`", text)
    assert len(tables) > 2
    assert [name for name, file in tables if not re.search(rf"^{name}\b", (ROOT / file).read_text(), re.MULTILINE)] == []


def test_what_is_said_of_the_draft_of_smollm2_is_measured() -> None:
    """Catches a draft that ships under the figures of the one before, on the page or in its own card."""
    measured = json.loads((ROOT / "benchmarks/results/smollm2_draft.json").read_text(encoding="utf-8"))["drafts"]
    card = json.loads((ROOT / "src/specdecpp/smollm2/card.json").read_text(encoding="utf-8"))
    (own,) = (row for row in measured if row["fingerprint"] == card["draft"]["fingerprint"])
    page = (ROOT / "docs/your-pair.md").read_text(encoding="utf-8")
    assert f"{own['tokens']:,} tokens" in page
    for figures in own["acceptance"].values():
        cells = " | ".join(f"{value:.2f}" for value in figures.values())
        assert f"| {cells} |" in (ROOT / "src/specdecpp/smollm2/README.md").read_text(encoding="utf-8")
        assert all(f"{figures[name]:.2f}"[1:] in page for name in ("greedy", "1"))


def test_the_site_is_built_strictly_and_has_every_public_name(tmp_path: Path) -> None:
    """Catches a link or an anchor that leads nowhere, a page that is not in the menu, and a reference with gaps."""
    command = [sys.executable, "-m", "properdocs", "build", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "NO_COLOR": "1"})
    assert done.returncode == 0, done.stderr
    built = (tmp_path / "site" / "reference.html").read_text(encoding="utf-8")
    assert [name for name in specdecpp.__all__ if f'id="{name.lower()}"' not in built] == []
    assert [verb for verb in cli.VERBS if f"Usage: specdecpp {verb}" not in built] == []


def test_pictures_are_what_is_drawn_now() -> None:
    """Catches a picture that was not drawn again after the theory, the results or the palette changed."""
    drawn = {"figures/stopping": runpy.run_path(str(ROOT / "docs" / "figures" / "stopping.py"))["picture"]().svg}
    found = boards([Results.read(ROOT / "benchmarks" / "results" / "replay_qwen_coder.json")], dataset="gsm8k")
    drawn |= {f"pictures/{p.name.split('-')[0]}": p.svg for of in gallery(found) for p in of}

    def said(text: str) -> list[object]:  # where a mark is to the tenth may depend on the version of matplotlib
        return [(e.tag, e.get("class"), e.text) for e in ElementTree.fromstring(text).iter()]

    for name in ("figures/stopping", "pictures/pareto"):
        assert said((ROOT / "docs" / f"{name}.svg").read_text(encoding="utf-8")) == said(drawn[name]), name


def test_the_table_of_the_readme_is_what_the_results_give() -> None:
    """Catches results that were measured anew under a README that still shows the old ones."""
    done = subprocess.run(
        [sys.executable, "benchmarks/front.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
