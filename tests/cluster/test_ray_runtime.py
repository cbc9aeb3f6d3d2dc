"""Joining a Ray cluster that is not there is refused at once."""

import pytest

from cluster.ray_runtime import join
from cluster.server_process import free_port
from core.errors import ConfigError


def test_a_ray_cluster_that_is_not_there_is_named():
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError, match=rf"cannot join the Ray cluster at {address}.*`ray\.addr"):
        join(address, num_slots=1)
