"""Exceptions. Every message says what is wrong, the facts, and what to do.

A bad value in a configuration (a negative temperature) is a plain ValueError, raised where the value is given.
"""


class SpecdecError(Exception):
    """Base of every error this library raises on purpose."""


class PairError(SpecdecError, ValueError):
    """Target and draft do not fit each other."""


class BackendError(SpecdecError, ValueError):
    """A model cannot be run by this backend, as where its cache cannot be rolled back."""


class HeadError(SpecdecError, ValueError):
    """An acceptance head is unreadable, of the wrong width, or made for another pair."""


class PromptError(SpecdecError, ValueError):
    """A prompt is no prompt, empty without a start token, or longer than the context."""


class DataError(SpecdecError, ValueError):
    """Prompts, labels or a recipe cannot be read, or do not belong together."""


class UnsoundError(SpecdecError, ValueError):
    """The combination would change the target's distribution."""


class MissingExtraError(SpecdecError, ImportError):
    """An optional dependency is not installed."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, for ours; the name of its class where it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
