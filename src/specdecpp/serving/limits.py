"""The limits of a server: how many requests, how large they may be, how long they may take."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one server. Raises ValueError for one that admits nothing.

    >>> Limits(max_running=2, max_waiting=0).capacity
    2
    """

    max_running: int = 8
    """Requests that are decoded at once; each holds one pair of caches."""
    max_waiting: int = 64
    """Requests that wait for one of these to end; one more is sent away with 429."""
    max_body_bytes: int = 2**20
    max_prompt_tokens: int | None = None
    """None: what the target's context holds."""
    max_new_tokens: int = 8192
    """Tokens that all the answers of one request may have together."""
    max_choices: int = 16
    """Answers of one request: prompts times `n`."""
    max_drafted: int = 64
    """The most draft tokens a step may have under a policy that a request names."""
    prefill_tokens: int = 256
    """Tokens of prompts that are read in a turn, all requests together: a longer prompt is read in pieces, with the steps of
    others."""
    prefill_s: float = 0.1
    """Others wait so long in a turn for prompts to be read, by what their rows took before; where passes are shared the pieces
    are cut to it."""
    arrival_s: float = 30.0
    """The head of a request, and then its body, must be here within this; else the connection is closed, after a 408 where the
    head had come."""
    timeout_s: float = 300.0
    """From arrival to the last token, waiting included."""
    grace_s: float = 30.0
    """What is still unfinished this long after a signal to stop is dropped."""

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            value, least = getattr(self, name), 0 if name in ("max_waiting", "grace_s", "max_drafted") else 1
            if name in ("arrival_s", "timeout_s", "prefill_s"):
                if not value > 0:
                    raise ValueError(f"{name} must be above 0, got {value}")
            elif value is not None and not value >= least:
                raise ValueError(f"{name} must be at least {least}, got {value}")

    @property
    def capacity(self) -> int:
        """Requests that can be here at once."""
        return self.max_running + self.max_waiting
