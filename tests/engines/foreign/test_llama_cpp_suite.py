"""llama.cpp's tests of its server with a draft, over `specdecpp serve`. The models are the reference pair, not llama.cpp's."""

import os
import socket
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from sources import LLAMA_CPP, adopted, loaded, stand_in

import specdecpp as sd

LEFT_OUT = {
    "test_slot_ctx_not_exceeded": "the context is the model's own: serve has no --ctx-size",
    "test_with_ctx_shift": "a shifted context is another text than the target's own: serve has none",
}
LAUNCHER = Path(__file__).with_name("llama_server.py")


@cache
def own() -> str:
    """The target's own continuation of the prompt of these tests."""
    decoder = sd.Decoder(sd.load_pair("reference"), policy="none", remember=False)
    return decoder.generate("I believe the meaning of life is", max_tokens=64, temperature=0.0).text


@pytest.fixture(scope="session", autouse=True)
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A command in the place of llama-server."""
    command = tmp_path_factory.mktemp("bin") / "llama-server"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{LAUNCHER}" "$@"\n')
    command.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLAMA_SERVER_BIN_PATH", str(command))
        yield


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    """No server outlives its test."""
    yield
    for server in list(utils.server_instances):
        server.stop()


with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    os.environ["PORT"] = str(free.getsockname()[1])  # of a ServerProcess
folder = LLAMA_CPP.root / "tools/server/tests"
utils = loaded(folder / "utils.py", "llama_cpp_tests_utils", {"wget": stand_in("wget")})
utils.download_file = lambda url: url
utils.ServerProcess.start.__defaults__ = (300,)  # seconds to start in, for slow machines
utils.match_regex = lambda regex, text: text == own()  # theirs looks for words that their model says
globals().update(adopted(loaded(folder / "unit/test_speculative.py", "llama_cpp_tests", {"utils": utils}), LEFT_OUT))
