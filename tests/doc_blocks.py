"""The blocks of code in a markdown page, as a reader meets them: fenced ones, and indented ones that are commands.

A directive on the line above a block says what it needs where it cannot run everywhere: `<!-- needs: a GPU -->`.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMMANDS = ("specdecpp", "python", "make", "pip", "vllm", "ip", "scp", "export")
SHELLS = ("console", "shell", "sh", "bash")
_FENCE = re.compile(r"^( *)```(\w*)\s*$")
_NEEDS = re.compile(r"<!-- needs: (.+?) -->\s*$")
_ASSIGNMENT = re.compile(r"^[A-Z_]+=\S*$")


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block: the page, the line of its first code, its language and what it needs."""

    page: Path
    line: int
    language: str
    code: str
    needs: str | None = None

    @property
    def where(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def is_shell(self) -> bool:
        return self.language in SHELLS

    @property
    def commands(self) -> list[list[str]]:
        """The commands of a shell block as words: comments gone, continued lines joined, a leading `$ ` dropped."""
        lines = re.sub(r"\\\n\s*", " ", self.code).splitlines()
        found = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
        return [words for words in found if words]


def blocks(page: Path) -> list[Block]:
    """Every block of a page, in order. A fence without a language whose lines are commands is a shell block."""
    return list(_blocks(page, page.read_text(encoding="utf-8").splitlines()))


def _blocks(page: Path, lines: list[str]) -> Iterator[Block]:
    at, above = 0, ""
    while at < len(lines):
        start, needs = at, _NEEDS.search(above)
        if fence := _FENCE.match(lines[at]):
            at = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == "```")
            code, line, language = [text[len(fence[1]) :] for text in lines[start + 1 : at]], start + 2, fence[2]
            at += 1
        elif lines[at].startswith("    ") and not above.strip().startswith(("-", "*")):
            while at < len(lines) and (lines[at].startswith("    ") or not lines[at].strip()):
                at += 1
            code, line, language = [text[4:] for text in lines[start:at]], start + 1, ""
        else:
            above = lines[at] or above
            at += 1
            continue
        above = ""
        text = "\n".join(code).strip("\n")
        if not language and is_command(text):
            language = SHELLS[0]
        elif text.lstrip().startswith(">>> "):
            language = "pycon"
        elif not language and not fence:
            continue  # a formula
        yield Block(page=page, line=line, language=language, code=text, needs=needs[1] if needs else None)


def is_command(text: str) -> bool:
    """Whether the first line that is no comment calls one of the programs that pages speak of."""
    first = next((line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
    words = [word for word in re.sub(r"\$\([^)]*\)", "", first).split() if not _ASSIGNMENT.match(word)]
    return bool(words) and words[0] in COMMANDS
