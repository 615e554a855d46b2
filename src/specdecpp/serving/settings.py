"""Settings of a server: its limits, what requests that name nothing get, its name, its key."""

from dataclasses import dataclass

from specdecpp.policies import Policy


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of one server. Raises ValueError for limits that admit nothing."""

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
        if self.api_key is not None and not self.api_key.strip():
            raise ValueError("api_key is empty, so anybody would be answered: give a key, or leave it out")
        for name in ("max_running", "max_body_bytes", "max_new_tokens", "timeout_s"):
            if not getattr(self, name) > 0:  # nan is neither
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("max_waiting", "grace_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")

    @property
    def hosts(self) -> tuple[str, ...]:
        """Patterns of the host names that are answered."""
        return ("*",) if self.api_key is not None and not self.allowed_hosts else ("localhost", *self.allowed_hosts)
