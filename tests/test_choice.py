"""Which backends a pair gets: by name, or the first that can run it."""

import json
import os
import shutil
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributions import unchecked
from gguf_files import model_of, written

from specdecpp import Pair, cache_dir, load_pair
from specdecpp.backends import EagerModel, LeanModel, LlamaCppModel, NativeModel, native, probe
from specdecpp.errors import BackendError, MissingExtraError
from specdecpp.loading import choice, models
from specdecpp.loading.gguf import GGUF
from specdecpp.loading.gguf_writing import new_file
from specdecpp.loading.models import Checkpoint
from specdecpp.testing import save_tiny_pair, tiny_model, tiny_tokenizer

Folders = tuple[Path, Path]
BOTH = "lean", "eager"
without_llama_cpp = pytest.mark.skipif(find_spec("llama_cpp") is not None, reason="llama.cpp is installed")


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


def test_a_name_is_an_order_and_of_several_the_first_is_taken(llama: Folders, gpt2: Folders, home: Path) -> None:
    """Catches an order that is taken for a wish, and a wish that fails where one of its backends cannot do it."""
    pair = loaded(llama, "lean")
    assert type(pair.target) is LeanModel
    assert pair.backends == "lean (as asked)"
    with pytest.raises(BackendError, match=r"no backend can run .*lean: it is not one of"):
        loaded(gpt2, "lean")
    with unchecked(), pytest.raises(ValueError, match=r"there is no backend 'turbo'. Backends: graphs"):
        loaded(llama, "turbo")
    assert type(loaded(gpt2).target) is EagerModel
    assert type(loaded(llama, ("native", "eager", "lean")).target) is EagerModel
    told = loaded(llama, None).backends
    assert told.startswith(
        "lean (not others: graphs: its weights are not on a GPU; native-int8: its weights are not quantised (name a GGUF "
        "file); native: its heads are 8 wide, not a multiple"
    )


