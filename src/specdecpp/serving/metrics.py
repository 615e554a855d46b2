"""Counters of the server, in Prometheus' form, in a registry of their own.

Speculation has vLLM's own names, so that its dashboards and `vllm bench serve` find it: a draft is a step with draft tokens.
"""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from specdecpp.loading.pair import Pair
from specdecpp.metrics import Metrics
from specdecpp.serving.engine import EngineThread, StepEvent

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
STAGES = ("draft", "head", "verify", "other")
LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 32, 64)


class ServerMetrics:
    """The counters of one server: `watch` its engine, add turns and requests that ended."""

    def __init__(self) -> None:
        self.registry = r = CollectorRegistry()
        self._requests = Counter("specdecpp_requests", "Requests by how they ended.", ["outcome"], registry=r)
        self._latency = Histogram("specdecpp_request_seconds", "Arrival to the last token.", buckets=SECONDS, registry=r)
        self._first = Histogram("specdecpp_time_to_first_token_seconds", "Arrival to text.", buckets=SECONDS, registry=r)
        self._prompt = Counter("specdecpp_prompt_tokens", "Tokens of prompts.", registry=r)
        self._generated = Counter("specdecpp_generation_tokens", "Tokens of answers.", registry=r)
        self._drafts = Counter("vllm:spec_decode_num_drafts", "Steps with draft tokens.", registry=r)
        self._drafted = Counter("vllm:spec_decode_num_draft_tokens", "Draft tokens.", registry=r)
        self._accepted = Counter("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens.", registry=r)
        self._at = Counter("vllm:spec_decode_num_accepted_tokens_per_pos", "Of a place, from 0.", ["position"], registry=r)
        self._lengths = Histogram("specdecpp_accepted_per_step", "Draft tokens accepted.", buckets=LENGTHS, registry=r)
        self._seconds = Counter("specdecpp_stage_seconds", "Seconds of the models by stage.", ["stage"], registry=r)
        for stage in (*STAGES, "prefill"):
            self._seconds.labels(stage)

    def watch(self, engine: EngineThread, pair: Pair) -> None:
        running = Gauge("specdecpp_requests_running", "Requests that are being answered.", registry=self.registry)
        waiting = Gauge("specdecpp_requests_waiting", "Requests that wait for their first.", registry=self.registry)
        running.set_function(lambda: engine.num_running)
        waiting.set_function(lambda: engine.num_waiting)
        fallen = Gauge("specdecpp_acceptance_fallen", "1 once acceptance fell below the check's.", registry=self.registry)
        fallen.set_function(lambda: (watch := pair.measured.get("watch")) is not None and watch.warning is not None)

    def add_turn(self, events: Sequence[StepEvent]) -> None:
        """Count the steps of one turn."""
        steps = [event.step for event in events]
        self._generated.inc(sum(step.num_tokens for step in steps))
        self._drafts.inc(sum(step.num_drafted > 0 for step in steps))
        self._drafted.inc(sum(step.num_drafted for step in steps))
        self._accepted.inc(sum(step.num_accepted for step in steps))
        for step in steps:
            self._lengths.observe(step.num_accepted)
            for place in range(step.num_accepted):
                self._at.labels(place).inc()
        for stage in STAGES:
            self._seconds.labels(stage).inc(sum(getattr(step, f"{stage}_s") for step in steps))

    def add_request(
        self, outcome: str, metrics: Metrics | None = None, *, latency_s: float = 0.0, first_s: float | None = None
    ) -> None:
        """Count one request: finished, cancelled, or the code of the error that it ended with."""
        self._requests.labels(outcome).inc()
        if metrics is not None:
            self._prompt.inc(metrics.num_prompt_tokens)
            self._seconds.labels("prefill").inc(metrics.prefill_s)
        if outcome == "finished":
            self._latency.observe(latency_s)
        if first_s is not None:
            self._first.observe(first_s)
