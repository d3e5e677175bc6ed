"""A meter's births and deaths in order, as `CachingAllocator.replay` takes them."""

from course_lib.memory import MemoryMeter


def events_of(meter: MemoryMeter) -> list[tuple[str, int, int]]:
    """What dies between two operators dies before the second one's results are born."""
    events = []
    for name, record in enumerate(meter._ledger._records):
        if record.account is meter._ledger.main:
            events.append((record.born, 1, name, ("birth", name, record.nbytes)))
            if record.died is not None:
                events.append((record.died, 0, name, ("release", name, record.nbytes)))
    return [event for *_, event in sorted(events)]
