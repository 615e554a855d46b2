"""The commands of docs/your-pair.md: a cluster of two Ray nodes that asks for a token, and what is spread over it.

Both nodes are processes of this machine. Two network namespaces, which need root, are told of on that page.
"""

import hashlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from specdecpp.loading.pair import REFERENCE

BIN = Path(sys.executable).parent
RECIPE = """
collect:
  sources: [{path: prompts.jsonl, prompt: text, dev_share: 0.3}]
  max_tokens: 24
  shard_size: 2
  batch: 2
"""
NUM_SHARDS = 4


@dataclass(frozen=True, kw_only=True)
class Cluster:
    address: str
    token: Path
    """The folder of a person who has the token, as `~` is elsewhere."""


def environment(home: Path, **more: str) -> dict[str, str]:
    """That of a machine whose person lives in a folder; nothing of Ray's is inherited."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return kept | {"HOME": str(home), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"} | more


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def node(log: Path, *options: str, env: dict[str, str]) -> Iterator[None]:
    """`ray start` until the block ends."""
    with log.open("w") as out:
        command = [str(BIN / "ray"), "start", "--block", "--num-cpus", "1", "--node-ip-address", "127.0.0.1", *options]
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, env=env)
    try:
        wait_for("Ray runtime started", log, process)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def wait_for(line: str, log: Path, process: "subprocess.Popen[bytes]") -> None:
    for _ in range(1200):
        if line in log.read_text():
            return
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
            break
    pytest.fail(f"the node did not start:\n{log.read_text()[-3000:]}")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A first node whose person has a token, and a second one that says it."""
    home, port = tmp_path_factory.mktemp("home"), free_port()
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text(secrets.token_hex(32))
    folder = tmp_path_factory.mktemp("cluster")
    first, second = environment(home), environment(home, RAY_AUTH_MODE="token")
    with ExitStack() as stack:
        started = node(folder / "first", "--head", "--port", str(port), "--include-dashboard", "false", env=first)
        stack.enter_context(started)
        stack.enter_context(node(folder / "second", "--address", f"127.0.0.1:{port}", env=second))
        yield Cluster(address=f"127.0.0.1:{port}", token=home)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    lines = [json.dumps({"text": f"Tom has {i} apples and buys {i + 2} more."}) for i in range(2 * NUM_SHARDS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder / "recipe.yaml"


def collect(recipe: Path, out: str, *options: str, env: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    command = [str(BIN / "specdecpp"), "collect", recipe.name, "--out", out, "--quiet", *options]
    return subprocess.run(command, cwd=recipe.parent, env=env, capture_output=True, text=True, timeout=300, check=False)


def hashes(labels: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(labels.iterdir())}


def status(cluster: Cluster, env: dict[str, str]) -> str:
    """What `ray status` says; it lags some seconds behind."""
    command = [str(BIN / "ray"), "status", "--address", cluster.address]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True).stdout


def test_two_nodes_make_the_same_bytes_as_one_machine(cluster: Cluster, recipe: Path) -> None:
    """Catches work that depends on where it is done, and a second node that the commands of the page do not bring in."""
    ours = environment(cluster.token, RAY_AUTH_MODE="token")
    assert any("/2.0 CPU" in status(cluster, ours) for _ in range(30)), "the second node did not join"
    done = collect(recipe, "there", "--ray", cluster.address, env=ours)
    assert done.returncode == 0, done.stderr
    assert collect(recipe, "here", env=ours).returncode == 0
    found = hashes(recipe.parent / "there" / "labels")
    assert len(found) > NUM_SHARDS
    assert found == hashes(recipe.parent / "here" / "labels")


def test_a_drafts_text_is_the_same_bytes_as_of_one_machine(cluster: Cluster, tmp_path: Path) -> None:
    """Catches text that depends on who writes it or when, a target that a worker looks for in a folder of its own, and a draft
    that is trained on something else then."""
    rows = [json.dumps({"text": f"Tom has {i} apples and buys {i + 2} more."}) for i in range(60)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    shutil.copytree(REFERENCE / "target", tmp_path / "target")
    options = ["--prompts", "prompts.jsonl", "--prompt", "text", "--tokens", "1500", "--max-tokens", "8", "--epochs", "1"]
    options += ["--layers", "1+1", "--output-tokens", "500", "--no-head", "--quiet"]
    found = {}
    for name, more in (("there", ["--ray", cluster.address]), ("here", [])):
        command = [str(BIN / "specdecpp"), "distil", "target", "--out", name, *options, *more]
        env = environment(cluster.token, RAY_AUTH_MODE="token")
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        found[name] = hashes(tmp_path / name / "text"), hashes(tmp_path / name / "draft")
    assert len(found["there"][0]) > 2
    assert found["there"] == found["here"]


@pytest.mark.parametrize("mode", [{}, {"RAY_AUTH_MODE": "token"}], ids=["does not say it", "lacks it"])
def test_who_lacks_the_token_or_does_not_say_it_is_told_what_to_do(
    mode: dict[str, str], cluster: Cluster, recipe: Path, tmp_path: Path
) -> None:
    """Catches Ray's own "failed to connect", from which nobody guesses that a token, or saying so, was missing."""
    home = tmp_path if mode else cluster.token
    done = collect(recipe, "refused", "--ray", cluster.address, env=environment(home, **mode))
    assert done.returncode != 0
    said = " ".join(done.stderr.split())
    assert f"the Ray cluster at '{cluster.address}' could not be joined" in said
    assert "~/.ray/auth_token" in said
    assert "RAY_AUTH_MODE=token" in said


def test_an_address_where_nothing_is_says_so(recipe: Path, tmp_path: Path) -> None:
    """Catches the minutes for which Ray itself would try."""
    done = collect(recipe, "nowhere", "--ray", f"127.0.0.1:{free_port()}", env=environment(tmp_path))
    assert done.returncode != 0
    assert "nothing answers at" in " ".join(done.stderr.split())
