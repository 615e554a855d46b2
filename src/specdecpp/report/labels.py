"""Labels that keep clear of what is drawn: each beside its point where there is room, nearest first.

Units are those of `drawing`, y grows upwards; a box is left, bottom, right, top. A line counts as small boxes along it and a
leader as spots, so that one question, does this meet that, answers for all.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Float

from specdecpp.report.drawing import SIZE, Sheet, Units, text_width

Point = tuple[Units, Units]
Box = tuple[Units, Units, Units, Units]
DISTANCES = (8, 12, 19, 27, 37, 49, 65, 81, 101)
ANGLES = np.radians((0, -90, 180, 90, -45, 45, -135, 135, -20, 20, 160, -160))
NEAR = 15
"""A label farther from its point than this has a leader."""
TEXT, MARK, LEADER = 1000.0, 300.0, 150.0
"""What it costs to stand on a text, on a mark or a line, or to have a leader over a text, a large mark or a leader."""


class Labels:
    """The labels of a sheet, and what they must not hide: boxes, each with its price for a label and for a leader."""

    def __init__(self, sheet: Sheet) -> None:
        self.sheet = sheet
        self.taken: list[tuple[Box, Units, Units]] = []

    def mark(self, at: Point, size: Units, *, is_large: bool) -> None:
        """Keep labels off a mark, and leaders too if it is large."""
        self.taken.append(((at[0] - size, at[1] - size, at[0] + size, at[1] + size), MARK, LEADER * is_large))

    def line(self, points: Sequence[Sequence[Units]], *, is_leader: bool = False) -> None:
        """Keep labels off a line."""
        for start, end in pairwise(np.array(points, float)):
            steps = np.linspace(0, 1, 2 + int(np.hypot(*(end - start)) / 3))  # so near that no spots of a leader miss them
            for x, y in (start + steps[:, None] * (end - start)).tolist():
                self.taken.append(((x - 2, y - 2, x + 2, y + 2), MARK, LEADER * is_leader))

    def put(self, at: Point, text: str, kind: str, *, within: Box, reach: Units = 101, is_needed: bool = False) -> bool:
        """A text beside a point, within a box and no farther than `reach`; far off it gets a leader.

        Without room it is left out, unless needed: then it stands where it hides least. Says whether it was put.
        """
        distances = np.repeat([float(d) for d in DISTANCES if d <= reach], len(ANGLES))
        boxes, leaders = _places(
            np.array(at, float), distances, np.array([text_width(text, is_strong="strong" in kind) + 2, SIZE])
        )
        is_inside = (boxes[:, :2] >= within[:2]).all(1) & (boxes[:, 2:] <= within[2:]).all(1)
        prices = np.where(is_inside, distances + self._hidden(at, boxes, leaders), np.inf)
        best = int(prices.argmin())
        if np.isinf(prices[best]) or (prices[best] >= LEADER and not is_needed):
            return False
        left, bottom, right, top = boxes[best].tolist()
        if distances[best] > NEAR:
            leader = leaders[best, [0, -1]].tolist()
            self.sheet.line(leader[0], leader[1], "muted")
            self.line(leader, is_leader=True)
        self.taken.append(((left, bottom, right, top), TEXT, LEADER))
        self.sheet.text(left + 1, self.sheet.height - bottom - 0.2 * SIZE, text, kind)
        return True

    def _hidden(
        self, at: Point, boxes: Float[np.ndarray, "P 4"], leaders: Float[np.ndarray, "P S 2"]
    ) -> Float[np.ndarray, " P"]:
        """What each place hides; a leader may leave the mark that it begins at."""
        taken = np.array([box for box, *_ in self.taken], float).reshape(-1, 4)
        on, over = (np.array([prices[i] for _, *prices in self.taken], float) for i in (0, 1))
        is_in_way = (over > 0) & ~_meet(np.array([[*at, *at]], float), taken)[0]
        spots = np.concatenate([leaders, leaders], axis=2).reshape(-1, 4)
        crossed = _meet(spots, taken[is_in_way]).reshape(*leaders.shape[:2], -1).any(1)
        return _meet(boxes, taken) @ on + crossed @ over[is_in_way]


def _places(
    at: Float[np.ndarray, "2"], distances: Float[np.ndarray, " P"], size: Float[np.ndarray, "2"]
) -> tuple[Float[np.ndarray, "P 4"], Float[np.ndarray, "P S 2"]]:
    """Boxes around a point, and spots on the way from its mark to the nearest of each, nan for a near one."""
    ways = np.tile(np.stack([np.cos(ANGLES), np.sin(ANGLES)], axis=1), (len(distances) // len(ANGLES), 1))
    sides = np.sign(np.where(np.abs(ways) > [0.1, 0.5], ways, 0))  # centred where the way is along the other axis
    corners = at + distances[:, None] * ways - size * (0.5 - sides / 2)
    boxes = np.concatenate([corners, corners + size], axis=1)
    steps = np.linspace(6 / distances, 1, 24, axis=1)[..., None]
    leaders = at + steps * (np.clip(at, boxes[:, :2], boxes[:, 2:]) - at)[:, None]
    return boxes, np.where(distances[:, None, None] > NEAR, leaders, np.nan)


def _meet(boxes: Float[np.ndarray, "M 4"], taken: Float[np.ndarray, "N 4"]) -> Bool[np.ndarray, "M N"]:
    """Which boxes meet which; nan meets nothing."""
    return np.all((boxes[:, None, :2] < taken[:, 2:]) & (taken[:, :2] < boxes[:, None, 2:]), axis=-1)


def spread(wanted: Sequence[Units], *, gap: Units, low: Units, high: Units) -> list[Units]:
    """Heights at least `gap` apart, as near to the wanted ones as that allows: labels at the ends of lines."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    heights = list(wanted)
    floor, ceiling = low, high
    for i in order:
        heights[i] = max(wanted[i], floor)
        floor = heights[i] + gap
    for i in reversed(order):
        heights[i] = min(heights[i], ceiling)
        ceiling = heights[i] - gap
    return heights
