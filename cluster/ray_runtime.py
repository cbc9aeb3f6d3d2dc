"""Ray, started for this cluster alone or joined: processes, placement, nothing else.

An embedded Ray listens on loopback only, with token authentication, without dashboard or usage
statistics, its session under the run directory. What Ray reads from the environment is set before
it is imported.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from core.errors import ConfigError

SLOT = "halfmoon_slot"
"""Custom resource: one for each of our processes, whatever the number of cores."""

_JOIN_TIMEOUT_S = 5.0

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Despite its name: 0 makes Ray use the loopback address on every system.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Our processes ask for no CPU; idle workers started ahead would only delay them.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    # A process that asks for no GPU share still sees the GPUs.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray would run our processes at niceness 15.
    "RAY_worker_niceness": "0",
    # Ray would kill our processes for what others on the machine take: memory is checked at start.
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_AUTH_MODE": "token",
    "TOKENIZERS_PARALLELISM": "false",
}


def start_embedded(run_dir: Path, *, num_slots: int, object_store_bytes: int) -> None:
    """Start a Ray of our own on this machine."""
    token = run_dir / "ray_token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    os.environ |= _ENVIRONMENT | {"RAY_AUTH_TOKEN_PATH": str(token)}
    import ray

    ray.init(
        address="local",
        include_dashboard=False,
        resources={SLOT: num_slots},
        object_store_memory=object_store_bytes,
        log_to_driver=False,
        logging_level=logging.CRITICAL,
        _temp_dir=str(run_dir / "ray"),
    )


def join(address: str, *, num_slots: int) -> None:
    """Join an existing cluster. Raises `ConfigError` when it is not there or has no room."""
    host, _, port = address.rpartition(":")
    try:
        # Ray itself would go on trying for minutes.
        if port.isdigit():
            socket.create_connection((host, int(port)), _JOIN_TIMEOUT_S).close()
        import ray

        ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"cannot join the Ray cluster at {address}: {str(error).splitlines()[0]}; check "
            "`ray.address` (--ray-address) and RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH"
        ) from error
    free = _resources(ray.available_resources).get(SLOT, 0.0)
    if free < num_slots:
        ray.shutdown()
        raise ConfigError(
            f"the Ray cluster at {address} has {free:g} of {num_slots} {SLOT} free: start its "
            f"nodes with --resources='{{\"{SLOT}\": {num_slots}}}'"
        )


def gpu_share(num_workers: int) -> float:
    """Return the part of a GPU that each of `num_workers` gets; 0 when there is none."""
    import ray

    gpus = _resources(ray.cluster_resources).get("GPU", 0.0)
    return min(1.0, int(1000 * gpus / num_workers) / 1000) if num_workers else 0.0


def place_together(name: str, gpu_shares: Sequence[float]) -> list[Any]:
    """Reserve places on one machine; return a scheduling strategy for each process."""
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundles = [{SLOT: 1.0} | ({"GPU": share} if share else {}) for share in gpu_shares]
    group = placement_group(bundles, strategy="STRICT_PACK", name=name)
    return [
        PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        for index in range(len(bundles))
    ]


def _resources(ask: Callable[[], dict[str, float]]) -> dict[str, float]:
    return ask()
