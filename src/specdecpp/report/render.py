"""Rendering for the command line: text with the origin of every token, a table, bars of time. Used by the verbs only.

One accent colour. Whatever colour says is also said without it (bold, underline, italic; four shades of block), so that
it reads the same under NO_COLOR; without a terminal nothing but plain text is left. Numbers stand under their units.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

from rich.cells import cell_len
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
BAR_WIDTH, BARS_FROM = 20, 71
"""Columns of the longest bar, and of a screen that has room for them."""
LINE_S = 5.0
"""How often `live` writes a line where there is no terminal."""
BLOCKS = {"draft": "█", "verify": "▓", "head": "▒", "other": "░"}
PLAIN_BLOCKS = {"draft": "#", "verify": "=", "head": "+", "other": "."}
_WORDS = re.compile(r"\n|[^\S\n]+|\S+")


def console(*, stderr: bool = False) -> Console:
    """A console without highlighting of numbers and without markup in model text."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def width_of(out: Console) -> int:
    """Columns to use: never more than 80, and at least 40 so that numbers stay whole."""
    return max(40, min(WIDTH, out.width))


class LiveText:
    """Prints steps as they come, every token in the style of its origin, words kept whole within the width."""

    def __init__(self, out: Console, *, indent: int = 2):
        self.out, self.indent = out, indent
        self.counts: Counter[str] = Counter()
        self._room = width_of(out) - 2 * indent
        self._column = 0
        self._blanks = ""
        self._word: list[tuple[str, str]] = []

    def push(self, outcome: "Step") -> None:
        for piece in outcome.pieces:
            self.counts[piece.origin] += 1
            for part in _WORDS.findall(piece.text):
                if part == "\n":
                    self._end_word()
                    self._newline()
                elif part.isspace():
                    self._end_word()
                    self._blanks += part.expandtabs(4)
                else:
                    self._word.append((part, ORIGINS[piece.origin]))
        self.out.file.flush()

    def finish(self) -> None:
        """Print what was held back, and end the line."""
        self._end_word()
        if self._column:
            self._newline()

    def _end_word(self) -> None:
        if not self._word:
            return
        width = sum(cell_len(text) for text, _ in self._word)
        if self._column and self._column + cell_len(self._blanks) + width > self._room:
            self._newline()
        if not self._column:
            self._blanks = " " * self.indent + self._blanks
        self._column += cell_len(self._blanks) + width
        self.out.print(Text.assemble(self._blanks, *self._word), end="", soft_wrap=True)
        self._blanks, self._word = "", []

    def _newline(self) -> None:
        self.out.print()
        self._column, self._blanks = 0, ""


def legend() -> RenderableType:
    """Legend of the styles of `LiveText`."""
    grid = Table.grid(padding=(0, 2))
    for name, style in ORIGINS.items():
        grid.add_row(Text(name, style), Text(MEANINGS[name], "dim"))
    return Padding(grid, (0, 2))


def tally(counts: "Counter[str]") -> RenderableType:
    """How many tokens were of each kind."""
    parts = [Text.assemble((name, style), f" {counts[name]}") for name, style in ORIGINS.items()]
    return Padding(Text("   ").join(parts), (0, 2))


@contextmanager
def waiting(text: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr, where that is a terminal; the yielded function says what is being done."""
    err = console(stderr=True)
    if quiet or not err.is_terminal:
        yield lambda doing: None
        return
    with err.status(Text(text, "dim"), spinner_style=ACCENT) as status:
        yield lambda doing: status.update(Text(f"{text}: {doing}", "dim", overflow="ellipsis", no_wrap=True))


@contextmanager
def progress(text: str, total: int, *, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """A bar on stderr with what is done and the time left, where that is a terminal; it moves when the yielded function is
    told what was just done.

    It is drawn in those calls only: a thread of its own would take time from what is being timed.
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
def live(text: str) -> Iterator[Callable[[str], None]]:
    """A line on stderr that is written anew in place whenever the yielded function is called; without a terminal a line of its
    own, at most one every `LINE_S`. Nothing is drawn between the calls."""
    err, at = console(stderr=True), -math.inf
    with Live(Text(f"  {text}", "dim"), console=err, auto_refresh=False, transient=True) as line:

        def tell(doing: str) -> None:
            nonlocal at
            if err.is_terminal:
                line.update(Text(f"  {text}, {doing}", "dim"), refresh=True)
            elif perf_counter() - at >= LINE_S:
                at = perf_counter()
                err.print(f"  {text}, {doing}", soft_wrap=True)

        yield tell


def heading(text: str, note: str = "") -> Text:
    return Text.assemble("\n  ", (text, "bold"), (f"  {note}" if note else "", "dim"), "\n")


def quoted(prompt: str) -> RenderableType:
    """The prompt above its answer."""
    return Padding(Text(prompt, "dim"), (1, 2))


def stats(metrics: "Metrics", *, policy: str, seed: int | None, finish_reason: str) -> RenderableType:
    """Four short lines about one answer."""
    reason = {"eos": "end of text", "stop": "stop string", "length": "length reached"}[finish_reason]
    shares = "  ".join(f"{name} {100 * share:.0f} %" for name, share in metrics.time_shares.items())
    speed = f"{metrics.elapsed_s:.2f} s, {metrics.tokens_per_second:.1f} tokens/s"
    lines = (
        f"{metrics.num_tokens} tokens in {speed} ({reason})",
        f"{metrics.mean_acceptance_length:.2f} tokens per target pass, {metrics.discard_rate:.2f} discarded per token",
        f"time: {shares}",
        policy if seed is None else f"{policy}, seed {seed}",
    )
    return Text("\n".join(lines), "dim")


def time_table(first: str, lines: Sequence[tuple[str, float, Mapping[str, float], str]], out: Console) -> Table:
    """Where the time of a token goes, for lines of name, tokens/s, shares and style: ms, shares, and where the screen has
    room a bar as long as the time."""
    blocks = PLAIN_BLOCKS if out.options.ascii_only else BLOCKS
    table = plain_table(first, "ms\n/token", *(f"{block} {name}\n%" for name, block in blocks.items()), gap=1)
    table.add_column("", no_wrap=True)
    longest = BAR_WIDTH * min(speed for _, speed, *_ in lines) if width_of(out) >= BARS_FROM else 0
    for name, speed, shares, style in lines:
        parts = [f"{100 * shares.get(part, 0.0):.0f}" for part in blocks]
        table.add_row(name, f"{1000 / speed:.2f}", *parts, bar(shares, blocks, width=longest / speed), style=style)
    return table


def bar(shares: Mapping[str, float], blocks: dict[str, str], *, width: float) -> str:
    """A stacked bar; rounding is of the running sum, so that the whole has the right length."""
    text, reached = "", 0.0
    for name, share in shares.items():
        reached += share
        text += blocks[name] * (round(width * reached) - len(text))
    return text


def plain_table(first: str, *numbers: str, gap: int) -> Table:
    """A table without lines: a name to the left, on several lines where the screen is narrow, numbers to the right under
    their units."""
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim")
    table.add_column(first)
    for header in numbers:
        table.add_column(header, justify="right", no_wrap=True)
    return table
