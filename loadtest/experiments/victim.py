"""A client that will be killed: `python -m loadtest.experiments.victim ADDRESS STREAMS` reads endless streams."""

from __future__ import annotations

import asyncio
import sys

from client import AsyncClient, RequestFailedError

ENDLESS = 480  # tokens: more than it will live to see, and all that the server of chaos allows


async def _read(client: AsyncClient, number: int) -> None:
    try:
        async for _ in client.stream(f"import os  # {number}\n", max_tokens=ENDLESS, ignore_eos=True):
            print(number, flush=True)  # whoever kills it wants to know that it is in the middle
    except RequestFailedError:
        print("refused", flush=True)


async def main(address: str, streams: int) -> None:
    """Read them all."""
    async with AsyncClient(address, retry=None) as client, asyncio.TaskGroup() as tasks:
        for number in range(streams):
            tasks.create_task(_read(client, number))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
