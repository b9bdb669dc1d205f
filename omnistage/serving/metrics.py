"""Prometheus metrics of one API process, in a registry of their own.  Knows no engine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from omnistage.serving.requests import Done
from omnistage.serving.timeline import Recorder

Gauges = Mapping[str, Mapping[str, float]]

_LATENCIES = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class StageGauges(Collector):
    """Asks the backend for its gauges at every scrape: omnistage_stage_NAME{stage="..."}."""

    def __init__(self, read: Callable[[], Gauges]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        for stage, gauges in self._read().items():
            for name, value in gauges.items():
                metric = "omnistage_stage_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
                if metric not in families:
                    families[metric] = GaugeMetricFamily(metric, f"{name} of a stage", labels=["stage"])
                families[metric].add_metric([stage], value)
        return families.values()


class Metrics:
    """Counters and histograms of the HTTP layer, plus whatever `read_gauges` reports per stage."""

    def __init__(self, read_gauges: Callable[[], Gauges]) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "omnistage_http_requests", "HTTP requests", ["route", "method", "status"], registry=registry
        )
        self.request_seconds = Histogram(
            "omnistage_http_request_seconds",
            "Seconds from a request's first byte to its answer's last",
            ["route"],
            buckets=_LATENCIES,
            registry=registry,
        )
        self.requests_in_progress = Gauge(
            "omnistage_http_requests_in_progress", "HTTP requests not yet answered", registry=registry
        )
        self.time_to_first_token = Histogram(
            "omnistage_time_to_first_token_seconds",
            "Seconds from admission to the first text",
            buckets=_LATENCIES,
            registry=registry,
        )
        self.time_to_first_audio = Histogram(
            "omnistage_time_to_first_audio_seconds",
            "Seconds from admission to the first sound",
            buckets=_LATENCIES,
            registry=registry,
        )
        self.tokens = Counter("omnistage_tokens", "Tokens by kind", ["kind"], registry=registry)
        self.audio_seconds = Counter("omnistage_audio_seconds", "Seconds of speech made", registry=registry)
        self.replays = Counter(
            "omnistage_replays", "Replays of requests after a worker's death", registry=registry
        )
        registry.register(StageGauges(read_gauges))

    def observe_request(self, *, route: str, method: str, status: int, seconds: float) -> None:
        known_method = method if method in _KNOWN_METHODS else "other"
        self.requests.labels(route, known_method, str(status)).inc()
        self.request_seconds.labels(route).observe(seconds)

    def observe_answer(self, done: Done, recorder: Recorder) -> None:
        """Count a finished answer."""
        timeline = recorder.timeline(done)
        if timeline.time_to_first_token is not None:
            self.time_to_first_token.observe(timeline.time_to_first_token)
        if timeline.time_to_first_audio is not None:
            self.time_to_first_audio.observe(timeline.time_to_first_audio)
        self.tokens.labels("prompt").inc(done.usage.prompt_tokens)
        self.tokens.labels("cached").inc(done.usage.cached_tokens)
        self.tokens.labels("completion").inc(done.usage.completion_tokens)
        self.tokens.labels("audio").inc(done.audio_tokens)
        self.audio_seconds.inc(timeline.audio_seconds)
        self.replays.inc(done.replays)

    def render(self) -> bytes:
        """The exposition format, version 0.0.4."""
        return generate_latest(self.registry)
