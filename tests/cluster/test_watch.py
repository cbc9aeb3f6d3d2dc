"""What the launcher tells of deaths and restarts."""

from dataclasses import replace

from cluster.state_dir import ProcessRecord
from cluster.watch import Lives
from core.ids import Address, Incarnation

FIRST = ProcessRecord("decode-0", "decode", Incarnation("a"), 10, 1.0, Address("127.0.0.1", 1))
SECOND = replace(FIRST, incarnation=Incarnation("b"), pid=11)
DIED, RESTARTED = (
    "decode-0 (process 10) died; Ray restarts it",
    "decode-0 was restarted as process 11",
)


def test_a_death_is_told_once_and_then_the_restart():
    lives = Lives({"decode-0": FIRST})
    living = {10}

    def look(record: ProcessRecord) -> list[str]:
        return lives.look({"decode-0": record}, lambda r: r.pid in living)

    assert look(FIRST) == []
    living.clear()
    assert look(FIRST) == [DIED]
    assert look(FIRST) == []
    living.add(11)
    assert look(SECOND) == [RESTARTED]
    assert look(SECOND) == []
    living.clear()
    assert look(SECOND) == ["decode-0 (process 11) died; Ray restarts it"]


def test_a_death_that_was_over_between_two_looks_is_told_as_well():
    lives = Lives({"decode-0": FIRST})
    assert lives.look({"decode-0": SECOND}, lambda r: r.pid == 11) == [DIED, RESTARTED]


def test_a_process_without_a_record_is_told_of_when_it_is_dead():
    lives = Lives({})
    assert lives.look({"decode-0": FIRST}, lambda _: True) == []
    assert lives.look({}, lambda _: False) == [DIED]
