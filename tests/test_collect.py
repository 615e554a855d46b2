"""Collection as a whole: one recipe gives one set of bytes whatever happens on the way, and refusals lose nothing."""

import hashlib
import json
import os
import shlex
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from interrupted import at_file, attempts, before, interrupted, see_killed
from typer.testing import CliRunner, Result

from specdecpp import BackendError, DataError, Pair, cache_dir, cli
from specdecpp.cli import train as collecting
from specdecpp.cli.train import EXAMPLES
from specdecpp.loading.pair import load_pair
from specdecpp.testing import TableModel, practice_prompts, save_tiny_pair, tiny_tokenizer
from specdecpp.training import collect as rooms
from specdecpp.training import shards
from specdecpp.training.collect import Progress, collect
from specdecpp.training.folders import claimed
from specdecpp.training.recipe import Recipe

COLLECT = {"max_tokens": 12, "shard_size": 6, "batch": 4, "draws": 2, "seed": 5, "features": ["mixed", "leaf"]}
pytestmark = pytest.mark.usefixtures("one_thread")
NUM_PROMPTS, NUM_SHARDS = 20, 4


@pytest.fixture(scope="module")
def home(folder: Path) -> Path:
    """target, draft and prompts.jsonl."""
    rows = [{"text": text[:60].strip()} for text in practice_prompts()[:: 200 // NUM_PROMPTS]]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def pair(home: Path) -> Pair:
    return load_pair(home / "target", draft=home / "draft", dtype="float32")


def recipe_of(home: Path, folder: Path, *, sampling: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    """A recipe in the folder, which collects into it; `changes` are of the section collect."""
    content = {
        "pair": {"target": str(home / "target"), "draft": str(home / "draft"), "dtype": "float32"},
        "sampling": sampling or {},
        "collect": {
            "sources": [{"path": str(home / "prompts.jsonl"), "prompt": "text", "dev_share": 0.3}],
            **COLLECT,
            **changes,
        },
    }
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content))
    return Recipe.read(folder / "recipe.yaml")


@pytest.fixture(scope="module")
def whole(home: Path, pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The labels of an undisturbed collection; nobody may change them."""
    recipe = recipe_of(home, tmp_path_factory.mktemp("whole"))
    collect(recipe, pair)
    return recipe.labels


def hashes(labels: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(labels.iterdir())}


# What is collected


def test_every_prompt_gets_one_record(whole: Path, home: Path) -> None:
    """Catches a prompt that is lost between shards, a split that is not recorded, and branches for the wrong split."""
    about, records = shards.about(whole), list(shards.read(whole))
    assert len(records) == about["num_prompts"] == NUM_PROMPTS
    assert about["num_shards"] == NUM_SHARDS
    told = {
        tuple(tiny_tokenizer()(json.loads(line)["text"]).input_ids)
        for line in (home / "prompts.jsonl").read_text().splitlines()
    }
    assert {tuple(r.prompt.tolist()) for r in records} == told
    counts = {split: sum(r.split == split for r in records) for split in ("dev", "train")}
    assert about["prompts"] == {"prompts": counts}
    assert min(counts.values()) > 2
    for record in records:
        assert (record.branches is not None) == (record.split == "dev")
        assert len(record.answer) <= 12
        assert len(record.answer) == 12 or record.answer[-1] == 1


def test_a_choice_of_sides_leaves_the_others_out(home: Path, pair: Pair, whole: Path, tmp_path: Path) -> None:
    """Catches answers that are sampled for training prompts where only recordings are wanted, odds that are asked for in the
    recipe and not made, and sources without a prompt on any of the sides."""
    recipe = recipe_of(home, tmp_path, splits=["dev", "test"], branches={"length": 3, "odds": True})
    assert recipe.collect.branches is not None
    collect(recipe, pair)
    found, dev = list(shards.read(recipe.labels)), list(shards.read(whole, split="dev"))
    assert sorted(r.prompt.tolist() for r in found) == sorted(r.prompt.tolist() for r in dev)
    about = shards.about(recipe.labels)
    assert about["prompts"] == {"prompts": {"dev": len(dev)}}
    assert about["collect"]["splits"] == ["dev", "test"]
    assert about["collect"]["branches"]["odds"] is True
    for record in found:
        assert record.answer_log_ratio is not None
        assert record.branches is not None
        assert record.branches.log_ratio is not None
        assert record.branches.overlap is not None
        is_real = torch.arange(3) < record.branches.length[:, None]
        assert (record.branches.log_ratio[:, 0][is_real[:, 0]] < 0).all(), "a rejected draft token has q > p"
        assert (record.branches.overlap[is_real] > 0).any()
    nothing = recipe_of(home, tmp_path / "nothing", splits=["test"])
    with pytest.raises(DataError, match=r"the sources hold no prompts for test: .*prompts\.jsonl"):
        collect(nothing, pair)
    assert not nothing.labels.exists()


def test_a_collection_from_before_a_key_goes_on(whole: Path) -> None:
    """Catches a new key of the recipe that makes every collection one of another kind: as usual, it is not recorded."""
    recorded = shards.about(whole)["collect"]
    assert "splits" not in recorded
    assert recorded["branches"] == {"splits": ["dev", "test"], "sources": None, "length": 10}


def test_what_it_is_of_is_recorded(whole: Path, pair: Pair) -> None:
    """Catches labels that cannot be told from those of another pair, seed or temperature; and a clock among them."""
    about = shards.about(whole)
    assert about["pair"]["target"] == pair.target_fingerprint
    assert about["pair"]["draft"] == pair.draft_fingerprint
    assert about["sampling"]["temperature"] == 1.0
    assert about["collect"]["seed"] == 5
    assert about["versions"]["torch"] == torch.__version__
    assert about["command"] == "specdecpp train recipe.yaml --only collect"
    assert len(about["data"]) == len(about["digest"]) == 64


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_any_pair_collects_under_any_sampling(kind: str, tmp_path: Path) -> None:
    """Catches what only works for one architecture, and prompts that overrun a context and end the run."""
    save_tiny_pair(tmp_path, kind=kind)
    rows = [{"text": "how many?"}, {"text": "a" * 255}, {"text": "b" * 256}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    filters = {"temperature": 0.8, "top_k": 30, "top_p": 0.95, "repetition_penalty": 1.1}
    recipe = recipe_of(tmp_path, tmp_path / "run", sampling=filters)
    collect(recipe, load_pair(tmp_path / "target", draft=tmp_path / "draft", dtype="float32"))
    assert shards.about(recipe.labels)["num_left_out"] == 1
    assert sorted(len(r.prompt) for r in shards.read(recipe.labels)) == [9, 255]


# Killed, resumed, spread


MOMENTS = {
    "half of the description": at_file("", 1, is_half=True),
    "after one file of two": at_file("", 2),
    "half of its first file": at_file("", 1, is_half=True),
    "half of its second file": at_file("", 2, is_half=True),
    "while sampling": before(rooms, "sample_responses", 2),
    "half of the third": at_file("", 3, is_half=True),
    "after a shard": at_file("", 2),
}


def test_killed_at_any_moment_and_started_again_it_gives_the_same_bytes(
    whole: Path, home: Path, pair: Pair, tmp_path: Path
) -> None:
    """Catches half a file that is taken for a whole one, a shard that depends on what was made before it in its process or is
    made twice, and litter: processes are killed (-9) while they write, between both files of a shard and while they sample."""
    recipe = recipe_of(home, tmp_path)
    see_killed(__file__, MOMENTS, str(tmp_path / "recipe.yaml"))
    assert 0 < len(shards.done(recipe.labels)) < NUM_SHARDS
    end = collect(recipe, pair)
    assert end.prompts_before > 0
    assert hashes(recipe.labels) == hashes(whole)
    assert collect(recipe, pair).tokens == 0


# Refusals


@pytest.fixture
def begun(home: Path, pair: Pair, tmp_path: Path) -> Recipe:
    """A collection whose last shard is missing."""
    recipe = recipe_of(home, tmp_path / "begun")
    collect(recipe, pair)
    (recipe.labels / f"shard-{NUM_SHARDS - 1:05d}.parquet").unlink()
    return recipe


def test_a_changed_recipe_is_refused_with_what_has_changed(
    home: Path, begun: Recipe, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a collection of two kinds of labels, one that is begun anew over the old, a file that has changed while the
    recipe has not, and a number of threads that gives other last digits."""
    before = hashes(begun.labels)
    changed = {"seed": (5, 6), "draws": (2, 3), "max_tokens": (12, 13)}
    other = recipe_of(home, begun.out.parent, **{key: now for key, (_, now) in changed.items()})
    with pytest.raises(DataError) as refused:
        collect(replace(other, out=begun.out), pair)
    for key, (was, now) in changed.items():
        assert f"collect.{key} was {was} and is {now}" in str(refused.value)
    assert hashes(begun.labels) == before
    sampled = replace(begun, sampling=replace(begun.sampling, temperature=0.5))
    with pytest.raises(DataError, match=r"sampling.temperature was 1.0 and is 0.5\. Collect into another folder"):
        collect(sampled, pair)
    (tmp_path / "prompts.jsonl").write_text('{"text": "something else"}\n')
    sources = (replace(begun.collect.sources[0], path=str(tmp_path / "prompts.jsonl")),)
    with pytest.raises(DataError, match=r"data was '.*' and is '.*'"):
        collect(replace(begun, collect=replace(begun.collect, sources=sources)), pair)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(DataError, match="threads was 1 and is 2"):
        collect(begun, pair)
    (begun.labels / shards.COLLECTION).unlink()
    with pytest.raises(DataError, match=r"holds shards but no collection\.json"):
        collect(begun, pair)


def test_a_damaged_shard_stops_the_run_and_can_be_made_anew(whole: Path, begun: Recipe, pair: Pair) -> None:
    """Catches damage that is only found when it is too late, and advice that does not work."""
    path = begun.labels / "shard-00001.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"has 1000 bytes and should have \d+\. Delete shard-00001.parquet and shard-00001.s"):
        collect(begun, pair)
    path.unlink()
    path.with_suffix(".parquet").unlink()
    collect(begun, pair)
    assert hashes(begun.labels) == hashes(whole)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_keeps_what_is_finished(
    whole: Path, home: Path, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a traceback, half a shard and lost work where the disk is full (/dev/full is one)."""
    recipe = recipe_of(home, tmp_path)
    monkeypatch.setattr(cache_dir.secrets, "token_hex", lambda num: "00" * num)
    monkeypatch.setattr(cache_dir, "LEFT_S", float("inf"))  # the device is older than any part

    def progress(now: Progress) -> None:
        if now.shards_done == 2 and not full.exists():
            full.symlink_to("/dev/full")

    full = recipe.labels / f"shard-00002.parquet.{os.getpid()}-00000000.part"
    with pytest.raises(
        DataError, match=r"is full\)\. The 2 finished shards are safe: make room and run the same command again"
    ):
        collect(recipe, pair, progress=progress)
    assert shards.done(recipe.labels) == [0, 1]
    assert not full.is_symlink()
    collect(recipe, pair)
    assert hashes(recipe.labels) == hashes(whole)


def test_a_folder_that_cannot_be_written_is_told_before_models_are_loaded(home: Path, tmp_path: Path) -> None:
    """Catches a traceback, and one that comes after minutes of loading: here the models are not even there."""
    (tmp_path / "file").write_text("")
    (tmp_path / "closed" / "labels").mkdir(parents=True)
    (tmp_path / "closed" / "labels").chmod(0o500)
    recipe = recipe_of(home, tmp_path)
    gone = replace(recipe, pair=replace(recipe.pair, target="/nowhere/target", draft="/nowhere/draft"))
    refusals = {"file/run": r"cannot be made \(Not a directory.*--out", "closed": "cannot be written into.*--out"}
    if os.access(tmp_path / "closed" / "labels", os.W_OK):  # as root everything can be written
        del refusals["closed"]
    for out, words in refusals.items():
        with pytest.raises(DataError, match=words):
            collecting.collected(replace(gone, out=tmp_path / out), yes=False, quiet=True, is_whole=False)


def test_two_runs_do_not_share_a_folder(whole: Path, home: Path, pair: Pair, tmp_path: Path) -> None:
    """Catches two runs that write under the same names, and one that removes what the other, or anybody else, has written."""
    recipe = recipe_of(home, tmp_path)
    with claimed(recipe.labels):
        half = recipe.labels / "shard-00000.parquet.1-abababab.part"
        for path in (half, recipe.labels / "film.mkv.part"):
            path.write_text("half")
        with pytest.raises(DataError, match=r"another run works in .*labels\. Wait until it has ended"):
            collect(recipe, pair)
        assert half.exists()
    collect(recipe, pair)
    (recipe.labels / "film.mkv.part").unlink()  # nobody's who runs: it is still there
    assert hashes(recipe.labels) == hashes(whole)


@pytest.mark.parametrize("content", ["[]", "null", "{", '{"pair": []}', '{"num_shards": "4"}', "\xff"])
def test_a_damaged_description_is_told(home: Path, pair: Pair, tmp_path: Path, content: str) -> None:
    """Catches tracebacks where collection.json is JSON, but not what it was (`[]`), in everybody who reads it."""
    recipe = recipe_of(home, tmp_path)
    recipe.labels.mkdir(parents=True)
    (recipe.labels / shards.COLLECTION).write_bytes(content.encode("latin-1"))
    for reader in (lambda: collect(recipe, pair), lambda: shards.about(recipe.labels)):
        with pytest.raises(DataError, match=r"collection\.json.*Put back the file as it was, or collect into another folder"):
            reader()


def test_a_large_collection_must_be_asked_for(home: Path, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches hours of work towards a disk that is too small, and a yes that is not heard."""
    recipe, told = recipe_of(home, tmp_path), []
    monkeypatch.setattr(rooms, "LARGE", 1e5)
    with pytest.raises(DataError, match=r"may grow by 0.0 GB, and more than 0 GB must be asked for\. Say --yes"):
        collect(recipe, pair, progress=told.append)
    monkeypatch.setattr(rooms, "LARGE", 20e9)
    monkeypatch.setattr(rooms.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1000}))
    with pytest.raises(DataError, match=r"and its disk has 0.0 GB free\. Say --yes"):
        collect(recipe, pair, progress=told.append)
    assert (told, shards.done(recipe.labels)) == ([], [])
    assert collect(recipe, pair, assume_yes=True).shards_done == NUM_SHARDS


def test_the_bound_on_bytes_holds_and_the_progress_adds_up(home: Path, pair: Pair, tmp_path: Path) -> None:
    """Catches a bound that leaves out the branches, and tokens counted twice."""
    recipe, told = recipe_of(home, tmp_path, max_tokens=100, draws=4), list[Progress]()
    end = collect(recipe, pair, progress=told.append)
    items, _ = rooms.prepared(recipe, pair)
    size = sum(p.stat().st_size for p in recipe.labels.glob("shard-*.safetensors"))
    assert size < rooms.most_bytes(recipe, pair, items) < 40 * size
    assert told[0].tokens == told[0].prompts_done == 0
    assert end.tokens == sum(len(r.answer) for r in shards.read(recipe.labels))
    assert (end.prompts_done, end.shards_done) == (NUM_PROMPTS, end.num_shards)
    assert all(a.tokens <= b.tokens and a.prompts_done <= b.prompts_done for a, b in pairwise(told))


def test_a_draft_that_cannot_have_leaves_is_refused_at_the_start(tmp_path: Path) -> None:
    """Catches a refusal after hours of sampling."""
    from specdecpp.backends import EagerModel
    from specdecpp.testing import tiny_draft, tiny_model

    model = tiny_model("mistral", sliding_window=6)
    narrow = Pair(target=EagerModel(model), draft=EagerModel(tiny_draft(model)), tokenizer=tiny_tokenizer(), ends=(1,))
    save_tiny_pair(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"text": "how many?"}\n')
    recipe = recipe_of(tmp_path, tmp_path / "run")
    with pytest.raises(BackendError, match="attends to the last 6 tokens only"):
        collect(recipe, narrow)
    plain = recipe_of(tmp_path, tmp_path / "run", features=["mixed"], branches=None)
    assert collect(plain, narrow).prompts_done == 1
    wide = replace(narrow, draft=EagerModel(tiny_draft(tiny_model("llama"))))
    judging = recipe_of(tmp_path, tmp_path / "judging", features=[], branches={"splits": ["train"], "odds": True})
    with pytest.raises(
        BackendError, match=r"the last 6 tokens only.*Set collect\.branches\.odds to false, or choose another ta"
    ):
        collect(judging, wide)
    assert collect(recipe_of(tmp_path, tmp_path / "judging", branches={"splits": ["train"]}), wide).prompts_done == 1


def test_backends_that_cannot_run_a_batch_are_refused() -> None:
    table = TableModel.random(vocab_size=3, depth=1, seed=0)
    with pytest.raises(BackendError, match=r"the target is a TableModel\. Use an EagerModel"):
        rooms.backends_of(Pair(target=table, draft=table.new_cache(), tokenizer=None))


# The command line


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["train", "--only", "collect", *arguments], prog_name="specdecpp")


