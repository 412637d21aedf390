"""Messages of several calls in one stream: none is taken before it is wanted, and an error ends all."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from pilotfish.server.http.calls import merged


async def test_a_slow_reader_leaves_values_where_they_can_be_merged():
    taken = [0, 0]

    async def source(number):
        while True:
            taken[number] += 1
            yield taken[number]

    async with aclosing(merged([source(0), source(1)])) as values:
        await anext(values)
        for _ in range(50):
            await asyncio.sleep(0)
        assert sum(taken) <= 5


async def test_the_first_error_ends_all_and_every_source_is_closed():
    closed = set()

    async def source(number):
        try:
            for value in range(100):
                await asyncio.sleep(0)
                if number == 1 and value == 3:
                    raise RuntimeError("broken")
                yield value
        finally:
            closed.add(number)

    with pytest.raises(RuntimeError, match="broken"):
        async for _ in merged([source(0), source(1), source(2)]):
            pass
    assert closed == {0, 1, 2}
