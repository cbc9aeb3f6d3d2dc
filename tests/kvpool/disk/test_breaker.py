"""When a disk that failed is tried again."""

from __future__ import annotations

from kvpool.disk.breaker import Breaker


def test_one_try_after_a_pause_that_doubles():
    breaker = Breaker(1.0, 3.0)
    assert breaker.allows(0.0)
    breaker.failed(10.0)
    assert not breaker.allows(10.9)
    for now_s, next_s in ((11.0, 13.0), (13.0, 16.0), (16.0, 19.0)):
        assert breaker.allows(now_s)
        breaker.began()
        assert not breaker.allows(now_s), "one try at a time"
        breaker.failed(now_s)
        assert not breaker.allows(next_s - 0.1)
        assert breaker.allows(next_s)
    breaker.began()
    breaker.succeeded()
    assert breaker.is_closed
    assert breaker.allows(19.0)
    breaker.failed(20.0)
    assert breaker.allows(21.0), "the pause begins anew"


def test_what_began_before_the_failure_changes_nothing():
    breaker = Breaker(1.0)
    breaker.failed(0.0)
    breaker.failed(0.9)
    assert breaker.allows(1.0)
    breaker.succeeded()
    assert not breaker.is_closed