def test_the_verb_collects_says_so_and_goes_on(whole: Path, home: Path, tmp_path: Path) -> None:
    """Catches chatter on stdout, a verb that asks for other threads than it began with, and bytes of its own."""
    recipe_of(home, tmp_path)
    path, out = str(tmp_path / "recipe.yaml"), tmp_path / "elsewhere"
    first = call(path, "--out", str(out))
    assert (first.exit_code, first.stderr.startswith("  collecting, 0 of 20 prompts,")) == (0, True), first.stderr
    assert first.stdout.startswith(f"{out / 'labels'}: 20 answers in 4 shards (")
    assert first.stdout.count("\n") == 1
    assert hashes(out / "labels") == hashes(whole)
    torch.set_num_threads(2)
    again = call(path, "--out", str(out), "--json")
    assert json.loads(again.stdout)["prompts_done"] == json.loads(again.stdout)["prompts_before"] == 20
    torch.set_num_threads(1)


def test_an_interrupt_keeps_what_is_finished_and_says_how_to_go_on(whole: Path, home: Path, tmp_path: Path) -> None:
    """Catches Ctrl-C that says nothing: finished shards stay, and the same command makes the same bytes of the rest."""
    recipe = recipe_of(home, tmp_path / "own")
    path = str(tmp_path / "own" / "recipe.yaml")

    def is_begun() -> bool:
        return any(recipe.labels.glob("shard-*.parquet"))

    ended = interrupted("train", "--only", "collect", path, at=r"collecting, \d+ of", when=is_begun, folder=tmp_path)
    num = len(shards.done(recipe.labels))
    assert (ended.code, ended.stdout) == (130, ""), ended.chatter
    assert f"interrupted: {num} of {NUM_SHARDS} shards are finished and safe in {recipe.labels}" in ended.chatter
    assert "Run the same command again" in ended.chatter
    assert 0 < num < NUM_SHARDS
    assert call(path).exit_code == 0
    assert hashes(recipe.labels) == hashes(whole)


def test_the_examples_of_the_help_page_parse() -> None:
    """Catches an example with an option that was renamed: it must fail on the recipe that is not there, not before."""
    for example in EXAMPLES:
        result = call(*shlex.split(example.partition(">")[0])[2:])
        assert (result.exit_code, result.stderr) == (
            1,
            "error: there is no recipe recipe.yaml. Give the path of a YAML file.\n",
        )


def main() -> None:
    torch.set_num_threads(1)
    recipe = Recipe.read(sys.argv[1])
    pair = load_pair(recipe.pair.target, draft=recipe.pair.draft, dtype="float32")
    attempts(lambda: collect(recipe, pair), MOMENTS)


if __name__ == "__main__":
    main()
