"""Rendering for the command line: text with the origin of every token, progress, tables. Used by the verbs only.

One accent colour; bold, underline and italic tell the same under NO_COLOR, and without a terminal plain text is left.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.live import Live
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


def show(out: Console, step: "Step") -> None:
    """A step as it comes, every token in the style of its origin."""
    for piece in step.pieces:
        out.print(Text(piece.text, ORIGINS[piece.origin]), end="", soft_wrap=True)
    out.file.flush()


def legend() -> RenderableType:
    """Legend of the styles of `show`."""
    grid = Table.grid(padding=(0, 2))
    for name, style in ORIGINS.items():
        grid.add_row(Text(name, style), Text(MEANINGS[name], "dim"))
    return grid


def tally(steps: "Iterable[Step]") -> RenderableType:
    """Number of tokens of each kind."""
    counts = Counter(piece.origin for step in steps for piece in step.pieces)
    return Text("   ").join(Text.assemble((name, style), f" {counts[name]}") for name, style in ORIGINS.items())


@contextmanager
def live(text: str, *, every_s: float | None = LINE_S, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A line on stderr that is written anew in place whenever the yielded function is called; without a terminal a line of its
    own, at most one every `every_s` seconds (None: no line).

    Nothing is drawn between the calls: a thread of its own would take time from what is being timed.
    """
    err, at = console(stderr=True), -math.inf
    if quiet or (every_s is None and not err.is_terminal):
        yield lambda doing: None
        return
    with Live(Text(f"  {text}", "dim"), console=err, auto_refresh=False, transient=True) as line:

        def tell(doing: str) -> None:
            nonlocal at
            if err.is_terminal:
                line.update(Text(f"  {text}, {doing}", "dim", overflow="ellipsis", no_wrap=True), refresh=True)
            elif every_s is not None and perf_counter() - at >= every_s:
                at = perf_counter()
                err.print(f"  {text}, {doing}", soft_wrap=True)

        yield tell


def heading(text: str, note: str = "") -> Text:
    return Text.assemble("\n  ", (text, "bold"), (f"  {note}" if note else "", "dim"), "\n")


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
    """A table without lines: a name to the left (several lines on a narrow screen), numbers to the right under their units."""
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim")
    table.add_column(first)
    for header in numbers:
        table.add_column(header, justify="right", no_wrap=True)
    return table
