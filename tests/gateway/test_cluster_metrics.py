"""What `/metrics` makes of the cluster's state."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.gateway.metrics import Metrics
from cluster.request_events import (
    Abandoned,
    EndRequest,
    EngineFailed,
    Finished,
    NeverFits,
    Overloaded,
    Unavailable,
)
from core.ids import Address, Incarnation
from core.messages.to_conductor import (
    ClusterState,
    DecodeLoad,
    PoolReport,
    PoolTotals,
    PrefillLoad,
    TransferTotals,
    WorkerReport,
    WorkerState,
)
from core.requests import FinishReason
from tests.gateway.cluster import running

ORDER = ("role", "worker", "tier", "state", "source", "destination")
LINK = TransferTotals("pool-0", "decode-0", 4096, 0.5)


def row(name: str, role: str, **fields: Any) -> WorkerState:
    values: dict[str, Any] = {
        "role": role, "name": name, "incarnation": Incarnation(name), "address": Address("h", 1),
        "pool": "pool-0", "restarts": 0, "num_assigned": 0, "num_blocks": 100, "slot_bytes": None,
        "report": None, "pool_report": None, "last_seen_s": 0.0,
    }  # fmt: skip
    return WorkerState(**(values | fields))


def prefill(free: int) -> PrefillLoad:
    return PrefillLoad(num_waiting=3, num_running=2, queued_tokens=500, free_blocks=free)


def decode(free: int) -> DecodeLoad:
    return DecodeLoad(
        num_waiting=1, num_running=4, context_tokens=90, free_blocks=free, step_s=0.01
    )


POOL = PoolReport(
    num_free=1, num_reserved=2, num_committed=3, num_quarantined=4, num_leases=5, links=(),
    num_evicting=6, totals=PoolTotals(11, 12, 13, 14),
    transfers=(TransferTotals("pool-1", "pool-0", 10, 0.25),),
)  # fmt: skip
STATE = ClusterState(
    epoch=1, policy="halfmoon",
    workers=(
        row("prefill-0", "prefill", report=WorkerReport(prefill(75), None, draining=False)),
        row("prefill-1", "prefill", report=WorkerReport(prefill(25), None, draining=False)),
        row("decode-0", "decode",
            report=WorkerReport(None, decode(90), draining=False, transfers=(LINK,))),
        row("both", "coupled", num_blocks=200,
            report=WorkerReport(prefill(100), decode(100), draining=False)),
        row("new", "decode"),
        row("pool-0", "pool", slot_bytes=1000, pool_report=POOL),
        row("pool-1", "pool", slot_bytes=1000),
    ),
    num_indexed_blocks=7, num_placed=8, num_rejected=9, num_directory_gaps=10,
)  # fmt: skip


def samples(text: str) -> dict[tuple[str, ...], float]:
    """By name and label values in this `ORDER`; the model's name is the same everywhere."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "m"
            labels = (sample.labels[name] for name in ORDER if name in sample.labels)
            found[(sample.name, *labels)] = sample.value
    return found


def shown(state: ClusterState) -> dict[tuple[str, ...], float]:
    metrics = Metrics("m")
    before = samples(metrics.render().decode())
    metrics.set_workers(state)
    after = samples(metrics.render().decode())
    return {key: value for key, value in after.items() if key not in before}


