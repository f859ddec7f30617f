"""The event log: it keeps events in order, and readers can wait for the next."""

import asyncio

from resolver.base.event_log import EventLog


def test_only_the_last_are_kept_and_numbers_go_on() -> None:
    events = EventLog(kept=3)
    for number in range(5):
        events.publish("repair", {"n": number})
    assert [(event.number, event.fields["n"]) for event in events.after(0)] == [(3, 2), (4, 3), (5, 4)]
    assert [event.number for event in events.after(4)] == [5]
    assert events.after(5) == []


async def test_every_waiting_reader_is_woken() -> None:
    events = EventLog()
    waiting = [asyncio.create_task(events.wait(0)) for _ in range(3)]
    gone = asyncio.create_task(events.wait(0))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    events.publish("source", {"source": "bpf"})
    for found in await asyncio.gather(*waiting):
        assert [(event.number, event.kind, event.fields) for event in found] == [
            (1, "source", {"source": "bpf"})
        ]
    assert [event.number for event in await events.wait(0)] == [1]  # a second wait returns the event at once
