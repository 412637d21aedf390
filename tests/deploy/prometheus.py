"""A real Prometheus that scrapes one server, and what it answers. Its configuration is the one in deploy/."""

from __future__ import annotations

import asyncio
import math
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
FOLDER = DEPLOY / "prometheus"
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
START_SECONDS = 30.0

needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None, reason="there is no Prometheus here; Debian's package is `prometheus`"
)


class Prometheus:
    """Its HTTP API."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def ask(self, path: str, **params: object) -> Any:
        """The data of an answer; an AssertionError with Prometheus' own words where it has none."""
        answer = await self._http.get(f"/api/v1/{path}", params=params)
        body = answer.json()
        assert body["status"] == "success", body["error"]
        return body["data"]

    async def value(self, query: str) -> float | None:
        """Of a query that gives one number, or None where there is no series."""
        found = (await self.ask("query", query=query))["result"]
        assert len(found) < 2, f"{query} gives {len(found)} series"
        return float(found[0]["value"][1]) if found else None

    async def values(self, query: str, start: float, end: float) -> list[float]:
        """Every finite point of every series between two Unix times, one per second."""
        found = (await self.ask("query_range", query=query, start=start, end=end, step=1))["result"]
        points = [float(value) for series in found for _, value in series["values"]]
        return [point for point in points if math.isfinite(point)]

    async def until(self, query: str, wanted: float, seconds: float = START_SECONDS) -> None:
        """Wait for a scrape that brings this value."""
        async with asyncio.timeout(seconds):
            while await self.value(query) != wanted:  # noqa: ASYNC110  # the scrapes are another process's
                await asyncio.sleep(0.1)


@asynccontextmanager
async def watching(target: str, folder: Path) -> AsyncIterator[Prometheus]:
    """A Prometheus with our rules that scrapes `target` every second and keeps its data in `folder`."""
    assert PROMETHEUS is not None, "a skipped test"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    (folder / "prometheus.yml").write_text(yaml.safe_dump(_config(target)))
    command = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        process = await asyncio.create_subprocess_exec(
            PROMETHEUS, *command, f"--web.listen-address={address}", stdout=log, stderr=log
        )
        try:
            async with httpx.AsyncClient(base_url=f"http://{address}", timeout=10) as http:
                await _ready(http, process)
                yield Prometheus(http)
        finally:
            process.kill()
            await process.wait()


def _config(target: str) -> dict[str, Any]:
    """The configuration of deploy/, its targets and its pace changed."""
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] |= {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(FOLDER / name) for name in config["rule_files"]]
    [job] = config["scrape_configs"]
    del job["dns_sd_configs"]
    job["static_configs"] = [{"targets": [target]}]
    return config


async def _ready(http: httpx.AsyncClient, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(START_SECONDS):
        while True:
            assert process.returncode is None, "Prometheus ended; its log says why"
            try:
                if (await http.get("/-/ready")).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)