def test_slow_passes_for_want_of_compiled_code_are_told(
    llama: Folders, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches an install that is six times as slow as it could be without a word, and the word where it would not help."""
    monkeypatch.setattr(native.library, "refusal", lambda: "there is no C++ compiler.")
    loaded(llama, None)  # its heads are too narrow for compiled code
    load_pair("reference", backend="lean")
    assert not caplog.records
    load_pair("reference")
    assert [record.getMessage() for record in caplog.records] == [
        "compiled code would be several times as fast: there is no C++ compiler."
    ]


def test_the_faster_threads_are_taken_and_remembered(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a choice against its own figures or one that follows the noise from load to load; one thread, chosen while others
    had the machine, that is kept for ever; and half a file that stops a pair from being loaded."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    model: Any = SimpleNamespace(with_threads=lambda num: SimpleNamespace(new_cache=lambda: num))
    for seconds, is_steady in (({1: 0.1, 2: 0.2}, False), ({1: 0.2, 2: 0.1}, True), ({1: 7.0, 2: 6.0}, True)):
        monkeypatch.setattr(choice, "_pass_s", seconds.__getitem__)
        best = min(seconds, key=seconds.__getitem__)
        assert choice._num_threads(model, {}) == best
        (memory,) = home.glob("threads-*.json")
        assert json.loads(memory.read_text())["is_steady"] == is_steady
        monkeypatch.setattr(choice, "_pass_s", lambda cache: pytest.fail("measured again"))
        assert choice._num_threads(model, {}) == best
        memory.write_text('{"num": 1, "half a fi')


@pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("positions", [3, 256])
def test_threads_of_compiled_code_are_told(positions: int, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a trial that runs past the end of a small model's context, and a choice that does not reach both models."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for role, seed in (("target", 1), ("draft", 2)):
        model = tiny_model("llama", head_dim=16, max_position_embeddings=positions, seed=seed)
        model.save_pretrained(tmp_path / role)
        tiny_tokenizer().save_pretrained(tmp_path / role)
    pair = loaded((tmp_path / "target", tmp_path / "draft"), "native")
    assert isinstance(pair.target, NativeModel)
    assert isinstance(pair.draft, NativeModel)
    assert pair.backends == f"native, {pair.target.num_threads} of 2 threads (as asked)"
    assert pair.draft.num_threads == pair.target.num_threads


def test_what_takes_its_time_is_told(llama: Folders, home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Catches a silent load of minutes."""
    with caplog.at_level("INFO", logger="specdecpp.loading"):
        loaded(llama, None)
    for words in ("reading the tokenizer", f"weights of {llama[1]}", "comparing LeanModel"):
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
    for backend in ("lean", BOTH, "eager"):
        loaded((target, draft), backend)
    assert checked == ["LeanModel"] * 2, "of target and draft"
    monkeypatch.setattr(EagerModel, "_probe", lambda self: pytest.fail("asked again"))
    loaded((target, draft), "eager")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    loaded((target, draft), "lean")
    assert len(checked) == 3
    monkeypatch.setattr(models, "code", lambda: "another version")
    loaded((target, draft), "lean")
    assert len(checked) == 5


def test_one_name_for_both_is_loaded_once(llama: Folders, home: Path) -> None:
    """Catches weights that lie in memory twice where a model is named as its own draft."""
    pair = loaded((llama[0], llama[0]), "eager")
    assert isinstance(pair.target, EagerModel)
    assert isinstance(pair.draft, EagerModel)
    assert pair.target.model is pair.draft.model


# llama.cpp where it is not installed, or is and cannot be loaded


@without_llama_cpp
def test_a_file_of_another_architecture_says_how_to_install_llama_cpp(llama: Folders, tmp_path: Path):
    """Catches an ImportError from the depths, a file that is looked for on the hub, and a checkpoint that is loaded first."""
    with new_file(tmp_path / "x.gguf", "mamba", {}):
        pass
    for names in ((tmp_path / "x.gguf", llama[1]), (llama[0], tmp_path / "x.gguf")):
        with pytest.raises(MissingExtraError, match=r"its architecture is mamba.*pip install 'specdecpp\[gguf\]'"):
            loaded(names, None)


@without_llama_cpp
def test_asking_for_llama_cpp_without_it_says_what_is_missing(llama: Folders, tmp_path: Path):
    """Catches a silent fall back on another backend, and a choice among several that fails because one is not there."""
    file = written(tmp_path / "m.gguf")
    with pytest.raises(BackendError, match=r"llama_cpp is not installed \(pip install 'specdecpp\[gguf\]'\)"):
        loaded((file, file), "llama.cpp")
    with pytest.raises(BackendError, match=r"llama\.cpp: it runs GGUF files, and this is a checkpoint \(name a file\)"):
        loaded(llama, "llama.cpp")
    assert loaded(llama, ("llama.cpp", "eager")).backends.startswith("eager")


@without_llama_cpp
@pytest.mark.parametrize("fault", ['RuntimeError("no shared library")', 'ImportError("no shared library")'])
def test_a_llama_cpp_that_cannot_be_loaded_says_what_to_do(
    fault: str, llama: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Catches a traceback of ctypes, the advice to install what is installed, and a choice that fails with it."""
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "__init__.py").write_text(f"raise {fault}")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackendError, match=r"cannot be loaded \(no shared library\).*--force-reinstall"):
        LlamaCppModel("x.gguf")
    assert loaded(llama, ("llama.cpp", "eager")).backends.startswith("eager")


# Memory


def test_weights_are_not_copied_beyond_the_memory_there_is(llama: Folders, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a load that ends where the system kills it, because a backend copied the weights."""
    size = sum(Checkpoint(name, dtype="auto", device=None, device_map=None).num_bytes for name in llama)
    for free, kind in ((size - 1, EagerModel), (size, LeanModel), (None, LeanModel)):
        monkeypatch.setattr(cache_dir, "free_bytes", lambda free=free: free)
        pair = loaded(llama)
        assert type(pair.target) is kind
        assert ("lean: its copy of the weights takes 0.0 GB" in pair.backends) == (kind is EagerModel)
    monkeypatch.setattr(cache_dir, "free_bytes", lambda: 0)
    assert type(loaded(llama, "lean").target) is LeanModel, "an order is followed"


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


@pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")
def test_a_draft_that_rounding_changes_too_much_has_exact_activations_and_the_target_has_not(
    home: Path, tmp_path: Path
) -> None:
    """Catches a target that is slower because of its draft: what rounding leaves of a draft concerns the draft alone."""
    target, draft = (model_of(head_dim=16, seed=seed) for seed in (1, 2))
    with torch.no_grad():
        for layer in draft.model.layers:
            layer.input_layernorm.weight[::32] = 15.0  # rounded beside it, all others of a block of 32 are 0
            for matrix in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                matrix.weight[:, ::32] = 0.0
        draft.model.norm.weight[::32] = 15.0
        draft.lm_head.weight[:, ::32] = 0.0
    files = tuple(written(tmp_path / f"{name}.gguf", model, "q8_0") for name, model in (("p", target), ("q", draft)))
    with pytest.raises(BackendError, match="gives other logits"):
        GGUF(files[1]).backend("native-int8", vocab_size=draft.config.vocab_size)
    for kind in (None, "native-int8"):
        pair = loaded(files, kind)
        assert pair.backends.startswith("native-int8 with native for the draft")
        assert [model.activations for model in (pair.target, pair.draft)] == ["int8", "int16"]
