"""The playground as a moving picture for the README: one prompt, answered by the default rule and by the target alone.

    python benchmarks/playground.py [--out docs/pictures/playground.svg]

`specdecpp serve` runs with a pair (the reference pair, or --pair smollm2) in a process of its own and is asked both ways for
the same prompt and seed, one request after the other, seven times; the run with the median time is drawn. What is drawn is
the details of its reply: every token with its origin, every step, its survival and threshold.
Both answers run on their own clock, that of their steps, slowed down alike, so the picture shows the speed-up as it was.
One SVG file without a script; it stands still, finished, for who wants less motion. Nothing else should run meanwhile.
"""

import argparse
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import httpx2
import torch
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

import specdecpp as sd
from specdecpp.report.theme import DARK, FONT, LIGHT, SIGNAL, TIMES

PROMPT = "Ann has 3 bags of 12 apples and buys 5 more each day. How many apples does she have after 4 days?"
WIDTH, HEIGHT = 820, 410
LETTER, LINE = 7.8, 21
LETTERS = 47
MONO = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"
LEFT, RIGHT = 20, 430
TEXT_TOP, ROUNDS_TOP = 78, 236
PLAY_S, HOLD_S = 9.0, 4.0
LEAST_SLOTS = 6
NUM_TAKES = 7
KINDS = {"accepted": "accent", "correction": "signal", "bonus": "ink"}
MEANINGS = {
    "accepted": "accepted: drafted, and the target agrees",
    "correction": "correction: in place of a rejected draft token",
    "bonus": "bonus: the target's own",
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One answer: its steps as the server tells them, and when each was over by its own clock."""

    name: str
    steps: list[dict[str, Any]]

    @property
    def ends_s(self) -> list[float]:
        return list(accumulate(sum(r["times"].values()) for r in self.steps))

    @property
    def num_tokens(self) -> list[int]:
        return list(accumulate(len(r["pieces"]) for r in self.steps))

    @property
    def rate(self) -> float:
        return self.num_tokens[-1] / self.ends_s[-1]


@dataclass(frozen=True, kw_only=True)
class Clock:
    """From seconds of a run to the picture's: everything `slowness` times slower, then a pause, then again."""

    slowness: float

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "Clock":
        return cls(slowness=PLAY_S / max(run.ends_s[-1] for run in runs))

    @property
    def whole_s(self) -> float:
        return PLAY_S + HOLD_S

    def share(self, seconds: float) -> float:
        """When, in per cent of one turn of the picture."""
        return 100 * seconds * self.slowness / self.whole_s


class Film:
    """Marks that come and go. Without animation what stays to the end is seen, and nothing else."""

    def __init__(self, clock: Clock):
        self.clock = clock
        self.body: list[Xml.Element] = []
        self.rules: dict[tuple[float, float | None], str] = {}

    def scene(self, start_s: float, end_s: float | None = None) -> Xml.Element:
        """A group that is there from one moment to another, or to the end."""
        key = round(self.clock.share(start_s), 2), None if end_s is None else round(self.clock.share(end_s), 2)
        name = self.rules.setdefault(key, f"s{len(self.rules)}")
        group = Xml.Element("g", {"class": f"scene {name}" + " gone" * (end_s is not None)})
        self.body.append(group)
        return group

    def style(self) -> str:
        """A rule for every moment at which something comes or goes."""
        rules = [
            f"@keyframes {name}{{0%{{opacity:0}}{start:g}%{{opacity:1}}{'' if end is None else f'{end:g}%{{opacity:0}}'}}}"
            f".{name}{{animation-name:{name}}}"
            for (start, end), name in self.rules.items()
        ]
        moving = f".scene{{animation:{self.clock.whole_s:g}s step-end infinite}}{''.join(rules)}"
        return f".gone{{opacity:0}}@media(prefers-reduced-motion:no-preference){{{moving}}}"


def add(parent: Xml.Element | list[Xml.Element], tag: str, kind: str, text: str = "", **values: float | str) -> None:
    """A mark, its numbers short."""
    attributes = {
        name.replace("_", "-"): v if isinstance(v, str) else f"{v:.1f}".removesuffix(".0") for name, v in values.items()
    }
    element = Xml.Element(tag, {"class": kind} | attributes)
    element.text = text or None
    parent.append(element)


def placed(text: str) -> list[tuple[int, int]]:
    """Row and column of every character, words kept whole where they fit; blanks at the end of a row hang over."""
    places, row, column = [], 0, 0
    for part in re.findall(r"\n|[^\S\n]+|\S+", text):
        if column and not part.isspace() and column + len(part) > LETTERS:
            row, column = row + 1, 0
        for letter in part:
            if column >= LETTERS and not letter.isspace():
                row, column = row + 1, 0
            places.append((row, min(column, LETTERS)))
            row, column = (row + 1, 0) if letter == "\n" else (row, column + 1)
    return places


def segments(run: Run) -> Iterator[tuple[int, str, list[tuple[int, int, str]]]]:
    """Step, origin, and (row, column, letters) of each line that a token is on."""
    pieces = [(i, piece) for i, r in enumerate(run.steps) for piece in r["pieces"]]
    places = iter(placed("".join(piece["text"] for _, piece in pieces)))
    for i, piece in pieces:
        letters = [(*next(places), letter) for letter in piece["text"]]
        lines = groupby((letter for letter in letters if letter[2] != "\n"), key=lambda letter: letter[0])
        yield i, piece["outcome"], [(row, (some := list(of))[0][1], "".join(s[2] for s in some)) for row, of in lines]


def write(film: Film, run: Run, left: float) -> None:
    """The answer, every token at its time with its line below it."""
    starts = [0.0, *run.ends_s]
    scenes = [film.scene(end) for end in run.ends_s]
    for i, origin, lines in segments(run):
        for row, column, letters in lines:
            x, y = left + column * LETTER, TEXT_TOP + row * LINE
            if bare := letters.strip():
                at = x + LETTER * (len(letters) - len(letters.lstrip()))
                add(scenes[i], "text", f"mono {KINDS[origin]}", bare, x=at, y=y, textLength=LETTER * len(bare))
            underline(scenes[i], origin, x, x + LETTER * len(letters), y + 5)
    counts = zip(starts[1:], [*run.ends_s[1:], None], run.num_tokens, strict=True)
    for start, end, num in counts:
        add(
            film.scene(start, end),
            "text",
            "ink",
            f"{num} tokens, {num / start:.0f} tokens/s",
            x=left + LETTERS * LETTER,
            y=50,
            text_anchor="end",
        )


def underline(parent: Xml.Element | list[Xml.Element], origin: str, x: float, end: float, y: float) -> None:
    """Solid, wavy or dotted, as on the page."""
    if origin == "correction":
        waves = "".join(f"q1.95,{3 if i % 2 else -3} 3.9,0" for i in range(round((end - x) / 3.9)))
        add(parent, "path", "signal-line", d=f"M{x:.1f},{y:.1f}{waves}", stroke_width="1.5")
    else:
        dots = {"stroke_dasharray": "1.5 2.4"} if origin == "bonus" else {}
        kind = "muted-line" if origin == "bonus" else "accent-line"
        add(parent, "line", kind, x1=x, x2=end, y1=y, y2=y, stroke_width="2" if origin == "accepted" else "1.8", **dots)


def bars(film: Film, run: Run) -> None:
    """A bar for every step: outlined as far as was drafted, filled as far as was accepted."""
    most = max(r["num_drafted"] for r in run.steps)
    unit, pitch = min(12, 96 / max(1, most)), min(16, 366 / len(run.steps))
    bottom = ROUNDS_TOP + 112
    add(film.body, "line", "soft-line", x1=LEFT, x2=LEFT + 366, y1=bottom + 3, y2=bottom + 3)
    for i, (r, end) in enumerate(zip(run.steps, run.ends_s, strict=True)):
        x, width = LEFT + i * pitch, pitch - 4
        for kind, num in (("soft-line", r["num_drafted"]), ("accent", r["num_accepted"])):
            add(film.scene(end), "rect", kind, x=x, y=bottom - unit * num, width=width, height=unit * num, rx=1.5)


def curves(film: Film, run: Run) -> None:
    """The survival of each step that has draft tokens, until the next one comes, against what the rule asks of it."""
    left, right, bottom = RIGHT + 30, RIGHT + 366, ROUNDS_TOP + 112

    def y(survival: float) -> float:
        return bottom - 100 * survival

    for tick in (0, 0.5, 1):
        add(film.body, "line", "grid-line" if tick else "soft-line", x1=left, x2=right, y1=y(tick), y2=y(tick))
        add(film.body, "text", "muted", f"{tick:g}", x=left - 6, y=y(tick) + 4, text_anchor="end")
    shown = [(r, end) for r, end in zip(run.steps, run.ends_s, strict=True) if r["draft_tokens"]]
    for (r, start), end in zip(shown, [*(end for _, end in shown[1:]), None], strict=True):
        scene = film.scene(start, end)
        most = max(LEAST_SLOTS, r["num_drafted"])
        slot = (right - left) / most
        x = [left + (i + 0.5) * slot for i in range(most)]
        asked = r["thresholds"] or []
        steps = [(left + (i + side) * slot, y(f)) for i, f in enumerate(asked) if f for side in (0, 1)]
        add(scene, "polyline", "ink-line dashed", points=joined(steps), stroke_width="1.5")
        points = [(left, y(1)), *((at, y(s)) for at, s in zip(x, r["survival"], strict=False))]
        add(scene, "polyline", "accent-line", points=joined(points), stroke_width="2")
        for at, draft_token, (_, height) in zip(x, r["draft_tokens"], points[1:], strict=False):
            mark(scene, draft_token["outcome"], at, height)
            letters = draft_token["text"].strip() or "\u2423"
            add(scene, "text", "ink", fitted(letters, slot), x=at, y=bottom + 18, text_anchor="middle")


def fitted(text: str, room: float) -> str:
    """A text, cut where it needs more room."""
    cut = (text, *(f"{text[:num]}…" for num in range(len(text) - 1, 0, -1)))
    return next((some for some in cut if text_width(some) <= room), "…")


def mark(parent: Xml.Element, outcome: str, x: float, y: float) -> None:
    """A dot for an accepted draft token, a cross for a rejected one, a ring for one that nobody looked at."""
    if outcome == "rejected":
        add(parent, "path", "signal-line", d=f"M{x - 4:.1f},{y - 4:.1f}l8,8m0,-8l-8,8", stroke_width="2.5")
    else:
        add(parent, "circle", "accent surface-line" if outcome == "accepted" else "surface muted-line ring", cx=x, cy=y, r=4.5)


def joined(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def frame(film: Film, ours: Run, alone: Run) -> None:
    """What stands still: the prompt, names, headings, the legend."""
    add(film.body, "text", "muted", PROMPT, x=LEFT, y=24)
    for run, left in ((ours, LEFT), (alone, RIGHT)):
        add(film.body, "text", "ink strong", run.name, x=left, y=50)
    for left, head, note in (
        (LEFT, "Rounds", "outline: drafted, filled: accepted"),
        (RIGHT, "Survival", "all so far are accepted; dashed: what the rule asks"),
    ):
        add(film.body, "text", "ink strong", head, x=left, y=ROUNDS_TOP)
        add(film.body, "text", "muted", note, x=left + 66, y=ROUNDS_TOP)
    x = LEFT
    for origin, meaning in MEANINGS.items():
        add(film.body, "text", KINDS[origin], meaning, x=x, y=HEIGHT - 12)
        underline(film.body, origin, x, x + text_width(origin), HEIGHT - 7)
        x += 266


def picture(ours: Run, alone: Run) -> str:
    """The whole picture, as text."""
    film = Film(Clock.of((ours, alone)))
    frame(film, ours, alone)
    write(film, ours, LEFT)
    write(film, alone, RIGHT)
    bars(film, ours)
    curves(film, ours)
    last = film.scene(max(ours.ends_s[-1], alone.ends_s[-1]))
    faster = f"{ours.rate / alone.rate:.2f}{TIMES} the target alone (slowed down {film.clock.slowness:.0f} times)"
    add(last, "text", "accent strong", faster, x=LEFT + 366, y=ROUNDS_TOP - 18, text_anchor="end")
    said = (
        f"{ours.name}: {ours.num_tokens[-1]} tokens in {len(ours.steps)} steps, {ours.rate:.0f} tokens/s. {alone.name}: "
        f"{alone.num_tokens[-1]} tokens, {alone.rate:.0f} tokens/s. Made by python benchmarks/playground.py with specdecpp "
        f"{sd.__version__}, torch {torch.__version__}, {platform.machine()}."
    )
    root = Xml.Element("svg", {"class": "picture", "viewBox": f"0 0 {WIDTH} {HEIGHT}", "role": "img"})
    root.attrib |= {"xmlns": "http://www.w3.org/2000/svg", "width": str(WIDTH), "height": str(HEIGHT), "aria-labelledby": "t d"}
    for tag, name, text in (("title", "t", "One prompt, answered twice"), ("desc", "d", said)):
        Xml.SubElement(root, tag, {"id": name}).text = text
    Xml.SubElement(root, "style").text = style() + film.style()
    add(root, "rect", "surface", width=WIDTH, height=HEIGHT, rx=6)
    root.extend(film.body)
    return Xml.tostring(root, encoding="unicode") + "\n"


def style() -> str:
    """The report's classes, one for corrections, and letters of one width."""
    signals = (
        f"svg.picture .signal{{fill:{colour}}}svg.picture .signal-line{{stroke:{colour};fill:none}}" for colour in SIGNAL
    )
    light, dark = signals
    own = f"svg.picture .mono{{font:13px {MONO};white-space:pre}}svg.picture .ring{{fill:none;stroke-width:2}}"
    own += "svg.picture .dashed{stroke-dasharray:4 3}"
    texts = f"svg.picture text{{font:12px {FONT};font-variant-numeric:tabular-nums}}svg.picture .strong{{font-weight:600}}"
    return f"{texts}{_colours(LIGHT)}{own}{light}@media (prefers-color-scheme:dark){{{_colours(DARK)}{dark}}}"


def _colours(theme: dict[str, str]) -> str:
    """Lines before fills, so that a mark may have both."""
    lines = (f"svg.picture .{name}-line{{stroke:{colour};fill:none}}" for name, colour in theme.items())
    return "".join([*lines, *(f"svg.picture .{name}{{fill:{colour}}}" for name, colour in theme.items())])


@cache
def text_width(text: str) -> float:
    """Width of a text in units, in the widest of our fonts."""
    font = FontProperties(family="DejaVu Sans", size=12)
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0])


