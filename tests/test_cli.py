"""The command line as a stranger meets it: help, results on stdout, chatter on stderr, one-line errors, exit codes."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import call, named, refused, save_head

import specdecpp
from specdecpp import cache_dir, cli
from specdecpp.cli import common, generate
from specdecpp.head import AcceptanceHead, HeadCard
from specdecpp.loading import shipped
from specdecpp.testing import save_tiny_pair

VERBS = list(cli.VERBS)
TEMPLATE = "{% for m in messages %}U {{ m['content'] }} A {% endfor %}"


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    """target, draft, head (fits), wide (a head that does not), other (a draft with another vocabulary), damaged (a draft)."""
    save_tiny_pair(folder / "other", vocab_size=48)
    weights = shutil.copytree(folder / "draft", folder / "damaged") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    save_head(folder, stopping={"threshold": 0.6})
    AcceptanceHead(HeadCard(hidden_size=48, num_layers=1)).save_pretrained(folder / "wide")
    return folder


@pytest.fixture(scope="module")
def names(folder: Path) -> list[str]:
    return named(folder)


@pytest.fixture(scope="module")
def pair(folder: Path) -> list[str]:
    return named(folder, has_head=True)


def answer(*arguments: str, stdin: str | None = None) -> dict:
    result = call("generate", *arguments, "--json", stdin=stdin)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def environment(**extra: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    source = str(Path(specdecpp.__file__).parents[1])
    return {**kept, "HF_HUB_OFFLINE": "1", "PYTHONPATH": source, "TERM": "xterm-256color", **extra}


# Help


@pytest.mark.parametrize("verb", [None, *VERBS])
def test_a_help_page_ends_with_two_examples_and_fits_80_columns(verb: str | None):
    """Catches an example that the formatter has folded into one paragraph, and an option too wide for a terminal."""
    result = call(*([verb] if verb else []), "--help")
    lines = result.stdout.rstrip().splitlines()
    assert result.exit_code == 0
    assert lines[-3].strip() == "Examples:"
    assert tuple(line.strip() for line in lines[-2:]) == cli.EXAMPLES[verb or "specdecpp"]
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize("arguments", [["--help"], *([verb, "--help"] for verb in VERBS), ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]):
    """Catches an import of torch, transformers or rich at the top of a module that --help needs."""
    code = (
        "import sys; from specdecpp import cli\n"
        f"try: cli.app({arguments!r})\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'rich'} & sys.modules.keys()), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("example", sorted({e for verb in ("specdecpp", "generate", "demo") for e in cli.EXAMPLES[verb]}))
def test_the_examples_of_the_help_pages_run(example: str, pair: list[str]):
    """Catches an example that names an option which has been renamed, or a value that is refused."""
    before, _, after = example.partition("specdecpp ")
    verb, *arguments = shlex.split(after.partition("|")[0])
    stdin = shlex.split(before)[1] if before else None
    result = call(verb, *arguments, *pair, *(["--max-tokens", "4"] if verb == "generate" else []), stdin=stdin)
    assert result.exit_code == 0, result.stderr
    assert result.stdout


# Results


def test_a_prompt_comes_from_the_argument_or_from_stdin(pair: list[str]):
    """Catches a dash taken for the prompt, a stdin that is ignored, and a line end that becomes part of the prompt."""
    options = [*pair, "--temperature", "0", "--max-tokens", "12"]
    said = answer("hello you", *options)
    assert answer("-", *options, stdin="hello you\n")["tokens"] == said["tokens"]
    assert answer(*options, stdin="hello you\n")["tokens"] == said["tokens"]
    assert answer(*options, stdin="another")["tokens"] != said["tokens"]


def test_plain_output_is_the_text_and_nothing_else(pair: list[str]):
    """Catches chatter on stdout, statistics nobody asked for, escape codes in a pipe, and figures wider than a terminal."""
    options = ["hello", *pair, "--seed", "2", "--max-tokens", "20"]
    result = call("generate", *options)
    assert result.stdout == answer(*options)["text"] + "\n"
    assert result.stderr == ""
    result = call("generate", *options, "--stats", "--json")
    assert f"{json.loads(result.stdout)['metrics']['num_tokens']} tokens" in result.stderr
    assert "SpecDec++ 0.6 raw, seed 2" in result.stderr
    assert max(map(len, result.stderr.splitlines())) <= 80


def test_answers_without_a_seed_teach_those_to_come(names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Catches a seed that nobody asked for: with one, each process of the command line would begin as if it were the first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = ["hello", *names, "--policy", "cost-aware", "--max-tokens", "8"]
    assert answer(*options, "--seed", "7")["seed"] == 7
    assert not list(cache_dir.folder().glob("experience-*"))
    assert answer(*options)["seed"] is None
    assert len(list(cache_dir.folder().glob("experience-*"))) == 1


def test_json_holds_what_is_needed_to_get_the_answer_again(pair: list[str]):
    """Catches a seed or a rule that is not told, and steps that disagree with the sums."""
    said = answer("hello", *pair, "--max-tokens", "24", "--seed", "7")
    again = answer("hello", *pair, "--max-tokens", "24", "--seed", str(said["seed"]), "--policy", said["policy"])
    assert {k: again[k] for k in ("text", "tokens", "steps", "finish_reason")} == {
        k: said[k] for k in ("text", "tokens", "steps", "finish_reason")
    }
    assert sum(r["num_drafted"] for r in said["steps"]) == said["metrics"]["num_draft_tokens"]
    assert sum(r["num_accepted"] for r in said["steps"]) == said["metrics"]["num_accepted_draft_tokens"]
    assert len(said["steps"]) == said["metrics"]["num_spec_steps"]
    assert set(said["steps"][0]) == {"num_drafted", "num_accepted", "stop_reason"}


@pytest.mark.parametrize("policy", ["fixed:3", "heuristic", "max-confidence:drop=true", "entropy:0.3", "specdecpp:0.5"])
def test_greedy_text_is_the_targets_own_under_every_policy(policy: str, pair: list[str]):
    """Catches an option that does not reach the decoder: temperature, policy, the greedy test a dropping rule needs."""
    options = ["hello", *pair, "--temperature", "0", "--max-tokens", "24"]
    assert answer(*options, "--policy", policy)["tokens"] == answer(*options, "--policy", "none")["tokens"]


@pytest.mark.parametrize("option", [["--verification", "block", "--top-p", "0.01"], ["--temperature", "0.001"]])
def test_sampling_options_reach_the_decoder(option: list[str], pair: list[str]):
    """Catches an option that is parsed and then forgotten: each of these leaves only the argmax."""
    greedy = answer("hello", *pair, "--temperature", "0", "--max-tokens", "16")
    assert answer("hello", *pair, *option, "--seed", "5", "--max-tokens", "16")["tokens"] == greedy["tokens"]


def test_a_chat_template_makes_the_prompt_a_user_message(folder: Path, tmp_path: Path):
    """Catches a chat model that is asked in plain text, and --raw without effect."""
    chat = shutil.copytree(folder / "target", tmp_path / "chat")
    (chat / "chat_template.jinja").write_text(TEMPLATE)

    def prompt_tokens(target: Path, *options: str) -> int:
        named = ["--target", str(target), "--draft", str(folder / "draft"), "--max-tokens", "2", *options]
        return answer("hello", *named)["metrics"]["num_prompt_tokens"]

    assert prompt_tokens(chat) == len("U hello A ")
    assert prompt_tokens(chat, "--raw") == prompt_tokens(folder / "target") == len("hello")


# Errors


@pytest.mark.parametrize(
    ("verb", "options", "code", "words"),
    [
        ("generate", "--temperature -1", 2, "temperature must be a finite number of at least 0, got -1.0"),
        ("generate", "--temperature warm", 2, "should be a valid number"),
        ("generate", "--top-p 0", 2, "top_p must lie in (0, 1]"),
        ("generate", "--max-tokens -1", 2, "max_tokens must be a whole number, at least 0"),
        ("generate", "--policy clever", 2, "there is no policy 'clever'. Policies: none, adaptive-entropy:threshold"),
        ("generate", "--policy cumulative:k=3", 2, "cumulative takes threshold, min_tokens, max_tokens"),
        ("generate", "--policy cumulative:7", 2, "must lie in [0, 1], got 7.0"),
        ("generate", "--policy max-confidence:drop=true", 2, "removes a sampled draft token"),
        ("generate", "--verification trust", 2, "'trust' is not one of 'token', 'block', 'compare'"),
        ("generate", "--verification greedy", 2, "'greedy' is not one of"),
        ("generate", "--dtype int3", 2, "int3"),
        ("generate", "--device abacus", 2, "--device abacus cannot be used here"),
        ("generate", "--device meta", 2, "--device meta cannot be used here"),
        ("generate", "--target smollm2", 1, "smollm2 is the name of a whole pair"),
        ("generate", "--draft reference", 1, "reference is the name of a whole pair"),
        ("generate", "--draft {folder}/other/draft", 1, "vocabular"),
        ("generate", "--draft {folder}/damaged", 1, "{folder}/damaged"),
        ("generate", "--target /nowhere --draft /nowhere --policy specdecpp:0.7", 2, "needs an acceptance head"),
        ("generate", "--head {folder}/wide", 1, "width 48"),
        ("generate", "--head {folder}/nowhere", 1, "there is no head at"),
        ("bench", "--prompts ./nowhere.jsonl --prompt gsm8k", 1, "there is no file ./nowhere.jsonl"),
        ("bench", "--costs 0.2", 2, "--costs is for --replay"),
        ("bench", "--verification trust", 2, "a bench compares the verifications token, block"),
        ("bench", "--max-tokens 1", 2, "at least 2 tokens"),
        ("bench", "--out .", 1, "is a folder"),
        ("check", "--minutes 0", 2, "a time above 0"),
        ("check", "--minutes nan", 2, "a time above 0"),
        ("check", "--minutes 2 --quick", 2, "Give one"),
        ("check", "--num 1", 2, "greater than or equal to 2"),
    ],
)
def test_a_bad_option_is_refused(verb: str, options: str, code: int, words: str, names: list[str], folder: Path):
    """Catches a value that runs into a traceback, a refusal that does not say what is wrong, models that do not fit and decode
    nonsense, a pair's name that is looked for on a hub, and a policy that fails only after minutes of loading."""
    prompt = ["hello"] if verb == "generate" else []
    assert words.format(folder=folder) in refused(verb, *prompt, *names, *options.format(folder=folder).split(), code=code)


