"""Where things stand in a picture: scales with round ticks, the boxes of texts, and the places around a point.

Units are those of `drawing`; y grows downwards. Pure functions, so that a label can be tried everywhere before it is drawn:
P places, N boxes that are taken, S strokes; a box is left, top, right, bottom, and a stroke two points.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

SIZE = 12
"""Of text: one size for every label."""
TIMES = "\N{MULTIPLICATION SIGN}"
Units = int | float
"""A length or a place in a picture, or a value on its way there."""
Point = tuple[Units, Units]
DISTANCES = (7, 11, 18, 26, 36, 48, 64, 80, 100)
ANCHORS = ("end", "middle", "start")
ANGLES = (0, -90, 180, 90, -45, 45, -135, 135, -20, 20, 160, -160)


def number(value: Units) -> str:
    """As short as can be: 0.5, 1, -20."""
    return f"{value:.6g}".replace("-", "\N{MINUS SIGN}")


def text_width(text: str, *, is_strong: bool = False) -> Units:
    """A generous estimate in units: that of a wide typeface, and a little air."""
    widths = {**dict.fromkeys("ijl.,:;|!'() ", 0.36), **dict.fromkeys("frt-I[]", 0.45), **dict.fromkeys(f"mwMW%+={TIMES}", 0.9)}
    return 2 + SIZE * sum(widths.get(c, 0.7 if c.isupper() else 0.64) for c in text) * (1.08 if is_strong else 1)


def fitted(text: str, room: Units) -> str:
    """A text, cut where it needs more room."""
    if text_width(text, is_strong=True) <= room:
        return text
    num = next((n for n in range(len(text), 0, -1) if text_width(f"{text[:n]}…", is_strong=True) <= room), 0)
    return f"{text[:num].rstrip()}…"


class Box(NamedTuple):
    """A rectangle."""

    left: Units
    top: Units
    right: Units
    bottom: Units

    @classmethod
    def of_text(cls, at: Point, text: str, anchor: str = "start", *, is_strong: bool = False) -> "Box":
        """Where a text at a base line stands."""
        width = text_width(text, is_strong=is_strong)
        left = at[0] - width * {"start": 0, "middle": 0.5, "end": 1}[anchor]
        return cls(left, at[1] - 0.8 * SIZE, left + width, at[1] + 0.25 * SIZE)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Values low..high on units start..end, which may run backwards (y).

    >>> Scale(low=0, high=2, start=100, end=0)(0.5)
    75.0
    """

    low: Units
    high: Units
    start: Units
    end: Units

    def __call__(self, value: Units) -> Units:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, *, room: Units = 48) -> list[Units]:
        """Round values about `room` units apart."""
        step = nice_step((self.high - self.low) * room / abs(self.end - self.start))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(i * step, 10) for i in range(first, last + 1)]


def nice_step(least: Units) -> Units:
    """The smallest of 1, 2, 5 times a power of ten that is no smaller."""
    power = 10 ** math.floor(math.log10(least))
    return next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= least * (1 - 1e-9))


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where a label may stand around a point, nearest first. Places that are far off have a leader, near ones nan."""

    at: Float[np.ndarray, "P 2"]
    anchors: tuple[str, ...]
    distances: Float[np.ndarray, " P"]
    boxes: Float[np.ndarray, "P 4"]
    leaders: Float[np.ndarray, "P 2 2"]

    @classmethod
    def around(cls, point: Point, text: str, *, is_strong: bool = False) -> "Places":
        """Beside a point at several distances and angles."""
        origin = np.array(point, float)
        distances, angles = np.repeat(DISTANCES, len(ANGLES)), np.tile(np.radians(ANGLES), len(DISTANCES))
        ways = np.stack([np.cos(angles), np.sin(angles)], -1)
        at = origin + distances[:, None] * ways + 0.1 * SIZE * np.stack([0 * angles, 3 + 2 * ways[:, 1]], -1)
        side = np.where(np.abs(ways[:, 0]) < 0.1, 0, np.sign(ways[:, 0])).astype(int)
        shapes = np.array([Box.of_text((0, 0), text, anchor, is_strong=is_strong) for anchor in ANCHORS], float)
        boxes = np.tile(at, 2) + shapes[side + 1]
        near = np.clip(origin, boxes[:, :2], boxes[:, 2:])
        leaders = np.stack([np.broadcast_to(origin, near.shape), near], 1)
        leaders[distances <= SIZE] = np.nan
        return cls(
            at=at,
            anchors=tuple(ANCHORS[i] for i in side + 1),
            distances=distances.astype(float),
            boxes=boxes,
            leaders=leaders,
        )


def boxed(boxes: Sequence[Box]) -> Float[np.ndarray, "N 4"]:
    return np.array(boxes, float).reshape(-1, 4)


def meet(boxes: Float[np.ndarray, "P 4"], others: Float[np.ndarray, "N 4"]) -> Bool[np.ndarray, "P N"]:
    """Whether two boxes overlap."""
    left, top, right, bottom = boxes.T[:, :, None]
    return (left < others[:, 2]) & (others[:, 0] < right) & (top < others[:, 3]) & (others[:, 1] < bottom)


def run_through(strokes: Float[np.ndarray, "S 2 2"], boxes: Float[np.ndarray, "N 4"]) -> Bool[np.ndarray, "S N"]:
    """Whether a stroke goes through a box in which it does not begin: it is inside both pairs of edges at the same time."""
    start, way = strokes[:, None, 0], strokes[:, None, 1] - strokes[:, None, 0]
    with np.errstate(divide="ignore", invalid="ignore"):
        times = np.stack([(boxes[:, :2] - start) / way, (boxes[:, 2:] - start) / way])
    first, last = times.min(0).max(-1), times.max(0).min(-1)
    is_begun = ((start > boxes[:, :2]) & (start < boxes[:, 2:])).all(-1)
    return (first < last) & (last > 0) & (first < 1) & ~is_begun


def cross(strokes: Float[np.ndarray, "S 2 2"], others: Float[np.ndarray, "N 2 2"]) -> Bool[np.ndarray, "S N"]:
    """Whether two strokes cross; to touch is not enough."""
    parts = _sides(strokes, others[:, 0]) * _sides(strokes, others[:, 1])
    parted = _sides(others, strokes[:, 0]) * _sides(others, strokes[:, 1])
    return (parts < 0) & (parted.T < 0)


def _sides(lines: Float[np.ndarray, "S 2 2"], points: Float[np.ndarray, "N 2"]) -> Float[np.ndarray, "S N"]:
    """On which side of each line each point lies, by sign."""
    start, way = lines[:, None, 0], lines[:, None, 1] - lines[:, None, 0]
    away = points - start
    return way[..., 0] * away[..., 1] - way[..., 1] * away[..., 0]


def spread(wanted: Sequence[Units], *, gap: Units, low: Units, high: Units) -> list[Units]:
    """Heights at least `gap` apart, as near to the wanted ones as that allows: labels at the ends of lines."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    heights = list(wanted)
    floor = low
    for i in order:
        floor = heights[i] = max(wanted[i], floor)
        floor += gap
    ceiling = high
    for i in reversed(order):
        ceiling = heights[i] = min(heights[i], ceiling)
        ceiling -= gap
    return heights
