"""The reference page: every verb of the command line with its own help, every public name with its signature and docstring.

Nothing of it is committed; the site builder makes it from the code (`hooks.py`), and the code is read without importing
torch.
"""

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import griffe
from typer.testing import CliRunner

MEMBERS = (griffe.Kind.FUNCTION, griffe.Kind.ATTRIBUTE)


def reference(source: Path) -> str:
    """The page as markdown. `source` is the folder that holds the package."""
    package = griffe.load("specdecpp", search_paths=[source])
    return "\n".join([*_front(), "## Command line", "", *_verbs(), "## Python", "", *_names(package)])


def _front() -> Iterator[str]:
    yield "# Reference"
    yield ""
    yield "Made from the code while this site is built: what `--help` says, and what the docstrings say."
    yield "[Decoding](decoding.md) and [results](results.md) explain the words."
    yield ""


def _verbs() -> Iterator[str]:
    from specdecpp.cli import VERBS, app

    for verb in ("", *VERBS):
        shown = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(
            app, [*filter(None, [verb]), "--help"], prog_name="specdecpp"
        )
        yield from (f"### specdecpp {verb}".rstrip(), "", "```text", shown.output.strip(), "```", "")


def _names(package: Any) -> Iterator[str]:
    """The public names, grouped by their modules, in the order of `__all__`."""
    found = [package[name].final_target for name in package.exports]
    for module, members in groupby(found, key=lambda member: member.module.path):
        yield from (f"### {module}", "")
        for member in members:
            yield from _member(member)


def _member(member: Any) -> Iterator[str]:
    yield from (f"#### {member.name}", "", *_signature(member), *_text(member))
    if member.kind is griffe.Kind.CLASS:
        yield from _parts(member)


def _parts(of: Any) -> Iterator[str]:
    """Public methods, properties and documented fields of a class, in its own order."""
    for part in of.members.values():
        if part.name.startswith("_") or part.kind not in MEMBERS or not part.has_docstring:
            continue
        is_function = part.kind is griffe.Kind.FUNCTION
        name = _call(part) if is_function else part.name + (f": {part.annotation}" if part.annotation else "")
        yield from (f"`{of.name}.{name}`", "", *(f":   {line}".rstrip() for line in _prose(part).splitlines()[:1]))
        yield from (f"    {line}".rstrip() for line in _prose(part).splitlines()[1:])
        yield ""


def _signature(member: Any) -> Iterator[str]:
    if member.kind is griffe.Kind.ATTRIBUTE:
        return
    call = _call(member)
    if len(call) > 90 and "(" in call:
        name, rest = call.split("(", 1)
        inner, tail = rest.rsplit(")", 1)
        call = "\n".join([f"{name}(", *(f"    {part}," for part in _arguments(inner)), f"){tail}"])
    yield from ("```text", call, "```", "")


def _arguments(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        if c == "," and not depth:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts]


def _call(member: Any) -> str:
    """`name(parameters) -> result`; a class without parameters by its name."""
    parameters = [p for p in member.parameters if p.name not in ("self", "cls")]
    shown, is_named = [], False
    for p in parameters:
        if p.kind is griffe.ParameterKind.keyword_only and not is_named:
            shown.append("*")
            is_named = True
        star = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(p.kind, "")
        hint = f": {p.annotation}" if p.annotation is not None else ""
        default = "" if p.default is None or star else (f" = {p.default}" if hint else f"={p.default}")
        shown.append(f"{star}{p.name}{hint}{default}")
    returns = getattr(member, "returns", None)
    if member.kind is griffe.Kind.CLASS and not parameters:
        return member.name
    return f"{member.name}({', '.join(shown)})" + (f" -> {returns}" if returns is not None else "")


def _text(member: Any) -> Iterator[str]:
    yield from (_prose(member), "")


def _prose(member: Any) -> str:
    """A docstring as markdown: its examples as code, what looks like a tag or emphasis as it stands."""
    text = member.docstring.value if member.has_docstring else ""
    text = re.sub(r" +# doctest: \+SKIP", "", text)
    blocks = []
    for block in re.split(r"\n\s*\n", text):
        if block.startswith(">>>"):
            blocks.append("```pycon\n" + block + "\n```")
        else:
            blocks.append("\n".join(line if line.startswith("    ") else _escaped(line) for line in block.splitlines()))
    return "\n\n".join(blocks)


def _escaped(line: str) -> str:
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(part if part.startswith("`") else re.sub(r"([<*\[\]_])", r"\\\1", part) for part in parts)
