"""Streams with every option, over gRPC and HTTP, while engines or replicas die: no result may change."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from statistics import median
from typing import Any

import httpx

from loadtest.process import ServerProcess, engine_of
from pilotfish.client import AsyncClient, Delta, Finished, QueueFullError, RequestFailedError
from pilotfish.client.options import ChatMessage, Prompt

OPTIONS = ("--max-engine-crashes", "10000", "--max-queue-seconds", "600")
_PROPERTIES = {
    "a": {"type": "string", "maxLength": 60},
    "b": {"type": "array", "items": {"type": "integer"}, "minItems": 9},
}
SCHEMA = json.dumps({"type": "object", "properties": _PROPERTIES, "required": ["a", "b"]})
TOOL = {"name": "f", "parameters": SCHEMA}
_LONG: dict[str, Any] = {"max_tokens": 160, "ignore_eos": True}
# Streams of the client: every option and every proposer.
CALLS: tuple[dict[str, Any], ...] = (
    _LONG,
    {**_LONG, "temperature": 0.9, "seed": 1},
    {**_LONG, "temperature": 1.0, "top_p": 0.8, "seed": 2, "logprobs": True, "top_logprobs": 3},
    {**_LONG, "temperature": 1.0, "top_k": 20, "seed": 3, "n": 3},
    {**_LONG, "temperature": 1.1, "min_p": 0.05, "seed": 4, "logprobs": True},
    {**_LONG, "repetition_penalty": 1.3},
    {**_LONG, "presence_penalty": 0.9, "frequency_penalty": 0.4, "temperature": 0.7, "seed": 5},
    {**_LONG, "logit_bias": {7: 2.0, 11: -3.0}, "banned_token_ids": [5, 9]},
    {**_LONG, "allowed_token_ids": list(range(3, 1500, 2))},
    {"max_tokens": 200, "min_tokens": 150, "stop": ["return", "for "], "temperature": 0.8, "seed": 6},
    {**_LONG, "stop_token_ids": [300, 301], "temperature": 0.8, "seed": 7},
    {**_LONG, "prompt_logprobs": True, "logprobs": True, "temperature": 0.6, "seed": 8},
    {"max_tokens": 200, "json_schema": SCHEMA, "temperature": 1.0, "seed": 9},
    {"max_tokens": 120, "regex": "([a-z]{3,9} ){20}end", "temperature": 1.0, "seed": 10},
    {"max_tokens": 150, "grammar": 'start: "(" start ")" start | /[xyz]{1,9}/', "temperature": 1.2, "seed": 11},
    {**_LONG, "speculation": "fixed", "num_draft_tokens": 4, "proposer": "model"},
    {**_LONG, "speculation": "fixed", "num_draft_tokens": 8, "proposer": "ngram", "temperature": 0.5, "seed": 12},
    {**_LONG, "proposer": "suffix", "temperature": 0.5, "seed": 13, "n": 2},
    {**_LONG, "proposer": "medusa"},
    {**_LONG, "proposer": "eagle", "temperature": 0.7, "seed": 14},
    {**_LONG, "proposer": "self", "temperature": 0.7, "seed": 15},
    {**_LONG, "speculation": "off", "temperature": 0.9, "seed": 16},
    {**_LONG, "stream_interval": 16, "temperature": 0.9, "seed": 17},
    {**_LONG, "cache_salt": "a", "priority": 5},
    {**_LONG, "prediction": "    total = 0\n    for value in values:\n        total += value\n" * 6},
    {"max_tokens": 200, "tools": (TOOL,), "tool_choice": "required", "temperature": 1.0, "seed": 24},
)
# Streams over HTTP.
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/generate", {"max_new_tokens": 160, "ignore_eos": True}),
    ("/generate", {"max_new_tokens": 160, "ignore_eos": True, "temperature": 0.8, "seed": 18, "k_draft": 4}),
    ("/generate", {"max_new_tokens": 160, "stop": ["import"], "temperature": 0.8, "seed": 19, "min_tokens": 80}),
    ("/v1/completions", {**_LONG, "temperature": 0.8, "seed": 20, "logprobs": 2}),
    ("/v1/completions", {**_LONG, "temperature": 0.8, "seed": 21, "n": 2, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"max_tokens": 200, "guided_json": SCHEMA, "temperature": 1.0, "seed": 22}),
    ("/v1/completions", {**_LONG, "temperature": 0, "frequency_penalty": 0.5}),
    ("/v1/completions", {**_LONG, "temperature": 0.7, "seed": 23, "stop": ["\n\n\n\n"]}),
)
LONGEST_PAUSE = 2.0  # seconds, in the median
_IDS = (1, 5, 9, 12)  # a prompt for checkpoints without a tokenizer
PROMPTS = ("def mean(values):\n", "import os\n\n", "class Queue:\n    def push(self, item):\n", "for i in range(")
Job = int  # an index into CALLS, then into BODIES
JOBS = range(len(CALLS) + len(BODIES))


@dataclass(slots=True)
class Survival:
    """How many streams had the expected result, and the differences of the others."""

    right: int = 0
    interruptions: int = 0  # over gRPC, which reports them
    kills: int = 0
    differences: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return the results as Markdown lines."""
        counts = (
            f"{self.right} streams as expected, {len(self.differences)} not; {self.kills} processes killed or rolled"
        )
        return [f"{counts}; {self.interruptions} interruptions of the streams over gRPC."]

    def problems(self) -> Iterator[str]:
        """Yield each violated expectation."""
        yield from (difference[:2000] for difference in self.differences)
        if not self.right:
            yield "no stream ended"
        if not self.interruptions:
            yield "no stream was interrupted"


