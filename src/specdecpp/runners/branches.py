"""The open rows of a `TreeRunner`: who their parents are, and what each of them may see of text and tree."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool

from specdecpp.runners.protocol import check_path, depths_of


class OpenRows:
    """Rows behind a text, pass by pass. R rows so far, n of them in the last pass."""

    def __init__(self) -> None:
        self.parents: list[int] = []
        self.depths: list[int] = []
        self._sees: Bool[np.ndarray, "R R"] = np.zeros((0, 0), dtype=bool)

    def __len__(self) -> int:
        return len(self.parents)

    def add(self, parents: Sequence[int]) -> None:
        """A pass over rows with these parents. Raises ValueError for a parent that does not stand before its row."""
        depths, before = depths_of(parents, self.depths), len(self)
        sees = np.zeros((before + len(parents),) * 2, dtype=bool)
        sees[:before, :before] = self._sees
        for row, parent in enumerate(parents, before):
            if parent >= 0:
                sees[row] = sees[parent]
            sees[row, row] = True
        self._sees = sees
        self.parents += parents
        self.depths += depths

    def visible(self, num: int, length: int, window: int | None = None) -> Bool[np.ndarray, "n T"]:
        """What the last `num` rows see of T positions of a cache: `length` of text, then all open rows."""
        sees = np.concatenate((np.ones((num, length), dtype=bool), self._sees[-num:]), 1)
        if window is not None:
            depths = np.array(self.depths)
            at = np.concatenate((np.arange(length), length + depths))
            sees &= at[None] > (length + depths[-num:, None] - window)
        return sees

    def check(self, path: Sequence[int]) -> None:
        """Raise ValueError for what is no branch."""
        check_path(path, self.parents)
