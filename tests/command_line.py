"""The command line, called in this process, and the options that name a tiny pair."""

from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner, Result

from specdecpp import cli
from specdecpp.head import AcceptanceHead, HeadCard


def call(*arguments: object, stdin: str | None = None) -> Result:
    """A call with 80 columns."""
    return CliRunner(env={"COLUMNS": "80"}).invoke(cli.app, [*map(str, arguments)], input=stdin, prog_name="specdecpp")


def refused(*arguments: object, code: int, stdin: str | None = None) -> str:
    """Standard error of a call that must fail, with nothing on stdout and without a traceback."""
    result = call(*arguments, stdin=stdin)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert "Traceback" not in result.stderr
    return result.stderr


def named(folder: Path, *, has_head: bool = False) -> list[str]:
    """Options that name the pair in a folder, and its head."""
    names = ["--target", str(folder / "target"), "--draft", str(folder / "draft")]
    return [*names, "--head", str(folder / "head")] if has_head else names


def save_head(folder: Path, **card: Any) -> None:
    """A head of the tiny pair in the same folder."""
    torch.manual_seed(0)
    AcceptanceHead(HeadCard(hidden_size=32, num_layers=1, **card)).save_pretrained(folder / "head")
