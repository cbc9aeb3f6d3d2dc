"""What is not at its base value when nothing runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from cluster.gateway.dispatch import Dispatcher
from cluster.gateway.service import Gateway
from decode.worker import DecodeWorker
from kvpool.node import PoolNode
from prefill.worker import PrefillWorker

POOL_COUNTS = ("num_reserved", "num_evicting", "num_quarantined", "num_leases", "num_transfers")
DECODE_COUNTS = ("requests_running", "requests_waiting", "requests_ending", "kv_blocks_in_use")


def leftovers(services: Mapping[str, object]) -> list[str]:
    """Look through the services by name; empty when all is well."""
    return [f"{name}: {text}" for name, s in services.items() for text in _of(s)]


def _of(service: object) -> Iterator[str]:
    match service:
        case PoolNode():
            stats = service.stats()
            yield from _not_zero({key: getattr(stats, key) for key in POOL_COUNTS}.items())
            total = stats.num_free + stats.num_committed
            if total != stats.num_slots:
                yield f"{total} of {stats.num_slots} slots"
        case PrefillWorker():
            if not service.idle:
                yield "not idle"
        case DecodeWorker():
            counters = service.state.counters()
            yield from _not_zero((key, counters[key]) for key in DECODE_COUNTS)
        case Dispatcher():
            yield from _not_zero(
                (("requests", service.num_requests), ("extra tasks", service.num_tasks - 1))
            )
        case Gateway():
            yield from _of(service.dispatcher)
            yield from _not_zero((("admitted", service._api._num_admitted),))


def _not_zero(counts: Iterable[tuple[str, float]]) -> Iterator[str]:
    return (f"{key} = {count}" for key, count in counts if count)
