"""What the plugin tells Prometheus, under vLLM's names for the same things with `specdecpp:` in front.

They are kept in the process that drafts, a worker. The API server shows them at /metrics when all processes of a host share
`PROMETHEUS_MULTIPROC_DIR`; without it only what vLLM's own scheduler counts is to be seen there.
"""

from functools import cache
from typing import Any

from specdecpp.metrics import Metrics

ROUND, REQUEST = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32), (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 10, 12, 16, 20)
SHARES = tuple(i / 10 for i in range(1, 11))


class Meters:
    """Counters over rounds, and histograms over finished requests. Make them once a process (`meters`)."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Histogram

        def counter(name: str, about: str) -> Any:
            return Counter(f"specdecpp:{name}", about)

        def histogram(name: str, about: str, buckets: tuple[int | float, ...]) -> Any:
            return Histogram(f"specdecpp:{name}", about, buckets=buckets)

        self._steps = counter("num_spec_steps", "Rounds of requests.")
        self._drafted = counter("num_draft_tokens", "Candidates that were verified.")
        self._accepted = counter("num_accepted_draft_tokens", "Candidates that were accepted.")
        self._expected = counter(
            "expected_accepted_draft_tokens", "Accepted candidates that the head expected, of those it judged."
        )
        self._judged = counter("judged_accepted_draft_tokens", "Accepted candidates, of those the head judged.")
        self._lengths = histogram("draft_tokens_per_step", "Candidates of a round.", ROUND)
        self._request_acceptance = histogram(
            "request_mean_acceptance_length", "Of finished requests: 1 + accepted candidates per round.", REQUEST
        )
        self._request_rate = histogram("request_draft_acceptance_rate", "Of finished requests: accepted over drafted.", SHARES)
        self._request_drafted = histogram("request_draft_tokens_per_step", "Of finished requests: candidates per round.", ROUND)

    def observe_round(self, *, num_drafted: int, num_accepted: int, num_judged_accepted: int, expected: float) -> None:
        """One round of one request. `expected` over accepted tells how well the head is calibrated where it serves."""
        self._steps.inc()
        self._drafted.inc(num_drafted)
        self._accepted.inc(num_accepted)
        self._judged.inc(num_judged_accepted)
        self._expected.inc(expected)
        self._lengths.observe(num_drafted)

    def observe_request(self, metrics: Metrics) -> None:
        """A finished request."""
        self._request_acceptance.observe(metrics.mean_acceptance_length)
        self._request_drafted.observe(metrics.num_draft_tokens / metrics.num_spec_steps)
        if metrics.num_draft_tokens:
            self._request_rate.observe(metrics.draft_acceptance_rate)


@cache
def meters() -> Meters:
    """The one set of this process: Prometheus takes a name only once."""
    return Meters()
