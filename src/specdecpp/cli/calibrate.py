"""`specdecpp calibrate`: held-out labels make a head's score a probability; the head's card gets the figures."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specdecpp.cli.common import Json, Labels, Split, print_json, told

if TYPE_CHECKING:
    from rich.console import RenderableType

    from specdecpp.head import HeadCard

EXAMPLES = (
    "specdecpp calibrate out/heads/look_ahead --labels out/labels",
    "specdecpp calibrate out/heads/look_ahead --labels out/labels --json",
)


def calibrate(
    head: Annotated[Path, typer.Argument(metavar="HEAD", help="The folder of the head; its card is written back.")],
    labels: Labels,
    split: Annotated[Split, typer.Option(metavar="NAME", help="The answers to use: dev, test or train.")] = Split.dev,
    as_json: Json = False,
) -> None:
    """Make a head's score a probability.

    The weight of rejections is undone in closed form; then a temperature and a bias are fitted on labels that the head was
    not trained on. The figures before and after go into the head's card.
    """
    with told():
        from specdecpp import render
        from specdecpp.head import AcceptanceHead

        trained = AcceptanceHead.from_pretrained(_folder(head))
        with render.waiting("calibrating", quiet=as_json):
            from specdecpp.training.calibrate import calibrate_head
            from specdecpp.training.evaluate import labels_for

            found = calibrate_head(trained, labels_for([trained], labels, split=split.value, same_sampling=True))
        found.save_pretrained(head)
        if as_json:
            card = found.card
            figures = {"calibration": vars(card.calibration), "figures": card.notes["calibration"]}
            print_json({"head": str(head), "labels": str(labels), "split": split.value, **figures})
        else:
            out = render.console()
            out.print(_view(found.card, head.resolve().name, ascii_only=out.options.ascii_only))


def _folder(head: Path) -> Path:
    """The head's folder, which must be one on this machine: the card is written into it."""
    from specdecpp.errors import HeadError

    if not head.exists():
        raise HeadError(f"there is no head at {head}. Give the folder that holds it; its card is written back.")
    return head


def _view(card: "HeadCard", name: str, *, ascii_only: bool) -> "RenderableType":
    """The figures by stage, the calibration, and the diagram of what comes out."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    from specdecpp import render
    from specdecpp.training import diagrams

    notes, found = card.notes["calibration"], card.calibration
    columns = {f"{label}\n/token": f"{key}_token" for label, key in (("ECE", "ece"), ("Brier", "brier"), ("AUROC", "auroc"))}
    columns |= {"KL\n/token": "kl"}
    columns |= {f"{label}\n/round": f"{key}_product" for label, key in (("ECE", "ece"), ("Brier", "brier"), ("AUROC", "auroc"))}
    table = render.plain_table("stage", *columns, gap=2)
    for stage, figures in notes.items():
        cells = ("-" if figures[key] is None else f"{figures[key]:.3f}" for key in columns.values())
        table.add_row(stage, *cells, style=render.ACCENT if stage == "calibrated" else "")
    after = notes["calibrated"]
    fitted = f"rejection weight {found.rejection_weight:g}, temperature {found.temperature:.3f}, bias {found.bias:+.3f}"
    depths = ((of, after.get(f"ece_{of}_by_depth")) for of in ("token", "product"))
    by_depth = [f"ECE by depth, {diagrams.PANELS[of]}:  {_figures(values)}" for of, values in depths if values]
    lines = [fitted, *by_depth, "", diagrams.text(after, ascii_only=ascii_only)]
    counts = f"{after['num_labels']:,} labels of {after['num_answers']:,} answers ({after['evidence']})"
    body = Padding(Group(table, "", *(Text(line) for line in lines)), (0, 1))
    return Group(render.heading(name, counts), body)


def _figures(values: list[float | None]) -> str:
    return " ".join(" -  " if value is None else f"{value:.2f}".removeprefix("0") for value in values)
