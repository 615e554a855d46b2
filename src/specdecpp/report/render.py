"""Rendering for the command line: text with the origin of every token, progress, tables. Used by the verbs only.

One accent colour; bold, underline and italic tell the same under NO_COLOR, and without a terminal plain text is left.
Numbers stand under their units.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from specdecpp.metrics import Metrics
    from specdecpp.session import Step

ACCENT = "cyan"
ORIGINS = {"accepted": ACCENT, "correction": "bold underline", "bonus": "italic dim"}
MEANINGS = {
    "accepted": "drafted, and accepted by the target",
    "correction": "the target's, in place of a rejected token",
    "bonus": "the target's, when nothing was rejected",
}
WIDTH = 80
LINE_S = 5.0
"""How often `live` writes a line where there is no terminal."""


def console(*, stderr: bool = False) -> Console:
    """A console without highlighting of numbers and without markup in model text."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def width_of(out: Console) -> int:
    """Columns to use: never more than 80, and at least 40 so that numbers stay whole."""
    return max(40, min(WIDTH, out.width))


class LiveText:
    """Prints steps as they come, every token in the style of its origin."""

    def __init__(self, out: Console):
        self.out = out
        self.counts: Counter[str] = Counter()

    def push(self, step: "Step") -> None:
        for piece in step.pieces:
            self.counts[piece.origin] += 1
            self.out.print(Text(piece.text, ORIGINS[piece.origin]), end="", soft_wrap=True)
        self.out.file.flush()

    def finish(self) -> None:
        """End the line."""
        self.out.print()


def legend() -> RenderableType:
    """Legend of the styles of `LiveText`."""
    grid = Table.grid(padding=(0, 2))
    for name, style in ORIGINS.items():
        grid.add_row(Text(name, style), Text(MEANINGS[name], "dim"))
    return grid


def tally(counts: "Counter[str]") -> RenderableType:
    """Number of tokens of each kind."""
    return Text("   ").join(Text.assemble((name, style), f" {counts[name]}") for name, style in ORIGINS.items())


@contextmanager
def waiting(text: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr, where that is a terminal; the yielded function shows what is being done."""
    err = console(stderr=True)
    if quiet or not err.is_terminal:
        yield lambda doing: None
        return
    with err.status(Text(text, "dim"), spinner_style=ACCENT) as status:
        yield lambda doing: status.update(Text(f"{text}: {doing}", "dim", overflow="ellipsis", no_wrap=True))


@contextmanager
def progress(text: str, total: int, *, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """A bar on stderr with what is done and the time left, where that is a terminal.

    It is drawn in calls of the yielded function only: a thread of its own would take time from what is being timed.
    """
    err = console(stderr=True)
    columns = (
        TextColumn("  {task.description}"),
        BarColumn(24, complete_style=ACCENT, finished_style=ACCENT),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[last]}", style="dim"),
    )
    bars = Progress(*columns, console=err, transient=True, auto_refresh=False, disable=quiet or not err.is_terminal)
    with bars:
        task = bars.add_task(text, total=total, last="")
        yield lambda name, advance=1: bars.update(task, advance=advance, last=name, refresh=True)


@contextmanager
def live(text: str, *, every_s: float = LINE_S, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A line on stderr that is written anew in place whenever the yielded function is called; without a terminal a line of its
    own, at most one every `every_s`. Nothing is drawn between the calls."""
    err, at = console(stderr=True), -math.inf
    if quiet:
        yield lambda doing: None
        return
    with Live(Text(f"  {text}", "dim"), console=err, auto_refresh=False, transient=True) as line:

        def tell(doing: str) -> None:
            nonlocal at
            if err.is_terminal:
                line.update(Text(f"  {text}, {doing}", "dim"), refresh=True)
            elif perf_counter() - at >= every_s:
                at = perf_counter()
                err.print(f"  {text}, {doing}", soft_wrap=True)

        yield tell


def heading(text: str, note: str = "") -> Text:
    return Text.assemble("\n  ", (text, "bold"), (f"  {note}" if note else "", "dim"), "\n")


def quoted(prompt: str) -> RenderableType:
    """The prompt above its answer."""
    return Padding(Text(prompt, "dim"), (1, 0))


def stats(metrics: "Metrics", *, policy: str, seed: int | None, finish_reason: str) -> RenderableType:
    """Four short lines about one answer."""
    reasons = {"eos": "end of text", "stop": "stop string", "length": "length reached", "grammar": "end of the grammar"}
    reason = reasons[finish_reason]
    shares = "  ".join(f"{name} {100 * share:.0f} %" for name, share in metrics.time_shares.items())
    speed = f"{metrics.elapsed_s:.2f} s, {metrics.tokens_per_second:.1f} tokens/s"
    lines = (
        f"{metrics.num_tokens} tokens in {speed} ({reason})",
        f"{metrics.mean_acceptance_length:.2f} tokens per target pass, {metrics.discard_rate:.2f} discarded per token",
        f"time: {shares}",
        policy if seed is None else f"{policy}, seed {seed}",
    )
    return Text("\n".join(lines), "dim")


def plain_table(first: str, *numbers: str, gap: int) -> Table:
    """A table without lines: a name to the left, on several lines where the screen is narrow, numbers to the right under
    their units."""
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim")
    table.add_column(first)
    for header in numbers:
        table.add_column(header, justify="right", no_wrap=True)
    return table
