"""One frozen configuration type per component, built once at the edge (`cluster.config`).

Every field has a unit in its name. Defaults and their reasons are in `cluster.config`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolNodeConfig:
    """A pool node: `num_slots` slots of `slot_bytes`, in segments of at most `segment_bytes`.

    `reserve_ttl_s` bounds how long a reservation may stay uncommitted without any write.
    """

    num_slots: int
    slot_bytes: int
    num_layers: int
    segment_bytes: int = 1 << 30
    reserve_ttl_s: float = 30.0
    lease_ttl_s: float = 30.0
    event_interval_s: float = 0.05
    report_interval_s: float = 0.5
    max_transfers: int = 4096


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """A prefill worker. Bounds of a chunk: `max_chunk_tokens`, `max_chunk_requests`."""

    max_chunk_tokens: int = 512
    max_chunk_requests: int = 16
    max_queued_requests: int = 1024
    load_timeout_s: float = 10.0
    handoff_timeout_s: float = 30.0
    report_interval_s: float = 0.5


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """A decode worker.

    `queue_timeout_s` bounds the wait for a prefill that has not given its first token,
    `handoff_timeout_s` every wait without progress after that or for slots.
    """

    max_batch: int = 64
    max_queued_requests: int = 1024
    max_chunk_tokens: int = 512
    load_timeout_s: float = 10.0
    queue_timeout_s: float = 600.0
    handoff_timeout_s: float = 60.0
    report_interval_s: float = 0.5


@dataclass(frozen=True, slots=True)
class ConductorConfig:
    """The Conductor. `None` for a limit means no admission by it.

    `balancing_threshold` is Algorithm 1's: above this ratio of best to local prefix it fetches.
    """

    policy: str = "kvcache-centric"
    seed: int = 0
    block_size: int = 16
    balancing_threshold: float = 2.0
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    link_bytes_per_s: float = 1e9
    block_bytes: int = 737_280
    report_interval_s: float = 0.5
    worker_timeout_s: float = 3.0


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """The gateway: limits are enforced before tokenising; see `http-api.md`."""

    model_name: str
    max_model_len: int
    block_size: int
    max_body_bytes: int = 10_000_000
    max_header_bytes: int = 16_384
    max_json_depth: int = 64
    max_choices: int = 128
    max_prompts: int = 128
    max_inflight_requests: int = 1024
    max_connections: int = 2048
    max_attempts: int = 8
    place_timeout_s: float = 10.0
    retry_window_s: float = 60.0
    stall_timeout_s: float = 120.0
    attempt_timeout_s: float = 600.0
    keep_alive_s: float = 75.0
    ping_interval_s: float = 15.0
    stream_buffer_bytes: int = 1 << 20
    api_keys: tuple[str, ...] = ()
    enable_forced_tokens: bool = False
