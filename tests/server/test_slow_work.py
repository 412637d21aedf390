"""Laws of `SlowWork`: one piece at a time, the smallest or the oldest; encoding and parsing wait not for each other."""

from __future__ import annotations

import asyncio
import threading

import pytest

from pilotfish.server.admission.slow_work import (
    MAX_BYTES_ON_LOOP,
    MAX_MIDDLE_BYTES,
    PIECES_PER_OLDEST,
    SlowWork,
)

LONG = "a" * (MAX_MIDDLE_BYTES + 1)


@pytest.fixture
async def slow():
    work = SlowWork()
    yield work
    work.close()


class Pieces:
    """Pieces of work that write down their names, and one that lasts until it is told to end."""

    def __init__(self):
        self.done, self.gate, self.has_begun = [], threading.Event(), threading.Event()

    def note(self, name):
        self.done.append(name)
        return threading.current_thread()

    def block(self, *_):
        self.has_begun.set()
        assert self.gate.wait(30)


async def run(slow, size, work, *args):
    async with slow.turn(size):
        return await slow.run(work, *args)


async def blocked(slow, pieces, size=MAX_BYTES_ON_LOOP + 1):
    """A task whose piece of work has begun and goes on until the gate opens."""
    task = asyncio.create_task(run(slow, size, pieces.block))
    await asyncio.to_thread(pieces.has_begun.wait, 30)
    return task


async def test_small_inputs_stay_on_the_loop_and_others_leave_it(slow):
    here, pieces = threading.current_thread(), Pieces()
    assert await run(slow, MAX_BYTES_ON_LOOP, pieces.note, "small") is here
    assert await run(slow, MAX_BYTES_ON_LOOP + 1, pieces.note, "middle") is not here
    assert await run(slow, MAX_MIDDLE_BYTES + 1, pieces.note, "large") is not here
    assert await slow.run(pieces.note, "slow", is_slow=True) is not here
    assert await slow.encode("ab", pieces.note) is here
    assert len({await slow.encode(text, pieces.note) for text in ("a" * 10_000, LONG)} - {here}) == 2


async def test_the_smallest_piece_that_waits_is_next(slow):
    pieces = Pieces()
    first = await blocked(slow, pieces)
    others = [asyncio.create_task(run(slow, size, pieces.note, size)) for size in (9000, 5000, 200_000, 7000, 5000)]
    await asyncio.sleep(0.01)
    pieces.gate.set()
    await asyncio.gather(first, *others)
    assert pieces.done == [5000, 5000, 7000, 9000, 200_000]


async def test_small_pieces_that_never_end_overtake_a_larger_one_only_a_few_times(slow):
    pieces = Pieces()
    first = await blocked(slow, pieces)
    larger = asyncio.create_task(run(slow, 200_000, pieces.note, "larger"))
    await asyncio.sleep(0)
    flow = [asyncio.create_task(run(slow, 5000, pieces.note, "small")) for _ in range(10 * PIECES_PER_OLDEST)]
    await asyncio.sleep(0)  # now all wait, as they would if the small ones came without an end
    pieces.gate.set()
    await asyncio.gather(first, larger, *flow)
    assert pieces.done.index("larger") < PIECES_PER_OLDEST


async def test_an_abandoned_piece_does_not_start_and_blocks_no_other(slow):
    pieces = Pieces()
    first = await blocked(slow, pieces)
    gone, stays = (asyncio.create_task(run(slow, size, pieces.note, size)) for size in (5000, 6000))
    await asyncio.sleep(0.01)
    gone.cancel()
    first.cancel()  # its piece goes on, and the next one waits for it
    await asyncio.gather(gone, first, return_exceptions=True)
    assert not pieces.done
    pieces.gate.set()
    await stays
    assert pieces.done == [6000]


async def test_nobody_waits_for_the_encoding_of_a_long_text_but_longer_ones(slow):
    pieces = Pieces()
    encoding = asyncio.create_task(slow.encode(LONG, pieces.block))
    await asyncio.to_thread(pieces.has_begun.wait, 30)
    async with asyncio.timeout(30):
        await run(slow, MAX_MIDDLE_BYTES + 1, pieces.note, "large")
        await slow.encode("a" * 10_000, pieces.note)
    assert len(pieces.done) == 2
    pieces.gate.set()
    await encoding


async def test_an_error_of_a_piece_reaches_its_caller_and_the_next_piece_begins(slow):
    with pytest.raises(ZeroDivisionError):
        await run(slow, 10_000, lambda: 1 / 0)
    assert await run(slow, 10_000, lambda: 7) == 7