def asked(url: str, body: dict[str, Any], name: str, **speculative: Any) -> Run:
    """An answer of the server."""
    given = body | {"speculative": {"details": True} | speculative}
    reply = httpx2.post(f"{url}/v1/chat/completions", json=given, timeout=300).raise_for_status().json()["speculative"]
    return Run(name=name, steps=reply["steps"][0])


def typical(runs: Sequence[Run]) -> Run:
    """Of runs that say the same the one in the middle, by time."""
    return sorted(runs, key=lambda run: run.ends_s[-1])[len(runs) // 2]


def filmed(url: str, seed: int, num_tokens: int, sampling: dict[str, float]) -> str:
    """The picture of a served pair: both answers a few times in turns, to be fair to both where the machine is unsteady."""
    messages = [{"role": "user", "content": f"{PROMPT}\nLet's think step by step."}]
    body = {"messages": messages, "seed": seed, "max_tokens": num_tokens, "ignore_eos": True, **sampling}
    takes = [
        (asked(url, body, "cost-aware, the default"), asked(url, body, "the target alone", policy="none"))
        for _ in range(NUM_TAKES + 1)
    ]
    ours, alone = (typical([take[i] for take in takes[1:]]) for i in (0, 1))  # the first warms up
    print(f"{ours.rate / alone.rate:.2f} times the target alone", file=sys.stderr)
    return picture(ours, alone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/pictures/playground.svg"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pair", default="reference", choices=("reference", "smollm2"), help="smollm2: at 0.7, top_p 0.9")
    args = parser.parse_args()
    sampling = {"temperature": 0.7, "top_p": 0.9} if args.pair == "smollm2" else {}
    command = [sys.executable, "-m", "specdecpp", "serve", "--target", args.pair, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        try:
            text = filmed(url, args.seed, args.tokens, sampling)
        finally:
            server.send_signal(signal.SIGTERM)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text, encoding="utf-8")
    print(f"{args.out}: {args.out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
