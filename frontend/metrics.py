"""What the edge counts and times, in a registry of its own for each app."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

# From a cached short prompt on a GPU (10 ms) to a long queue on a CPU.
_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class FrontendMetrics:
    """Metrics of one app."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "tandem_http_requests",
            "HTTP requests answered",
            ["route", "status"],
            registry=self._registry,
        )
        self.running = Gauge(
            "tandem_edge_generations_running",
            "Generations the edge holds",
            registry=self._registry,
            multiprocess_mode="livesum",
        )
        self.prompt_tokens = Counter(
            "tandem_edge_prompt_tokens", "Prompt tokens taken in", registry=self._registry
        )
        self.output_tokens = Counter(
            "tandem_edge_output_tokens", "Tokens given out", registry=self._registry
        )
        self.time_to_first_token = Histogram(
            "tandem_edge_time_to_first_token_seconds",
            "From the checked request to its first token",
            buckets=_TTFT_BUCKETS_S,
            registry=self._registry,
        )
        self.duration = Histogram(
            "tandem_edge_generation_seconds",
            "From the checked request to its last token",
            buckets=_E2E_BUCKETS_S,
            registry=self._registry,
        )

    def render(self) -> str:
        """Return all in Prometheus' text format."""
        return generate_latest(self._registry).decode()
