"""Fixtures: one cluster per test, 1 prefill and 1 decode worker."""

from __future__ import annotations

import pytest

from tests.gateway.cluster import running


@pytest.fixture
async def cluster(tmp_path):
    async with running(tmp_path) as made:
        yield made