async def result_of(client: AsyncClient, http: httpx.AsyncClient, job: Job) -> tuple[Any, int]:
    """Run one stream to its end; return all that its reader received, and how often it was interrupted."""
    prompt = PROMPTS[job % len(PROMPTS)]
    if job >= len(CALLS):
        path, body = BODIES[job - len(CALLS)]
        return await _over_http(http, path, {"prompt": prompt, "stream": True} | body), 0
    asked: Prompt = [ChatMessage(role="user", content=prompt)] if "tools" in CALLS[job] else prompt
    outputs: dict[int, list[Any]] = {}
    interruptions = 0
    async for event in client.stream(asked, deadline=300, **CALLS[job]):
        output = outputs.setdefault(event.index, ["", (), (), None, None])
        if isinstance(event, Delta):
            output[0] += event.text
            output[1] += event.token_ids
            output[2] += event.logprobs
            output[3] = output[3] or event.prompt_logprobs
        else:
            interruptions = max(interruptions, event.interruptions)
            output[4] = event.finish_reason, event.stop_token_id, event.stop_string, event.usage.completion_tokens
    return outputs, interruptions


async def _over_http(http: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> Any:
    """Return the joined events of each choice, without what differs between any two runs."""
    outputs: dict[int, list[Any]] = {}
    async with http.stream("POST", path, json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(f"{path}: {event['error']}")
            for choice in event.get("choices", [event]):
                output = outputs.setdefault(choice.get("index", 0), ["", [], None])
                output[0] += choice.get("text", "")
                output[1] += (choice.get("logprobs") or {}).get("token_logprobs", [])
                output[2] = choice.get("finish_reason") or output[2]
    return outputs


async def undisturbed(
    addresses: Sequence[str], http_address: str, progress: Callable[[str], None], jobs: Sequence[Job] = JOBS
) -> dict[Job, Any]:
    """Return the result of each stream without disturbance."""
    progress(f"{len(jobs)} streams, one at a time")
    async with (
        AsyncClient(addresses) as client,
        httpx.AsyncClient(base_url=f"http://{http_address}", timeout=300) as http,
    ):
        return {job: (await result_of(client, http, job))[0] for job in jobs}


async def engine_deaths(server: ServerProcess, alone: Mapping[Job, Any], kills: int, random: Random) -> Survival:
    """Run all streams at once, repeatedly, until the engine was killed `kills` times.

    Each kill is delayed by 0.3 to 2.5 s: every second one after the engine is ready, the others after the last kill,
    when it may still be loading.
    """
    found, goes_on = Survival(), asyncio.Event()

    async def kill() -> None:
        while found.kills < kills:
            if found.kills % 2:
                await _ready(http)
            await asyncio.sleep(random.uniform(0.3, 2.5))
            pid = engine_of(server.pid)
            with contextlib.suppress(ProcessLookupError):
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
                    found.kills += 1
        goes_on.set()

    async with (
        AsyncClient(server.address) as client,
        httpx.AsyncClient(base_url=f"http://{server.http_address}", timeout=300) as http,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(kill())
        for job, result in alone.items():
            tasks.create_task(_repeat(client, http, job, result, found, goes_on))
    return found


async def _ready(http: httpx.AsyncClient) -> None:
    """Wait until the server is ready. Raises TimeoutError after a minute."""
    for _ in range(1200):
        if (await http.get("/health")).status_code == httpx.codes.OK:
            return
        await asyncio.sleep(0.05)
    raise TimeoutError("the server was not ready within 60 s")


async def replica_deaths(
    servers: Sequence[ServerProcess], alone: Mapping[Job, Any], seconds: float, every: float, random: Random
) -> Survival:
    """Keep 32 streams of the client running while the two replicas are killed and rolled alternately."""
    found, ended = Survival(), asyncio.Event()

    async def lose() -> None:
        end = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < end or found.kills < 2:
            await asyncio.sleep(every * random.uniform(0.8, 1.2))
            server = servers[found.kills // 2 % 2]
            await asyncio.to_thread(server.stop if found.kills % 2 else server.kill)
            found.kills += 1
            await asyncio.to_thread(server.start)
        ended.set()

    async with (
        AsyncClient([server.address for server in servers]) as client,
        httpx.AsyncClient() as http,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(lose())
        for i in range(32):
            job = i % len(CALLS)
            tasks.create_task(_repeat(client, http, job, alone[job], found, ended))
    return found


async def _repeat(
    client: AsyncClient, http: httpx.AsyncClient, job: Job, alone: Any, found: Survival, ended: asyncio.Event
) -> None:
    while not ended.is_set():
        try:
            result, interruptions = await result_of(client, http, job)
        except QueueFullError as error:
            await asyncio.sleep(error.retry_seconds or 1.0)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != 503:  # a new request while the engine is restarted
                found.differences.append(f"stream {job}: {error}")
            await asyncio.sleep(0.2)
        except (RequestFailedError, RuntimeError, httpx.HTTPError) as error:
            found.differences.append(f"stream {job} was lost: {error!r}")
            await asyncio.sleep(0.2)
        else:
            if result == alone:
                found.right += 1
            else:
                found.differences.append(f"stream {job} is {result}; expected {alone}")
            found.interruptions += interruptions


# ------------------------------------------------------------------------------- the pause after a death of the engine


@dataclass(frozen=True, slots=True)
class Pauses:
    """The longest pause of each stream after its engine was killed."""

    seconds: Sequence[float]

    def lines(self) -> list[str]:
        """Return the results as Markdown lines."""
        each = ", ".join(f"{pause:.2f}" for pause in sorted(self.seconds))
        return [f"Pause of the stream: median {median(self.seconds):.2f} s of {len(self.seconds)} deaths ({each})."]

    def problems(self, *, timed: bool) -> Iterator[str]:
        """Yield each violated expectation."""
        if timed and median(self.seconds) > LONGEST_PAUSE:
            yield f"the median pause is {median(self.seconds):.2f} s; expected at most {LONGEST_PAUSE:g} s"


async def restarts(server: ServerProcess, deaths: int, random: Random, progress: Callable[[str], None]) -> Pauses:
    """Kill the engine once in each of `deaths` streams; return their pauses."""
    pauses = []
    async with AsyncClient(server.address) as client:
        for _ in range(deaths):
            pauses.append(await _pause(client, server, random.randint(2, 10)))
            progress(f"{pauses[-1]:.2f} s")
    return Pauses(pauses)


async def _pause(client: AsyncClient, server: ServerProcess, events: int) -> float:
    """Kill the engine after `events` events of a stream; return the longest pause after that, in seconds."""
    engine = engine_of(server.pid)
    if engine is None:
        raise RuntimeError("the server has no engine")
    arrivals: list[float] = []
    async for event in client.stream(_IDS, max_tokens=256, ignore_eos=True, deadline=120):
        arrivals.append(time.monotonic())
        if len(arrivals) == events:
            os.kill(engine, signal.SIGKILL)
        if isinstance(event, Finished) and not event.interruptions:
            raise RuntimeError("the engine was killed, but the stream was not interrupted")
    return max(later - earlier for earlier, later in pairwise(arrivals[events - 1 :]))
