"""The picture and the table of docs/results.md: what every rule made of the same recordings.

python docs/figures/rules.py

benchmarks/results/rules.json -> docs/figures/rules.svg, and the table of docs/results.md between two marks
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdecpp.report.pictures import Picture

HERE = Path(__file__).parent
RESULTS, PAGE = HERE.parents[1] / "benchmarks/results/rules.json", HERE.parent / "results.md"
BEGIN, END = "<!-- written by docs/figures/rules.py -->\n", "<!-- until here -->\n"
FREE, TUNED = "cost-aware by q", ", tuned"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A rule over all cells: speed-ups with the setting it comes with, with the one that was best on development prompts (the
    same where there is nothing to choose), and by how many per cent the default rule without a head is ahead of the latter."""

    name: str
    setting: str
    usual: tuple[float, ...]
    tuned: tuple[float, ...]
    behind: tuple[float, ...]
    worst_cell: str


def rows(results: Mapping[str, Any]) -> list[Row]:
    """The rules, by their mean."""
    cells = results["replay"]
    keys = [key for key in cells[0]["speed_up"] if all(key in cell["speed_up"] for cell in cells)]
    names = {key.removesuffix(TUNED) for key in keys if key.endswith(TUNED)}
    found = []
    for key in keys:
        name, _, setting = key.rpartition(" ")
        if key.endswith(TUNED):
            continue
        if name not in names:
            name, setting = key, ""
        of = {kind: tuple(cell["speed_up"][kind] for cell in cells) for kind in (key, name + TUNED if setting else key, FREE)}
        tuned = of[name + TUNED] if setting else of[key]
        worst = cells[tuned.index(min(tuned))]
        found.append(
            Row(
                name=name,
                setting=setting,
                usual=of[key],
                tuned=tuned,
                behind=tuple(100 * (free / other - 1) for free, other in zip(of[FREE], tuned, strict=True)),
                worst_cell=f"{worst['pair']}, {worst['sampling'].replace(' top_p 0.9', '')}, {worst['costs']}, {worst['set']}",
            )
        )
    return sorted(found, key=lambda row: (-statistics.fmean(row.tuned), row.name))


def _recorded(cells: Sequence[Mapping[str, Any]], pair: str) -> str:
    """What of a pair was recorded."""
    own = [cell for cell in cells if cell["pair"] == pair]
    temperatures = ", ".join(dict.fromkeys(cell["sampling"].split()[0].rstrip(",") for cell in own))
    return f"{pair} at {temperatures}, {own[0]['prompts']} prompts a set"


def table(results: Mapping[str, Any]) -> str:
    """The table, and what it is of."""
    found = rows(results)
    cells = results["replay"]
    pairs = "; ".join(_recorded(cells, pair) for pair in dict.fromkeys(cell["pair"] for cell in cells))
    text = (
        f"Speed-ups over the target alone in {len(cells)} cells (temperature x costs x set), by replay of the same answers\n"
        f"with the same coins: {pairs}.\n"
        "Settings are chosen on development prompts for each sampling and kind of costs.\n"
        "The last two columns: by how many per cent `cost-aware` without a head is ahead of the rule so tuned.\n\n"
        "| rule | tuned: worst | mean | its worst cell | as it comes | worst | mean | ahead, %: worst | mean |\n"
        "|---|---:|---:|---|---:|---:|---:|---:|---:|\n"
    )
    for row in found:
        usual = [row.setting, *_two(row.usual)] if row.setting else ["", "", ""]
        behind = [f"{min(row.behind):+.1f}", f"{statistics.fmean(row.behind):+.1f}"] if row.name != FREE else ["", ""]
        text += f"| {' | '.join([row.name, *_two(row.tuned), row.worst_cell, *usual, *behind])} |\n"
    return text


def written(page: str, results: Mapping[str, Any]) -> str:
    """The page with its table made anew."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + "\n" + table(results) + "\n" + END + rest.partition(END)[2]


def said(results: Mapping[str, Any]) -> str:
    """The picture in words."""
    return "Speed-up in the worst cell and on average: " + "; ".join(
        f"{row.name} {' and '.join(_two(row.tuned))}" for row in rows(results)
    )


def picture(results: Mapping[str, Any]) -> "Picture":
    """A line for each rule, from its worst cell to its mean: as it is tuned, and under it as it comes."""
    from specdecpp.report.pictures import figure, finished, styled
    from specdecpp.report.theme import LIGHT

    found = rows(results)
    with styled():
        title = "Speed-up from the worst cell to the mean; ring: the mean with the setting a rule comes with"
        drawn = figure(title, height=0.8 + 0.24 * len(found), width=7.0)
        axes = drawn.subplots()
        axes.axvline(1, color=LIGHT["ink"], linestyle="--", linewidth=1)
        for i, row in enumerate(found):
            colour = LIGHT["accent" if row.name.startswith("cost-aware") else "soft"]
            worst, mean = min(row.tuned), statistics.fmean(row.tuned)
            axes.plot([worst, mean], [i, i], color=colour, linewidth=2)
            axes.plot([mean], [i], "o", color=colour)
            if row.setting:
                axes.plot([statistics.fmean(row.usual)], [i], "o", markerfacecolor="none", markeredgecolor=colour)
        axes.set(ylim=(len(found) - 0.5, -0.5), yticks=range(len(found)), yticklabels=[row.name for row in found])
        axes.set(xlabel="speed-up over the target alone")
        axes.grid(visible=False, axis="y")
        return finished(drawn, said(results), name="rules")


def _two(values: Sequence[float]) -> list[str]:
    return [f"{min(values):.2f}", f"{statistics.fmean(values):.2f}"]


def main() -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    (HERE / "rules.svg").write_text(picture(results).svg, encoding="utf-8")
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
