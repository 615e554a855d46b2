"""GGUF files by name, where llama.cpp is not installed, or is and cannot be loaded."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from gguf_files import converted

from specdecpp import load_pair
from specdecpp.backends import LlamaCppModel
from specdecpp.errors import BackendError, MissingExtraError
from specdecpp.loading.gguf_writing import new_file
from specdecpp.testing import save_tiny_pair

pytestmark = pytest.mark.skipif(find_spec("llama_cpp") is not None, reason="llama.cpp is installed")


def test_a_file_of_another_architecture_says_how_to_install_llama_cpp(tmp_path: Path):
    """Catches an ImportError from the depths, a file that is looked for on the hub, and a checkpoint that is loaded first."""
    target, draft = save_tiny_pair(tmp_path)
    with new_file(tmp_path / "x.gguf", "mamba", {}):
        pass
    for names in ((tmp_path / "x.gguf", draft), (target, tmp_path / "x.gguf")):
        with pytest.raises(MissingExtraError, match=r"its architecture is mamba.*pip install 'specdecpp\[gguf\]'"):
            load_pair(names[0], draft=names[1])
    with pytest.raises(BackendError, match=r"there is no file nowhere\.gguf"):
        load_pair("nowhere.gguf", draft=draft)


def test_asking_for_llama_cpp_without_it_says_what_is_missing(tmp_path: Path):
    """Catches a silent fall back on another backend, and a choice among several that fails because one is not there."""
    target, draft = save_tiny_pair(tmp_path)
    file = converted("draft", tmp_path / "m.gguf")
    with pytest.raises(BackendError, match=r"llama_cpp is not installed \(pip install 'specdecpp\[gguf\]'\)"):
        load_pair(file, draft=file, backend="llama.cpp")
    with pytest.raises(BackendError, match=r"llama\.cpp: it runs GGUF files, and this is a checkpoint \(name a file\)"):
        load_pair(target, draft=draft, backend="llama.cpp")
    assert load_pair(target, draft=draft, backend=("llama.cpp", "eager")).backends.startswith("eager")


@pytest.mark.parametrize("fault", ['RuntimeError("no shared library")', 'ImportError("no shared library")'])
def test_a_llama_cpp_that_cannot_be_loaded_says_what_to_do(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Catches a traceback of ctypes, the advice to install what is installed, and a choice among several that fails with it."""
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "__init__.py").write_text(f"raise {fault}")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackendError, match=r"cannot be loaded \(no shared library\).*--force-reinstall"):
        LlamaCppModel("x.gguf")
    target, draft = save_tiny_pair(tmp_path)
    assert load_pair(target, draft=draft, backend=("llama.cpp", "eager")).backends.startswith("eager")
