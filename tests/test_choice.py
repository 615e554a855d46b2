"""Which backends a pair gets: by name, by measurement, with a reason; the same again in the next process."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from distributions import unchecked

from specdecpp import Pair, cache_dir, load_pair
from specdecpp.backends import EagerModel, LeanModel, native, probe
from specdecpp.drafters import SuffixDrafter
from specdecpp.errors import BackendError
from specdecpp.loading import checks, choice
from specdecpp.loading.choice import BackendOption, _is_crowded
from specdecpp.loading.models import Checkpoint
from specdecpp.loading.pair import REFERENCE
from specdecpp.testing import save_tiny_pair

Folders = tuple[Path, Path]
BOTH = "lean", "eager"
NATIVE = [BackendOption(kinds=("native", "native"), threads=threads) for threads in ((1, 1), (2, 1), (2, 2))]
needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "specdecpp"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return save_tiny_pair(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return save_tiny_pair(tmp_path_factory.mktemp("gpt2"), kind="gpt2")


def loaded(folders: Folders, backend: Any = BOTH) -> Pair:
    return load_pair(folders[0], draft=folders[1], backend=backend)


def checkpoint(name: Path, dtype: Any = "auto") -> Checkpoint:
    return Checkpoint(name, dtype=dtype, device=None, device_map=None)


def memory(home: Path) -> Path:
    """The file of the figures."""
    (found,) = home.glob("runners-*.json")
    return found


def test_a_name_is_an_order_and_several_are_a_wish(llama: Folders, gpt2: Folders, home: Path) -> None:
    """Catches an order that is measured instead of followed, one that cannot be followed but is taken for a wish, and a wish
    that fails where one of its backends cannot do it."""
    pair = loaded(llama, "lean")
    assert type(pair.target) is LeanModel
    assert pair.backends == "lean (as asked)"
    assert not list(home.glob("runners-*")), "nothing to measure"
    with pytest.raises(BackendError, match=r"no backend can run .*lean: it is not one of"):
        loaded(gpt2, "lean")
    with unchecked(), pytest.raises(ValueError, match=r"there is no backend 'turbo'. Backends: graphs"):
        loaded(llama, "turbo")
    pair = loaded(gpt2)
    assert type(pair.target) is EagerModel
    assert pair.backends.startswith("eager")


def test_the_fastest_is_taken_and_remembered(llama: Folders, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a choice against its own figures, and one that changes from process to process with the noise."""
    pair = loaded(llama)
    found = json.loads(memory(home).read_text())
    fastest = min(found["round_s"], key=found["round_s"].get)
    assert pair.backends.startswith(f"{fastest}: ")
    assert "ms a step of 4 draft tokens" in pair.backends
    monkeypatch.setattr(choice, "_measured", lambda *_: pytest.fail("measured again"))
    for slow, quick, kind in (("lean", "eager", EagerModel), ("eager", "lean", LeanModel)):
        memory(home).write_text(json.dumps({**found, "round_s": {slow: 2.0, quick: 1.0}}))
        pair = loaded(llama)
        assert type(pair.target) is type(pair.draft) is kind
        assert pair.backends == f"{quick}: 1000.0 ms a step of 4 draft tokens here; {slow} 2000.0"


@pytest.mark.parametrize("content", ["", "[]", '{"round_s": 3}', '{"round_s": {}}', '{"round_s": {"lean": "x", "eager": 1}}'])
def test_a_damaged_memory_is_measured_again(content: str, llama: Folders, home: Path) -> None:
    """Catches half a file that stops a pair from being loaded."""
    loaded(llama)
    memory(home).write_text(content)
    assert "ms a step" in loaded(llama).backends