def test_every_figure_of_the_cluster():
    pool, link = ("pool", "pool-0"), ("decode", "decode-0", "pool-0", "decode-0")
    fetched = (*pool, "pool-1", "pool-0")
    assert shown(STATE) == {
        ("vllm:num_requests_running", "prefill"): 6,
        ("vllm:num_requests_running", "decode"): 8,
        ("vllm:num_requests_waiting", "prefill"): 9,
        ("vllm:num_requests_waiting", "decode"): 2,
        ("vllm:kv_cache_usage_perc", "prefill"): 200 / 400,
        ("vllm:kv_cache_usage_perc", "decode"): 110 / 300,
        ("halfmoon_pool_bytes", *pool, "dram", "free"): 1000,
        ("halfmoon_pool_bytes", *pool, "dram", "reserved"): 2000,
        ("halfmoon_pool_bytes", *pool, "dram", "committed"): 3000,
        ("halfmoon_pool_bytes", *pool, "dram", "quarantined"): 4000,
        ("halfmoon_pool_bytes", *pool, "dram", "evicting"): 6000,
        ("halfmoon_pool_leases", *pool): 5,
        ("halfmoon_blocks_evicted_total", *pool): 11,
        ("halfmoon_blocks_replicated_total", *pool): 12,
        ("halfmoon_blocks_corrupted_total", *pool): 13,
        ("halfmoon_kv_lease_expired_total", *pool): 14,
        ("halfmoon_transfer_bytes_total", *link): 4096,
        ("halfmoon_transfer_seconds_total", *link): 0.5,
        ("halfmoon_transfer_bytes_total", *fetched): 10,
        ("halfmoon_transfer_seconds_total", *fetched): 0.25,
        ("halfmoon_directory_gaps_total", "conductor"): 10,
        ("halfmoon_indexed_blocks", "conductor"): 7,
    }


def documented() -> dict[str, tuple[set[str], set[str]]]:
    """By metric of our own: its further labels, and the values that the last column names."""
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    table = text[text.index("| `halfmoon_…`") :].partition("\n\n")[0]
    found: dict[str, tuple[set[str], set[str]]] = {}
    for line in table.splitlines()[2:]:
        names, labels, meaning = (re.findall("`([^`]*)`", cell) for cell in line.split("|")[1:4])
        found |= {f"halfmoon_{name}": (set(labels), set(meaning)) for name in names}
    return found


def our_samples(metrics: Metrics) -> dict[str, list[dict[str, str]]]:
    """The labels of each sample; the times of creation that the library adds are left out."""
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            if sample.name.startswith("halfmoon_") and not sample.name.endswith("_created"):
                found.setdefault(sample.name, []).append(sample.labels)
    return found


def test_the_operators_table_is_what_is_shown():
    metrics, table = Metrics("m"), documented()
    fresh = our_samples(metrics)
    for name, (labels, values) in table.items():
        if labels == {"reason"}:
            assert values == {sample["reason"] for sample in fresh[name]}, name
    metrics.set_workers(STATE)
    metrics.placed("halfmoon")
    metrics.answered(200)
    shown = our_samples(metrics)
    assert shown.keys() == table.keys()
    for name, samples_of in shown.items():
        expected = {"model_name", "role", *table[name][0]}
        assert all(set(labels) == expected for labels in samples_of), name


@pytest.mark.parametrize(
    "outcome",
    [
        *map(Finished, FinishReason),
        NeverFits(), Overloaded(1.0), Unavailable(1.0), EngineFailed(), Abandoned(),
    ],
)  # fmt: skip
def test_every_end_is_counted_where_a_zero_was_shown(outcome):
    metrics = Metrics("m")
    before = counters(metrics)
    metrics.ended(EndRequest(outcome, "", 1), 1, 1.0, None)
    after = counters(metrics)
    assert after.keys() == before.keys()
    assert sum(after.values()) == sum(before.values()) + 1


def counters(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        if family.type == "counter"
        for sample in family.samples
    }


def test_an_empty_cluster_uses_nothing():
    figures = shown(replace(STATE, workers=()))
    assert figures["vllm:kv_cache_usage_perc", "decode"] == 0
    assert not any(name.startswith("halfmoon_pool") for name, *_ in figures)


async def test_the_gateway_shows_what_its_conductor_knows(tmp_path):
    async with running(tmp_path) as cluster:
        text = ""
        while "vllm:kv_cache_usage_perc{" not in text:
            async with cluster.session.get("/metrics") as response:
                text = await response.text()
        assert 'vllm:num_requests_running{model_name="tiny",role="decode"} 0.0' in text
