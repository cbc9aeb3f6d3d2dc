"""Skips, with the reason, what this machine cannot run."""

import os
from pathlib import Path

import pytest

NEEDS = {
    "root": (os.geteuid() == 0, "needs root, for network namespaces and tmpfs"),
    "gpu": (Path("/proc/driver/nvidia/version").exists(), "needs a CUDA device"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker, (is_there, reason) in NEEDS.items():
            if not is_there and item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
