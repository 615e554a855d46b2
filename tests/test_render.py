"""Live text: words whole, code as it is, origins told apart with and without colour."""

import io
import re
from typing import Any

import pytest
from rich.console import Console

from specdecpp.policies.protocol import LIMIT
from specdecpp.report import render
from specdecpp.session import Origin, Piece, Step

COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9\d|10\d)[;m]")


def shown(text: str, *, indent: int = 2, origins: tuple[Origin, ...] = ("accepted",), **options: Any) -> str:
    """What LiveText prints on 40 columns for an answer of one-character tokens, whose origins take turns."""
    out = Console(file=io.StringIO(), width=40, **options)
    live = render.LiveText(out, indent=indent)
    for i, character in enumerate(text):
        piece = Piece(token=0, text=character, origin=origins[i % len(origins)])
        timing = {"draft_s": 0.0, "head_s": 0.0, "verify_s": 0.0, "other_s": 0.0}
        live.push(
            Step(
                pieces=(piece,),
                num_drafted=1,
                num_accepted=1,
                stop=LIMIT,
                judged=(),
                finish_reason=None,
                **timing,
            )
        )
    live.finish()
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def test_live_text_keeps_words_whole_and_code_as_it_is():
    """Catches a word torn at the edge, an indentation that is lost, and a last word that is never printed."""
    words = "the quick brown fox jumps over the lazy dog and runs into the forest"
    lines = shown(words).splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) <= 38
    assert " ".join(line.strip() for line in lines) == words
    code = "def f(x):\n    if x:\n\n        return 1"
    assert shown(code) == "".join(f"  {line}".rstrip() + "\n" for line in code.splitlines())
    assert shown(code, indent=0) == code + "\n"


@pytest.mark.parametrize("no_color", [True, False])
def test_origins_differ_with_and_without_colour(no_color: bool):
    """Catches two origins that look the same once colour is gone."""
    terminal = {"force_terminal": True, "color_system": "standard", "no_color": no_color, "legacy_windows": False}
    looks = {shown("x", origins=(origin,), **terminal) for origin in render.ORIGINS}
    assert len(looks) == 3
    assert any(COLOUR.search(look) for look in looks) is not no_color
    assert "\x1b" not in shown("x", origins=("correction",))


def test_live_text_counts_cells_not_characters():
    """Catches wide characters that run over the edge of the terminal."""
    lines = shown("字字字字字字字字 " * 4).splitlines()
    assert [line.strip() for line in lines] == ["字字字字字字字字 字字字字字字字字"] * 2
