"""A grammar along the draft tokens of compiled code, which asks behind every token that it draws."""

import ctypes
import weakref
from typing import Any

import torch
from torch import Tensor

from specdecpp.backends.native.library import ENDED, Drafting
from specdecpp.grammar import Matcher

_Follow = ctypes.CFUNCTYPE(None)


class Columns:
    """Memory for draft tokens of a step: ids, q of each, estimates, sums of min(p, q), rows [K V] of q (greedily: logits)."""

    def __init__(self, num: int, vocab_size: int):
        self.tokens: Any = (ctypes.c_int64 * num)()
        self.confidence, self.accept, self.overlaps = ((ctypes.c_double * num)() for _ in range(3))
        self.rows = torch.empty(num, vocab_size)


class Following:
    """Tokens that a grammar allows behind each draft token of a step, `allowed` [K + 1 V], and those that it forces: they are
    draft tokens with a one-hot q. `skips` is `policies.head.skips_forced`."""

    def __init__(self, task: Drafting, *, is_greedy: bool, skips: bool):
        self._task, self._is_greedy, self._skips = task, is_greedy, skips
        me: Any = weakref.ref(self)  # its own method would be a cycle, which keeps the rows until the collector comes
        self._callback = _Follow(lambda: me()._follow())
        task.follow = ctypes.cast(self._callback, ctypes.c_void_p).value
        self.allowed = torch.empty(0, 0, dtype=torch.bool)
        self._error: BaseException | None = None
        self._known = 0

    def begin(self, grammar: Matcher, columns: Columns, *, limit: int, room: int) -> None:
        """Begin a step of at most `limit` draft tokens, up to `room` with forced ones: the first of these are added."""
        self._grammar, self._columns, self._limit, self._room = grammar.fork(), columns, limit, room
        size = columns.rows.shape[-1]
        if len(self.allowed) <= len(columns.rows):
            self.allowed = torch.empty(len(columns.rows) + 1, size, dtype=torch.bool)
        self._task.allowed, self._task.limit, self._task.most = self.allowed.data_ptr(), limit, max(limit, room)
        self._add()

    def rows(self) -> Tensor:
        """`allowed` of the step, once it has been drafted. Raises what the grammar has raised meanwhile."""
        error, self._error = self._error, None
        if error is not None or self._known < self._task.num - (self._task.why == ENDED):
            raise error or KeyboardInterrupt  # as the last call began, where nothing can be caught
        if self._task.why == ENDED:
            self.allowed[self._task.num] = True  # nothing comes there
        return self.allowed

    def _follow(self) -> None:
        try:
            if self._known < self._task.num - 1:
                raise KeyboardInterrupt  # as the call before began
            self._grammar.push(self._columns.tokens[self._task.num - 1])
            self._add()
        except BaseException as error:  # there is nobody to catch it in compiled code
            self._error, self._task.why = error, ENDED

    def _add(self) -> None:
        """Add the tokens that are forced now; fill in what is allowed at these places and the next."""
        task, grammar, columns = self._task, self._grammar, self._columns
        forced = grammar.forced()[: max(0, self._room - task.num)] if self._skips else []
        for token in forced:
            k = task.num
            self.allowed[k] = grammar.allowed()
            columns.rows[k] = -torch.inf if self._is_greedy else 0.0
            columns.rows[k, token] = 0.0 if self._is_greedy else 1.0
            columns.tokens[k], columns.confidence[k], columns.accept[k] = token, 1.0, 1.0
            grammar.push(token)
            task.num = k + 1
        self.allowed[task.num], self._known = grammar.allowed(), task.num
        self._limit += len(forced)
        task.limit = max(task.limit, min(self._limit, self._room))
        if grammar.is_over:
            task.why = ENDED