def test_no_prompt_is_bad_usage(pair: list[str], monkeypatch: pytest.MonkeyPatch):
    """Catches a call that waits for ever, or that decodes from nothing, and one that hangs on the keyboard."""
    assert "there is no prompt" in refused("generate", *pair, code=2, stdin="")
    assert "there is no prompt" in refused("generate", "-", *pair, code=2, stdin="\n")
    monkeypatch.setattr(sys, "stdin", type("Keyboard", (), {"isatty": lambda self: True})())
    with pytest.raises(ValueError, match="there is no prompt"):
        generate._prompt_text(None)


def test_an_error_of_a_run_is_one_line(pair: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Catches a prompt that is cut without a word, a search on the hub for what is plainly a folder, and a trace at Ctrl-C."""
    assert "the prompt has 300 tokens" in refused("generate", "a" * 300, *pair, code=1)
    missing = str(folder / "nowhere")
    line = refused("generate", "hello", "--target", missing, "--draft", missing, code=1)
    assert line == f"error: there is no folder {missing}. Give the folder of a saved model, or a hub name like org/name.\n"

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(common, "watched", interrupted)
    assert refused("generate", "hello", *pair, code=130) == ""


def test_half_a_pair_is_bad_usage(names: list[str], folder: Path):
    """Catches half a pair that is completed by the reference pair, or loaded before it is refused."""
    assert "--target and --draft go together" in refused("generate", "hello", *names[2:], code=2)
    assert "Did you mean smollm2?" in refused("generate", "hello", "--target", "smollm", code=2)
    assert "a head needs --draft" in refused("generate", "hello", *names[:2], "--head", str(folder / "head"), code=2)


def test_a_folder_that_keeps_nothing_is_told(names: list[str], monkeypatch: pytest.MonkeyPatch):
    """Catches starts that are slow each time, and nobody knows why."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    said = call("generate", "hello", *names, "--policy", "none", "--max-tokens", "3").stderr
    assert "nothing can be kept: /proc/none" in said


def test_a_target_without_a_draft_copies_from_the_text(names: list[str]):
    """Catches a target that is refused for want of a draft, and copies that change what is said."""
    options = ["--temperature", "0", "--max-tokens", "40"]
    copied, alone = (answer("ab ab ab ab ab", *names[:2], *options, *more) for more in ([], ["--policy", "none"]))
    assert copied["text"] == alone["text"]
    assert copied["policy"].startswith("cost-aware")


def test_a_pair_with_a_name_needs_no_draft_and_has_its_head():
    """Catches a pair's name that is taken for a model's, and a rule that is refused for want of the head that comes with it."""
    for policy in ("none", "specdecpp"):
        assert answer("hello", "--target", "reference", "--policy", policy, "--max-tokens", "3")["policy"].startswith(policy)
    assert "go together" in refused("generate", "hello", "--draft", "reference", code=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shipped, "_packaged", lambda: None)
        assert "writes nonsense; SmolLM2 does not. Install it" in call("generate", "hello", "--max-tokens", "3").stderr


def test_what_is_odd_about_a_pair_is_one_line(folder: Path, names: list[str], tmp_path: Path):
    """Catches a warning that names a line of our source, or that nobody sees."""
    shutil.copytree(folder / "target", tmp_path / "target")
    config = tmp_path / "target" / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": [1, 999]}))
    result = call("generate", "hello", "--target", str(tmp_path / "target"), *names[2:], "--max-tokens", "3")
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: ")
    assert result.stderr.endswith("the ids [999] end a text, and the models have ids up to 63\n")
    assert len(result.stderr.splitlines()) == 1


def test_a_reader_that_goes_away_is_no_error(pair: list[str]):
    """Catches the traceback, and the complaint at exit, of `specdecpp generate ... | head -1`."""
    command = [sys.executable, "-m", "specdecpp", "generate", "hello", *pair, "--seed", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    assert process.stdout
    assert process.stderr
    process.stdout.close()
    complaint = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), complaint) == (0, b"")


def test_an_answer_fits_the_schema_in_a_file(tmp_path: Path):
    """Catches an option that is read and not passed on."""
    path = tmp_path / "schema.json"
    path.write_text('{"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3}')
    found = answer("Letters:", "--target", "reference", "--json-schema", str(path), "--seed", "1")
    assert set(json.loads(found["text"])) <= {"a", "b"}
    path.write_text('{"type": 5}')
    refused = call("generate", "Letters:", "--target", "reference", "--json-schema", str(path))
    assert refused.exit_code != 0
    assert "type must be" in refused.stderr
