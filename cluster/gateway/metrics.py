"""Prometheus metrics, with vLLM's names where it has them, in a registry of their own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from cluster.gateway.cluster_metrics import ClusterCollector
from cluster.request_events import (
    Abandoned,
    EndRequest,
    EngineFailed,
    Finished,
    NeverFits,
    Outcome,
    Overloaded,
    Unavailable,
)
from core.messages.to_conductor import ClusterState
from core.messages.to_gateway import PrefillStats
from core.requests import FinishReason

_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
_REJECTIONS = ("connections_full", "gateway_full", "overloaded", "never_fits")
_FAILURES = ("unavailable", "engine_failed", "client_gone")
_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


class Metrics:
    """All that the gateway knows; figures about no worker role have role `gateway`."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        self._cluster = ClusterCollector(model_name)
        self.registry.register(self._cluster)
        labels = ("model_name", "role")

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(name, text, (*labels, *more), registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

        self._cache_queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up.")
        self._cache_hits = counter("vllm:prefix_cache_hits", "Prompt tokens found locally.")
        self._pool_queries = counter(
            "vllm:external_prefix_cache_queries", "Prompt tokens looked up in the pool."
        )
        self._pool_hits = counter(
            "vllm:external_prefix_cache_hits", "Prompt tokens found in the pool."
        )
        self._preemptions = counter("vllm:num_preemptions", "Attempts given back by preemption.")
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens prefilled.")
        self._by_source = counter(
            "vllm:prompt_tokens_by_source", "Prompt tokens by where they came from.", "source"
        )
        self._generated = counter("vllm:generation_tokens", "Tokens generated.")
        self._success = counter("vllm:request_success", "Finished requests.", "finished_reason")
        self._ttft = histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", _SECONDS
        )
        self._itl = histogram("vllm:inter_token_latency_seconds", "Between two tokens.", _SECONDS)
        self._tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean after the first.", _SECONDS
        )
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to end.", _SECONDS)
        self._queue = histogram("vllm:request_queue_time_seconds", "In the queue.", _SECONDS)
        self._prefill = histogram("vllm:request_prefill_time_seconds", "In prefill.", _SECONDS)
        self._decode = histogram("vllm:request_decode_time_seconds", "In decode.", _SECONDS)
        self._request_prompt = histogram("vllm:request_prompt_tokens", "Of a request.", _TOKENS)
        self._request_generated = histogram(
            "vllm:request_generation_tokens", "Of a request.", _TOKENS
        )
        self._recomputed = counter(
            "halfmoon_recomputed_tokens", "Known tokens computed again by later attempts."
        )
        self._migrations = counter("halfmoon_migrations", "Requests continued elsewhere.")
        self._rejections = counter("halfmoon_rejections", "Requests refused.", "reason")
        self._failures = counter("halfmoon_failed_requests", "Requests failed.", "reason")
        self._placements = counter("halfmoon_placements", "Placements.", "policy")
        self._unknown = counter("halfmoon_unknown_fields", "Request fields that were ignored.")
        self._responses = counter("halfmoon_http_responses", "HTTP answers.", "status")
        self._show_zeros()
        self._generated_by_decode = self._generated.labels(model_name, "decode")
        self._itl_of_decode = self._itl.labels(model_name, "decode")

    def _show_zeros(self) -> None:
        """Show all that can be counted from the start: a rate needs the 0 before the first."""
        for of_prefill in (
            self._cache_queries,
            self._cache_hits,
            self._pool_queries,
            self._pool_hits,
            self._prompt_tokens,
            self._recomputed,
            self._generated,
        ):
            of_prefill.labels(self._model, "prefill")
        for of_decode in (self._preemptions, self._generated):
            of_decode.labels(self._model, "decode")
        for of_gateway in (self._migrations, self._unknown):
            of_gateway.labels(self._model, "gateway")
        for labelled, role, values in (
            (self._by_source, "prefill", _SOURCES),
            (self._success, "decode", tuple(FinishReason)),
            (self._rejections, "gateway", _REJECTIONS),
            (self._failures, "gateway", _FAILURES),
        ):
            for value in values:
                labelled.labels(self._model, role, str(value))

    # --- what happens ---

    def answered(self, status: int) -> None:
        """Count an HTTP answer."""
        self._responses.labels(self._model, "gateway", str(status)).inc()

    def ignored_fields(self, count: int) -> None:
        """Count fields of a request that nobody knows."""
        if count:
            self._unknown.labels(self._model, "gateway").inc(count)

    def refused(self, reason: str) -> None:
        """Count a request refused by the gateway itself."""
        self._rejections.labels(self._model, "gateway", reason).inc()

    def placed(self, policy: str) -> None:
        """Count a placement by the policy that chose it."""
        self._placements.labels(self._model, "gateway", policy).inc()

    def migrated(self) -> None:
        """Count an attempt after the first."""
        self._migrations.labels(self._model, "gateway").inc()

    def preempted(self) -> None:
        """Count an attempt given back because blocks ran out."""
        self._preemptions.labels(self._model, "decode").inc()

    def prefilled(self, stats: PrefillStats, *, first: bool) -> None:
        """Take where an attempt's known tokens came from; later attempts are counted apart."""
        if not first:
            self._recomputed.labels(self._model, "prefill").inc(stats.computed_tokens)
            return
        total = stats.computed_tokens + stats.cached_local_tokens + stats.cached_pool_tokens
        at = (self._model, "prefill")
        self._prompt_tokens.labels(*at).inc(total)
        self._cache_queries.labels(*at).inc(total)
        self._cache_hits.labels(*at).inc(stats.cached_local_tokens)
        self._pool_queries.labels(*at).inc(total - stats.cached_local_tokens)
        self._pool_hits.labels(*at).inc(stats.cached_pool_tokens)
        self._by_source.labels(*at, "local_compute").inc(stats.computed_tokens)
        self._by_source.labels(*at, "local_cache_hit").inc(stats.cached_local_tokens)
        self._by_source.labels(*at, "external_kv_transfer").inc(stats.cached_pool_tokens)
        self._queue.labels(*at).observe(stats.queue_s)
        self._prefill.labels(*at).observe(stats.load_s + stats.compute_s)

    def first_token(self, ttft_s: float) -> None:
        """Take a request's time to its first token."""
        self._generated.labels(self._model, "prefill").inc()
        self._ttft.labels(self._model, "prefill").observe(ttft_s)

    def next_token(self, gap_s: float) -> None:
        """Take the time between two tokens of a request."""
        self._generated_by_decode.inc()
        self._itl_of_decode.observe(gap_s)

    def ended(
        self, end: EndRequest, num_prompt_tokens: int, e2e_s: float, decode_s: float | None
    ) -> None:
        """Take the end of a request. `decode_s` is from first to last token, `None` without any."""
        outcome = end.outcome
        if not isinstance(outcome, Finished):
            kind = self._rejections if _is_rejection(outcome) else self._failures
            kind.labels(self._model, "gateway", _reason(outcome)).inc()
            return
        at = (self._model, "decode")
        self._success.labels(*at, str(outcome.reason)).inc()
        self._e2e.labels(*at).observe(e2e_s)
        self._request_prompt.labels(*at).observe(num_prompt_tokens)
        self._request_generated.labels(*at).observe(end.num_output_tokens)
        if decode_s is not None:
            self._decode.labels(*at).observe(decode_s)
            if end.num_output_tokens > 1:
                self._tpot.labels(*at).observe(decode_s / (end.num_output_tokens - 1))

    # --- what others tell ---

    def set_workers(self, state: ClusterState) -> None:
        """Show what the Conductor knows from now on."""
        self._cluster.state = state

    def render(self) -> bytes:
        """Return the text that `/metrics` answers."""
        return generate_latest(self.registry)


def _is_rejection(outcome: Outcome) -> bool:
    return isinstance(outcome, Overloaded | NeverFits)


def _reason(outcome: Outcome) -> str:
    match outcome:
        case Finished():
            return str(outcome.reason)
        case NeverFits():
            return "never_fits"
        case Overloaded():
            return "overloaded"
        case Unavailable():
            return "unavailable"
        case EngineFailed():
            return "engine_failed"
        case Abandoned():
            return "client_gone"
