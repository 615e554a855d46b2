"""`specdecpp chat`: what the model is shown, what is forgotten, and a terminal on which answers are stopped."""

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import call, named, refused

from specdecpp.cli.chat import HELP, recalled
from specdecpp.decoder import Decoder
from specdecpp.loading.pair import Pair, load_pair

TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    """A tiny pair whose target has a template; it answers with characters."""
    (folder / "target" / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    return load_pair(folder / "target", draft=folder / "draft")


def options(folder: Path, *more: str) -> list[str]:
    return ["chat", *named(folder), "--temperature", "0", "--policy", "fixed:2", *more]


def talk(folder: Path, text: str, *more: str) -> Any:
    return call(*options(folder, *more), stdin=text)


def said(pair: Pair, *messages: str, system: str | None = None) -> str:
    """The target's greedy answer to a conversation, user first."""
    roles = [{"role": ("user", "assistant")[i % 2], "content": m} for i, m in enumerate(messages)]
    first = [] if system is None else [{"role": "system", "content": system}]
    return Decoder(pair).generate([*first, *roles], max_tokens=5, temperature=0).text


def test_the_conversation_is_remembered(folder: Path, pair: Pair) -> None:
    """Catches a question that is asked without what was said before it, and a line that is answered twice or not at all."""
    one = said(pair, "ab")
    two = said(pair, "ab", one, "cd")
    assert two != said(pair, "cd")
    result = talk(folder, "ab\n\n  cd\n", "--max-tokens", "5")
    assert (result.exit_code, result.stdout) == (0, f"{one}\n{two}\n")


def test_a_new_conversation_keeps_what_the_model_is_told_first(folder: Path, pair: Pair) -> None:
    """Catches /new that leaves something behind or loses the system message, and /exit that does not end."""
    result = talk(folder, "ab\n/new\ncd\n/exit\nef\n", "--max-tokens", "5", "--system", "be short")
    first, second = said(pair, "ab", system="be short"), said(pair, "cd", system="be short")
    assert result.stdout == f"{first}\n{second}\n"


def test_an_unknown_command_is_not_for_the_model(folder: Path, pair: Pair) -> None:
    """Catches /help that the model answers, and a path that it does not get to see."""
    result = talk(folder, "/help\n/quit\n/etc/hosts\n", "--max-tokens", "5")
    assert (result.exit_code, result.stdout) == (0, said(pair, "/etc/hosts") + "\n")
    assert result.stderr.count(HELP) == 2


def test_the_oldest_turns_are_forgotten(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a conversation that ends in an error when it is longer than the context, and one that loses its beginning."""
    length = pair.target.max_length
    assert length is not None
    turns = [{"role": ("user", "assistant")[i % 2], "content": str(i % 10) * (length // 8)} for i in range(9)]
    start = [{"role": "system", "content": "s"}]
    kept = recalled(Decoder(pair), [*start, *turns], 1, 8)
    assert kept == [*start, *turns[len(turns) - len(kept) + 1 :]]
    assert 3 <= len(kept) < 9
    assert kept[1]["role"] == "user"
    assert "forgotten" in capsys.readouterr().err
    assert recalled(Decoder(pair), [*start, *turns[:3]], 1, 8) == [*start, *turns[:3]]


def test_a_line_that_is_too_long_is_told_and_left_out(folder: Path, pair: Pair) -> None:
    """Catches a conversation that is lost by one line."""
    assert pair.target.max_length is not None
    result = talk(folder, "x" * (pair.target.max_length + 9) + "\nab\n", "--max-tokens", "5")
    assert (result.exit_code, result.stdout) == (0, said(pair, "ab") + "\n")
    assert "Shorten the prompt" in result.stderr


def test_a_model_without_a_template_is_refused(folder: Path) -> None:
    """Catches a conversation in which nobody can tell who said what."""
    names = ["--target", folder / "draft", "--draft", folder / "draft"]
    assert "has no chat template" in refused("chat", *names, code=1, stdin="ab\n")


def test_an_interrupt_stops_the_answer_and_not_the_program(folder: Path, tmp_path: Path) -> None:
    """Catches Ctrl-C that ends the conversation: here it stops an endless answer, and Ctrl-D ends."""
    for name in ("target", "draft"):
        shutil.copytree(folder / name, tmp_path / name)
        path = tmp_path / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 200_000}))
    command = [sys.executable, "-m", "specdecpp", *options(tmp_path, "--max-tokens", "100000")]
    master, slave = pty.openpty()
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
    os.close(slave)
    try:
        screen = Screen(master)
        screen.until("> ")
        os.write(master, b"ab\n")
        screen.until("ab\r\n")
        screen.more(40)
        process.send_signal(signal.SIGINT)
        screen.until("stopped]")
        screen.until("> ")
        os.write(master, b"\x04")
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)


class Screen:
    """What a program writes to a terminal."""

    def __init__(self, master: int):
        self._master, self._text = master, ""

    def until(self, text: str) -> None:
        """Read up to this text and forget what was before."""
        while text not in self._text:
            self._read(f"without {text!r}")
        self._text = self._text.partition(text)[2]

    def more(self, num: int) -> None:
        """Read until there are so many characters."""
        while len(self._text) < num:
            self._read(f"{num} characters missing")

    def _read(self, what: str) -> None:
        ready, _, _ = select.select([self._master], [], [], 120)
        assert ready, f"nothing for two minutes, {what}: {self._text[-300:]!r}"
        self._text += os.read(self._master, 4096).decode(errors="replace")
