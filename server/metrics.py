"""Owns what GET /metrics tells: counters and histograms of answers as they were shown. Does not own when a token came (reply).

Tokens behind a stop text or of a client that has gone are in no figure, as they are in no answer.
"""

from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from runtime.request import FinishReason

disable_created_metrics()  # type: ignore[no-untyped-call]

TOKEN_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.0025, 0.003, 0.0035, 0.004, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
"""A token of a 7B takes about 3 ms: buckets that begin at 10 ms would hide it."""
FIRST_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96)
REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)


class Metrics:
    """One server's figures, in seconds and tokens, each with the label `model_name`."""

    def __init__(
        self, model_name: str, running: Callable[[], float], waiting: Callable[[], float], kv: Callable[[], float]
    ) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Callable[[float], None]:
            made = Histogram(f"quartet:{name}_seconds", about, ["model_name"], buckets=buckets, registry=self._registry)
            return made.labels(model_name).observe

        self.first_token = histogram("time_to_first_token", "A request's arrival to its first token.", FIRST_SECONDS)
        self.inter_token = histogram("inter_token_latency", "Between two tokens of an answer.", TOKEN_SECONDS)
        self.end_to_end = histogram("e2e_request_latency", "A request's arrival to its last token.", REQUEST_SECONDS)
        self.queue = histogram("request_queue_time", "Waiting for a slot.", REQUEST_SECONDS)
        self.prefill = histogram("request_prefill_time", "Slot to first token.", FIRST_SECONDS)
        self.decode = histogram("request_decode_time", "First token to last.", REQUEST_SECONDS)

        def counter(name: str, about: str) -> Callable[[float], None]:
            return Counter(f"quartet:{name}", about, ["model_name"], registry=self._registry).labels(model_name).inc

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens, of several answers to one prompt once.")
        self.cached_tokens = counter("prompt_tokens_cached", "Prompt tokens that were found in the cache and not computed.")
        self.generation_tokens = counter("generation_tokens", "Tokens of answers.")
        labels = ["model_name", "finished_reason"]
        ended = Counter("quartet:request_success", "Answers that have ended.", labels, registry=self._registry)
        self._ended = {reason: ended.labels(model_name, reason).inc for reason in ("stop", "length", "cancelled", "error")}
        for name, about, read in (
            ("num_requests_running", "Requests that hold a slot.", running),
            ("num_requests_waiting", "Requests that wait for one.", waiting),
            ("kv_cache_usage_perc", "Positions in use over positions there are, 0 to 1.", kv),
        ):
            Gauge(f"quartet:{name}", about, ["model_name"], registry=self._registry).labels(model_name).set_function(read)

    def ended(self, reason: FinishReason) -> None:
        """Count an answer's end."""
        self._ended[reason]()

    def text(self) -> bytes:
        """Prometheus' text format, version 0.0.4."""
        return generate_latest(self._registry)
