"""A client that will be killed: `python -m loadtest.experiments.victim ADDRESS STREAMS` reads long streams."""

from __future__ import annotations

import asyncio
import sys

from client import AsyncClient, RequestFailedError

ENDLESS = 480  # tokens: more than it can read before it is killed, and the maximum that the server of chaos allows


async def _read(client: AsyncClient, number: int) -> None:
    try:
        async for _ in client.stream(f"import os  # {number}\n", max_tokens=ENDLESS, ignore_eos=True):
            print(number, flush=True)  # tells the parent process that the stream has started
    except RequestFailedError:
        print("refused", flush=True)


async def main(address: str, streams: int) -> None:
    """Read all streams."""
    async with AsyncClient(address, retry=None) as client, asyncio.TaskGroup() as tasks:
        for number in range(streams):
            tasks.create_task(_read(client, number))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
