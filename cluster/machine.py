"""What this machine offers, and whether a cluster could listen here."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import psutil

from cluster.config import Config
from cluster.deployment import Machine
from core.errors import ConfigError


def this_machine() -> Machine:
    """Return what this machine offers, without loading torch."""
    from importlib.metadata import version

    from kvpool.memory import available_memory

    gpus = Path("/proc/driver/nvidia/gpus")
    has_gpu = gpus.is_dir() and any(gpus.iterdir()) and not version("torch").endswith("+cpu")
    available_bytes, _ = available_memory()
    return Machine(tuple(sorted(os.sched_getaffinity(0))), available_bytes, has_gpu)


def check_addresses(config: Config) -> int:
    """Return the gateway's port, a free one for 0. Raises `ConfigError` for what cannot be bound.

    `listen` is looked at only where the processes run on this machine.
    """
    if config.ray.address is None and config.listen != "node":
        _bind("listen", config.listen, 0)
    return _bind("host", config.host, config.port)


def _bind(key: str, host: str, port: int) -> int:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(_no_address(key, host)) from error
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(_no_address(key, host)) from error
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"`port` {port} on {host} is taken{_port_owner(port)}: stop that, or choose "
                "another with --port"
            ) from error
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another `{key}` or `port`"
        ) from error


def _no_address(key: str, host: str) -> str:
    flag = " (--host)" if key == "host" else ""
    return (
        f"`{key}` {host!r} is no address of this machine: set it{flag} to 127.0.0.1, to one of "
        "the machine's own, or to 0.0.0.0 for all of them"
    )


def _port_owner(port: int) -> str:
    try:
        for found in psutil.net_connections("tcp"):
            is_it = found.status == psutil.CONN_LISTEN and found.laddr and found.laddr.port == port
            if is_it and found.pid:
                return f" by process {found.pid} ({psutil.Process(found.pid).name()})"
    except psutil.Error:
        return ""
    return ""
