"""What each process is started with; handed to it as it is, so this module imports little."""

from __future__ import annotations

from dataclasses import dataclass

from core.config import ConductorConfig, DecodeConfig, GatewayConfig, PoolNodeConfig, PrefillConfig
from core.latency import LatencyProfile
from core.messages.to_conductor import WorkerRole
from engine.base import ModelSpec

KV_LAYOUT = "layer,kv,head,token,dim"
"""Order of the values in a block, for the root of block hashes."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """How a worker makes its engine. `spec` and `profile` are for the toy and emulated ones."""

    kind: str
    model_dir: str
    block_size: int
    num_blocks: int
    max_model_len: int
    device: str
    dtype: str
    threads: int
    spec: ModelSpec | None = None
    profile: LatencyProfile | None = None


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker: `host` is the index of its pool node, `cores` empty when it is not pinned."""

    name: str
    role: WorkerRole
    host: int
    engine: EnginePlan
    config: PrefillConfig | DecodeConfig
    cores: tuple[int, ...]
    nice: int


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """One pool node."""

    name: str
    config: PoolNodeConfig


@dataclass(frozen=True, slots=True)
class GatewayPlan:
    """The gateway, and what its block hashes cover besides tokens and salt."""

    config: GatewayConfig
    model_dir: str
    fingerprint: str
    tokenizer_digest: str
    kv_dtype: str
    eos_token_ids: tuple[int, ...]
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Deployment:
    """Everything that runs, besides Ray."""

    conductor: ConductorConfig
    pools: tuple[PoolPlan, ...]
    workers: tuple[WorkerPlan, ...]
    gateway: GatewayPlan
    event_log: bool
