"""One timer for all writes of a stream: a write that hangs is cut, a pause between writes is not."""

from __future__ import annotations

import asyncio
import ctypes
import subprocess
import sys

import pytest

from pilotfish.server.admission.stalls import stall_limit

LIMIT = 0.1


async def write(times, seconds, pause=0.0):
    """So many writes, each of which takes so long, after pauses in which there is nothing to write."""
    async with stall_limit(LIMIT) as writes:
        for _ in range(times):
            await asyncio.sleep(pause)
            with writes:
                await asyncio.sleep(seconds)


async def test_a_write_that_hangs_is_cut_and_many_that_do_not_are_not_and_no_pause_between_them():
    await write(8, LIMIT / 5)  # the timer of the first one goes off within a later one
    await write(3, 0, pause=2 * LIMIT)
    with pytest.raises(TimeoutError):
        await write(1, 1000)


async def test_errors_and_cancellation_pass_and_leave_no_timer(monkeypatch):
    loop, timers = asyncio.get_running_loop(), []
    call_at = loop.call_at

    def noted(*asked, **context):
        timers.append(call_at(*asked, **context))
        return timers[-1]

    async def write_once(work):
        async with stall_limit(1000) as writes:
            with writes:
                await work()

    async def fail():
        raise ZeroDivisionError

    monkeypatch.setattr(loop, "call_at", noted)
    with pytest.raises(ZeroDivisionError):
        await write_once(fail)
    assert [timer.cancelled() for timer in timers] == [True]
    task = asyncio.ensure_future(write_once(asyncio.Event().wait))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


GARBAGE = """
import ctypes, gc
from pilotfish.server.worker.garbage import freeze_loaded, map_large_blocks
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks a b c d".split()]
count = ctypes.CDLL(None).mallinfo2
count.restype = Info
bytearray(8 << 20)
kept = []
for call in (lambda: None, map_large_blocks):
    call()
    before = count().hblks
    kept.append(bytearray(4 << 20))
    print(count().hblks - before)
freeze_loaded()
print(gc.get_freeze_count() > 1000)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not glibc 2.33")
def test_large_blocks_are_mapped_also_after_the_first_is_freed_and_what_was_loaded_is_left_out_of_collections():
    done = subprocess.run([sys.executable, "-c", GARBAGE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1", "True"]
    assert done.stderr == "", "at the end, too"


HEAPS = """
import ctypes, sys, threading
from pilotfish.server.worker.garbage import share_one_heap
library = ctypes.CDLL(None)
if sys.argv[1:]:
    share_one_heap()
meeting = threading.Barrier(2)
def take():
    kept = [bytearray(1000) for _ in range(1000)]
    meeting.wait()
threads = [threading.Thread(target=take) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
library.malloc_stats()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not glibc 2.33")
def test_all_threads_take_memory_from_one_heap():
    found = [
        subprocess.run([sys.executable, "-c", HEAPS, *arguments], capture_output=True, text=True, check=True).stderr
        for arguments in ([], ["shared"])
    ]
    assert ["Arena 1:" in each for each in found] == [True, False]
