"""`specdecpp evaluate`: heads and free rules side by side on held-out labels, and whether the heads earn their place."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdecpp.cli.common import Json, Labels, Split, print_json, told

if TYPE_CHECKING:
    from rich.table import Table

    from specdecpp.head import AcceptanceHead

EXAMPLES = (
    "specdecpp evaluate out/heads/look_ahead --labels out/labels",
    "specdecpp evaluate out/heads/* --labels out/labels --plot reliability.svg",
)
COLUMNS = {
    "AUROC\n/token": "auroc_token",
    "AUROC\n/round": "auroc_product",
    "over\ncumul. q": "gain_product",
    "ECE\n/token": "ece_token",
    "ECE\n/round": "ece_product",
    "KL\n/token": "kl",
}


def evaluate(
    heads: Annotated[list[str], typer.Argument(metavar="HEAD", help="Folders or hub names; the first is `head`.")],
    labels: Labels,
    split: Annotated[Split, typer.Option(metavar="NAME", help="The answers to use: test, dev or train.")] = Split.test,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Reliability diagram: .svg, .png or .pdf.")] = None,
    as_json: Json = False,
) -> None:
    """Compare heads with the free rules on held-out labels.

    Per token, and for whole rounds, which is what decides: the score of a round against whether all of it is accepted.
    """
    with told():
        from specdecpp.report import diagrams, render

        if plot is not None:
            diagrams.check(plot)
        named = _named(heads)
        with render.waiting("evaluating", quiet=as_json):
            from specdecpp.training.evaluate import evaluate, labels_for, verdicts

            records = labels_for(named.values(), labels, split=split.value)
            found = evaluate(named["head"], records, others={n: h for n, h in named.items() if n != "head"})
        if plot is not None:
            diagrams.save(found, plot)
        said = verdicts(found)
        if as_json:
            names = dict(zip(named, heads, strict=True))
            print_json({"labels": str(labels), "split": split.value, "heads": names, "evaluation": found, "verdicts": said})
        else:
            show(found, said, dict(zip(named, heads, strict=True)))
        _note(named, found)


def _named(heads: list[str]) -> dict[str, "AcceptanceHead"]:
    """The heads as rows: the first is `head`, the others go by the names of their folders."""
    from specdecpp.head import AcceptanceHead

    if len(set(heads)) < len(heads):
        raise ValueError(f"a head is named twice: {', '.join(heads)}. Name each once.")
    names = ["head", *(Path(name).name for name in heads[1:])]
    names = [heads[i] if name in names[:i] else name for i, name in enumerate(names)]
    return {name: AcceptanceHead.from_pretrained(path) for name, path in zip(names, heads, strict=True)}


def show(evaluation: Mapping[str, Any], said: list[str], paths: Mapping[str, str]) -> None:
    """A table and a diagram for each source, then the verdicts."""
    from rich.padding import Padding
    from rich.text import Text

    from specdecpp.report import diagrams, render

    out = render.console()
    for source, scores in evaluation.items():
        head = scores["head"]
        counts = f"{head['num_labels']:,} labels of {head['num_answers']:,} answers"
        out.print(render.heading(source, counts), Padding(_table(scores, paths), (0, 1)), "", sep="\n")
        out.print(Padding(Text(diagrams.text(head, ascii_only=out.options.ascii_only)), (0, 1)), "", sep="\n")
    for sentence in said:
        out.print(Padding(Text(sentence), (0, 1)))


def _table(scores: Mapping[str, Mapping[str, Any]], paths: Mapping[str, str]) -> "Table":
    """One row per score; heads in the accent colour, the best of the rounds in bold."""
    from specdecpp.report import render

    table = render.plain_table("score", *COLUMNS, gap=2)
    best = max(scores, key=lambda name: scores[name]["auroc_product"] or 0)
    for name, figures in scores.items():
        cells = [_cell(figures, key) for key in COLUMNS.values()]
        style = " ".join(["bold"] * (name == best) + [render.ACCENT] * (name in paths))
        table.add_row(name.replace("_", " ") if name not in paths else name, *cells, style=style)
    return table


def _cell(figures: Mapping[str, Any], key: str) -> str:
    value, error = figures[key], figures.get(f"{key}_error")
    if value is None:
        return "-"
    sign = "+" if key == "gain_product" else ""
    return f"{value:{sign}.3f}" + ("" if error is None else f" ±{f'{error:.3f}'.removeprefix('0')}")


def _note(named: Mapping[str, "AcceptanceHead"], evaluation: Mapping[str, Any]) -> None:
    """What a reader of the table should know, on stderr."""
    from specdecpp.training.evaluate import PRODUCT_FIGURES

    if raw := [name for name, head in named.items() if not head.card.is_calibrated]:
        print(f"note: not calibrated: {', '.join(raw)}. Do it with: specdecpp calibrate HEAD --labels FOLDER", file=sys.stderr)
    if bare := [s for s, scores in evaluation.items() if all(scores["head"][k] is None for k in PRODUCT_FIGURES)]:
        print(
            f"note: the labels of {', '.join(bare)} have no branches, so there are no figures for rounds. Let collect.branches "
            "in the recipe include this split, and collect into another folder.",
            file=sys.stderr,
        )
