"""Which results are older than the code that they measure: the table of README.md here, asked of git.

    python benchmarks/ages.py        # or: make results

For every file in `results/`: the day of the commit that made it (the one it names, else the last that changed it), how many
commits have changed the rooms that it measures since, and the minutes that it takes to make it again. A commit may have
changed a comment only; the count says where to look. Ends with 1 where the table and the folder do not agree.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
NAME = re.compile(r"`([\w.]+\.json)`")


@dataclass(frozen=True, kw_only=True)
class Made:
    """A row of the table: a result, the rooms of the package that it measures, and the minutes that it takes."""

    name: str
    rooms: list[str]
    minutes: str


def made(text: str) -> Iterator[Made]:
    """The results of the table in README.md."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 5:
            for name in NAME.findall(cells[0]):
                yield Made(name=name, rooms=cells[3].split(), minutes=cells[4])


def git(*args: str) -> str:
    """What git says, from the root of the project."""
    return subprocess.run(["git", *args], cwd=HERE.parent, capture_output=True, text=True, check=True).stdout.strip()


def age(result: Made) -> tuple[str, int]:
    """The day it was made, and the commits since that changed its rooms."""
    path = f"benchmarks/results/{result.name}"
    commit, _, day = git("log", "-1", "--format=%H %cs", "--", path).partition(" ")
    if git("status", "--porcelain", "--", path) or not commit:
        return "not committed", 0
    told = json.loads((HERE.parent / path).read_text(encoding="utf-8"))
    named = (told.get("provenance") or told).get("git") or "" if isinstance(told, dict) else ""
    if re.fullmatch(r"[0-9a-f]{40}", named) and (found := git("log", "--format=%cs", "-1", "--ignore-missing", named)):
        commit, day = named, found
    rooms = [f"src/specdecpp/{room}" for room in result.rooms]
    if gone := [room for room in rooms if not (HERE.parent / room).exists()]:
        sys.exit(f"{result.name} names {gone[0]}, which does not exist")
    return day, len(git("log", "--format=%h", f"{commit}..HEAD", "--", *rooms).splitlines())


def main() -> None:
    results = list(made((HERE / "README.md").read_text(encoding="utf-8")))
    print(f"{'result':<24}{'made':<15}{'commits since':>13}{'minutes':>9}  rooms")
    rows = [(*age(result), result) for result in results]
    for day, since, result in sorted(rows, key=lambda row: -row[1]):
        print(f"{result.name:<24}{day:<15}{since:>13}{result.minutes:>9}  {' '.join(result.rooms)}")
    there = {path.name for path in (HERE / "results").glob("*.json")}
    for name in sorted(there ^ {result.name for result in results}):
        sys.exit(f"{name} is in the {'folder' if name in there else 'table'} only")


if __name__ == "__main__":
    main()
