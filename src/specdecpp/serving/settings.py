"""ServerSettings of a server: its limits, what requests that name nothing get, its name, its key."""

from dataclasses import dataclass

from specdecpp.policies import Policy


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """ServerSettings of one server. Raises ValueError for limits that admit nothing.

    >>> ServerSettings(max_running=2, max_waiting=0).capacity
    2
    """

    policy: Policy | str | None = None
    """For requests that name none; None: the pair's own."""
    verification: str = "token"
    name: str | None = None
    """The model's name; None: the last part of the target's."""
    api_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    """Names that are answered beside localhost and addresses, "*" for any. With a key and no names: any."""
    max_running: int = 8
    """Requests that are decoded at once; each holds one pair of caches."""
    max_waiting: int = 64
    """Requests that wait for one of these to end; one more is sent away with 429."""
    max_body_bytes: int = 2**20
    max_new_tokens: int = 8192
    """Tokens that all the answers of one request may have together."""
    timeout_s: float = 300.0
    """From arrival to the last token, waiting included."""
    grace_s: float = 30.0
    """Time to finish after a signal to stop."""

    def __post_init__(self) -> None:
        positive = ("max_running", "max_body_bytes", "max_new_tokens", "timeout_s")
        for name in (*positive, "max_waiting", "grace_s"):
            value, bound = getattr(self, name), "above 0" if name in positive else "at least 0"
            if not (value > 0 if name in positive else value >= 0):
                raise ValueError(f"{name} must be {bound}, got {value}")

    @property
    def capacity(self) -> int:
        """Requests that can be here at once."""
        return self.max_running + self.max_waiting

    @property
    def hosts(self) -> tuple[str, ...]:
        """Patterns of the host names that are answered."""
        return ("*",) if self.api_key is not None and not self.allowed_hosts else ("localhost", *self.allowed_hosts)