def test_a_runner_that_fails_when_it_is_made_is_left_out(llama: Folders, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches one broken backend that keeps a pair from being loaded at all, now or from memory."""

    def broken(*_: object, **__: object) -> None:
        raise BackendError("other logits than transformers")

    monkeypatch.setattr(LeanModel, "__init__", broken)
    for _ in range(2):
        pair = loaded(llama)
        assert type(pair.target) is EagerModel
        assert pair.backends.endswith("here. Failed: lean: other logits than transformers"), "not only that others fail"
    with pytest.raises(BackendError, match="other logits"):
        loaded(llama, "lean")


def test_a_runner_that_is_far_behind_is_left_at_once(llama: Folders, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches half a minute of a first load for checks and steps of a backend whose first step has shown that it is slow; one
    that is given up for a first step that was spent on beginning; and slow ones that are tried before there is a fast one."""
    clock, passes = [0.0], {"lean": 0, "eager": 0}
    seconds = {"lean": [0.01], "eager": [10.0]}

    def timed(kind: type[EagerModel], name: str) -> None:
        own: Any = kind.read

        def read(self: EagerModel, *given: Any, **more: Any) -> Any:
            if type(self) is kind:
                clock[0] += seconds[name][min(passes[name], len(seconds[name]) - 1)]
                passes[name] += 1
            return own(self, *given, **more)

        monkeypatch.setattr(kind, "read", read)

    timed(LeanModel, "lean")
    timed(EagerModel, "eager")
    monkeypatch.setattr(choice, "perf_counter", lambda: clock[0])
    assert loaded(llama).backends == "lean: 50.0 ms a step of 4 draft tokens here; eager 50000.0"
    assert passes["eager"] == choice.CANDIDATES + 1, "one step"
    memory(home).unlink()
    seconds["eager"] = [0.1, 0.005]
    passes["eager"] = 0
    assert loaded(llama).backends.startswith("eager: 25.0 ms")


def test_slow_options_have_more_than_one_round(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches threads of a large pair that one step each has chosen."""
    clock = [0.0]

    class Trial:
        def __init__(self, option: BackendOption):
            self.seconds = {(1, 1): 0.3, (2, 1): 0.13, (2, 2): 0.12}[option.threads]

        def read(self) -> None:
            clock[0] += 0.1

        def turn(self, num: int) -> list[float]:
            clock[0] += num * self.seconds
            return [self.seconds] * (num - 1)

    monkeypatch.setattr(choice, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(choice._Models, "backends", lambda self, option, **more: {"option": option})
    monkeypatch.setattr(choice, "_Trial", Trial)
    nobody: Any = None
    with unchecked():
        times, _ = choice._measured(choice._Models(target=nobody, draft=None, vocab_size=8), NATIVE)
    assert [len(times[option]) for option in NATIVE] == [1, 4, 4]
    assert clock[0] < 2 * choice.BUDGET_S + 2


@pytest.mark.parametrize("positions", [3, 4, 6, 20])
def test_short_contexts_are_tried_as_far_as_they_go(positions: int, home: Path, tmp_path: Path) -> None:
    """Catches a trial that runs past the end of a small model's context."""
    folders = save_tiny_pair(tmp_path / "short")
    for folder in folders:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": positions}))
    assert "ms a step" in loaded(folders).backends


def test_a_choice_of_a_busy_minute_is_made_again(llama: Folders, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches threads that were chosen while others had the machine and were kept for ever, as equal steps looked steady, and
    measuring at every load."""
    monkeypatch.setattr(choice, "_THREADED", {"lean"})
    measured, own = [], choice._measured
    monkeypatch.setattr(choice, "_measured", lambda *a: measured.append(1) or own(*a))
    loaded(llama)
    found = json.loads(memory(home).read_text())
    lean = next(name for name in found["round_s"] if name.startswith("lean"))
    memory(home).write_text(json.dumps(found | {"round_s": {lean: 90.0, "eager": 99.0}, "is_steady": True}))
    loaded(llama)
    assert len(measured) == 2
    assert max(json.loads(memory(home).read_text())["round_s"].values()) < 90.0
    memory(home).write_text(json.dumps(found | {"round_s": {lean: 1e-9, "eager": 99.0}, "is_steady": True}))
    loaded(llama)
    assert len(measured) == 2, "not at every load"


def test_threads_that_wait_for_others_are_no_lasting_measurement() -> None:
    """Catches a pair that runs on one thread ever after, as the machine was at work when it was loaded first."""
    one, mixed, two = NATIVE
    lean = BackendOption(kinds=("lean", "lean"))
    assert not _is_crowded({lean: 9.0, one: 6.0, mixed: 5.0, two: 4.5})
    assert not _is_crowded({one: 1.0, two: 1.6}), "a small model may be quicker on one"
    assert _is_crowded({lean: 9.0, one: 6.7, mixed: 15.9, two: 42.9})


def test_what_was_not_tried_and_what_takes_its_time_is_told(
    llama: Folders, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a fast backend that is missing from the choice for a reason that nobody sees, and a silent load of minutes."""
    with caplog.at_level("INFO", logger="specdecpp.loading"):
        told = loaded(llama, None).backends
    assert "; native: its heads are 8 wide, not a multiple of 16" in told
    assert "Not tried: graphs: its weights are not on a GPU; " in told
    for words in ("reading the tokenizer", f"reading the weights of {llama[1]}", "comparing LeanModel", "trying eager"):
        assert words in caplog.text


def test_checks_are_made_once(llama: Folders, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches forward passes at each load that compare what was compared before; a check that is skipped for another config,
    other weights or other code; and backends that are made although others were chosen."""
    checked: list[str] = []
    own = probe.check
    monkeypatch.setattr(
        probe, "check", lambda backend, *a, **k: checked.append(type(backend).__name__) or own(backend, *a, **k)
    )
    target, draft = (Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in llama)
    for backend in ("lean", BOTH, BOTH):
        loaded((target, draft), backend)
    assert checked == ["LeanModel"] * 2, "of target and draft"
    monkeypatch.setattr(EagerModel, "_probe", lambda self: pytest.fail("asked again"))
    loaded((target, draft), "eager")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    loaded((target, draft), "lean")
    assert len(checked) == 3
    monkeypatch.setattr(checks, "code", lambda: "another version")
    loaded((target, draft), "lean")
    assert len(checked) == 5


@pytest.mark.parametrize("kind", BOTH)
def test_one_name_for_both_is_loaded_once(kind: str, llama: Folders, home: Path) -> None:
    """Catches weights that lie in memory twice where a model is named as its own draft."""
    pair = loaded((llama[0], llama[0]), kind)
    assert isinstance(pair.target, EagerModel)
    assert isinstance(pair.draft, EagerModel)
    assert pair.target.model is pair.draft.model


# Memory


def test_weights_are_not_copied_beyond_the_memory_there_is(llama: Folders, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a load that ends where the system kills it, because backends that were only to be tried copied the weights."""
    size = sum(checkpoint(name).num_bytes for name in llama)
    for free, is_lean in ((size - 1, False), (size, True), (None, True)):
        monkeypatch.setattr(cache_dir, "free_bytes", lambda free=free: free)
        _, refused = choice._options(*map(checkpoint, llama), None)
        assert any(reason.startswith("lean: its copy of the weights takes 0.0 GB") for reason in refused) == (not is_lean)
    monkeypatch.setattr(cache_dir, "free_bytes", lambda: 0)
    pair = loaded(llama)
    assert type(pair.target) is EagerModel
    assert "are free (ask for it by name)" in pair.backends
    assert type(loaded(llama, "lean").target) is LeanModel, "an order is followed"


@needs_compiler
def test_copies_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches backends that are weighed one by one although all of them lie in memory while they are tried."""
    pair = [checkpoint(REFERENCE / role, torch.float32) for role in ("target", "draft")]
    size = sum(model.num_bytes for model in pair)
    for free, kinds in ((size, {"native", "eager"}), (2 * size, {"native", "lean", "eager"})):
        monkeypatch.setattr(cache_dir, "free_bytes", lambda free=free: free)
        options, _ = choice._options(*pair, ("native", "lean", "eager"))
        assert {option.kinds[0] for option in options} == kinds


@needs_compiler
def test_a_target_without_a_draft_is_tried_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a target that is held and timed twice, as its own draft, where draft tokens are copied from the text."""
    target = checkpoint(REFERENCE / "target", torch.float32)
    monkeypatch.setattr(cache_dir, "free_bytes", lambda: 2 * target.num_bytes)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    options, _ = choice._options(target, None, ("native", "lean"))
    assert options == [NATIVE[0], NATIVE[2], BackendOption(kinds=("lean", "lean"))]
    made = choice.choose(target, None, vocab_size=target.num_rows, kinds=("native", "eager"))
    assert isinstance(made.draft, SuffixDrafter)


def test_the_memory_that_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches kilobytes for bytes, a container's limit that is overlooked, and its file cache that counts as taken."""
    monkeypatch.setattr(cache_dir, "CGROUP", tmp_path)
    free = cache_dir.free_bytes()
    assert free is None or 2**26 < free < 2**46
    for name, told in (("current", "700"), ("max", "1000"), ("stat", "anon 300\ninactive_file 250\nactive_file 50\n")):
        (tmp_path / f"memory.{name}").write_text(told)
    assert cache_dir.free_bytes() == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert cache_dir.free_bytes() is None or cache_dir.free_bytes() != 600


# What is remembered


def test_figures_of_a_busy_machine_are_believed_for_ten_minutes(home: Path) -> None:
    """Catches a machine that was busy once and is taken for slow ever after, and one that is measured at every start."""
    assert cache_dir.is_steady([[1.0, 1.1, 1.2], [2.0, 2.1, 9.0]])
    assert not cache_dir.is_steady([[1.0, 1.1, 1.2], [2.0, 5.0, 9.0]])
    assert cache_dir.is_steady([[1.0, 9.0]]), "two say nothing"
    for is_steady in (True, False):
        cache_dir.remember("costs", {"a": 1}, {"x": 2}, is_steady=is_steady)
        (file,) = home.iterdir()
        assert cache_dir.recall("costs", {"a": 1}) is not None
        then = time.time() - cache_dir.BELIEVED_S - 10
        os.utime(file, (then, then))
        assert (cache_dir.recall("costs", {"a": 1}) is not None) == is_steady


def test_what_is_remembered_is_of_this_machine(home: Path) -> None:
    """Catches figures of other facts that are believed, and a folder that cannot be written and stops the work."""
    cache_dir.remember("costs", {"a": 1}, {"x": 2})
    assert (cache_dir.recall("costs", {"a": 1}) or {})["x"] == 2
    assert cache_dir.recall("costs", {"a": 2}) is None
    assert cache_dir.recall("runners", {"a": 1}) is None
    shutil.rmtree(home)
    home.write_text("a file where a folder should be")
    assert cache_dir.recall("costs", {"a": 1}) is None
    cache_dir.remember("costs", {"a": 1}, {"x": 2})
    assert cache_dir.recall("costs", {"a": 1}), "as long as this process lives"
    assert home.is_file()
