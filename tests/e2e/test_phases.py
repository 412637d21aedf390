"""Cancel and deadline in each phase of a request's life: its pages are free before another step begins."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field

import grpc
import pytest

from pilotfish.engine import target_pass
from pilotfish.v1 import generation_pb2 as pb
from tests.e2e.seams import before
from tests.server.test_life import read_to_end
from tests.serving import serving_embedded, until

SETTINGS = {
    "max_model_len": 512,
    "max_batch_tokens": 64,
    "max_batch_size": 2,
    "speculation": "fixed",
    "proposer": "model",
}
VICTIM = "victim"
PROMPT = tuple(range(5, 205))  # longer than a step's budget
ENDED = (grpc.aio.AioRpcError, asyncio.CancelledError)


@dataclass
class Stop:
    """Holds the compute thread where `reached` was set, until it may go on."""

    reached: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)

    def __call__(self) -> None:
        self.reached.set()
        assert self.go_on.wait(60)

    def at(self, sequences) -> None:
        """Hold it if the victim is among these."""
        if any(sequence.request_id == VICTIM for sequence in sequences):
            self()


def while_prefilling(engine, stop, patch):
    def hold(_self, works, *_):
        stop.at(work.sequence for work in works if not work.reaches_end)

    before(patch, target_pass.TargetPass, "_pass", hold)


def while_drafting(engine, stop, patch):
    before(patch, engine.proposers.by_name["model"], "propose", lambda works, _: stop.at(w.sequence for w in works))


def while_verifying(engine, stop, patch):
    before(patch, target_pass, "verify_rows", lambda fed, _: stop.at(f.sequence for f in fed if f.drafts))


def while_riding(engine, stop, patch):
    before(patch, engine.rounds, "launch", lambda works: stop.at(w.sequence for w in works))


class Watch:
    """How many steps begin between the wish to end the victim and its end, and what that frees."""

    def __init__(self, driver, patch) -> None:
        self.steps, self.freed = 0, 0
        self.asked_at: int | None = None
        self.ended_at: int | None = None
        engine = driver.model.engine
        finish = engine.finish

        def asked(stream, *_):
            if stream.request_id == VICTIM and self.asked_at is None:
                self.asked_at = self.steps

        def watched_finish(request_id, *args, **kwargs):
            free = engine.load.free_pages
            events = finish(request_id, *args, **kwargs)
            if request_id == VICTIM and events:
                self.ended_at, self.freed = self.steps, engine.load.free_pages - free
            return events

        def begun():
            self.steps += 1

        before(patch, driver, "end", asked)
        before(patch, engine, "step", begun)
        patch.setattr(engine, "finish", watched_finish)


def asked(request_id, prompt, most):
    stopping = pb.StoppingParams(max_tokens=most, ignore_eos=True)
    return pb.GenerateRequest(request_id=request_id, token_ids=pb.TokenIds(ids=prompt), stopping=stopping)


async def tokens_of(call):
    return [token async for message in call for token in message.delta.token_ids]


LOOPS = {
    "plain": [(while_prefilling, False), (while_drafting, False), (while_verifying, True)],
    "rounds": [(while_riding, False)],
}


@pytest.mark.parametrize("loop", ["plain", pytest.param("rounds", marks=pytest.mark.slow)])
async def test_pages_are_free_before_another_step_begins(loop):
    """A deadline ends a request as a cancel does, and takes longer to come."""
    async with serving_embedded(loop=loop, **SETTINGS) as server:
        neighbour = asked("neighbour", (7, 8, 9), 80)
        wanted = await tokens_of(server.inference.GenerateStream(neighbour))
        for hold, by_deadline in LOOPS[loop]:
            # How fast the machine is decides how long this takes, and not whether it passes.
            for seconds in (1.0, 4.0, 16.0) if by_deadline else (None,):
                beside = asyncio.ensure_future(tokens_of(server.inference.GenerateStream(neighbour)))
                was_held = await ended_while(hold, server, seconds)
                assert await beside == wanted
                if was_held:
                    break
            assert was_held, "the deadline always passed before the victim came to where it is held"


async def ended_while(hold, server, seconds) -> bool:
    """End a victim in a phase, by a cancel or by its deadline; whether it came so far."""
    driver, engine, stop = server.app.driver, server.app.driver.model.engine, Stop()
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(driver, patch)
        hold(engine, stop, patch)
        await until(lambda: watch.steps > 3)
        # Few tokens: where a machine is slow, a call that cannot be done in its time is refused at once.
        victim = server.inference.GenerateStream(asked(VICTIM, PROMPT, 20), timeout=seconds)
        reading = asyncio.ensure_future(read_to_end(victim))
        await until(lambda: stop.reached.is_set() or reading.done())
        was_held = stop.reached.is_set()
        if seconds is None:
            victim.cancel()
        if was_held:
            await until(lambda: watch.asked_at is not None)
        stop.go_on.set()
        with pytest.raises(ENDED):
            await reading
        await until(lambda: not driver.live())
    if was_held:
        assert watch.ended_at == watch.asked_at, "another step began with pages that nobody waits for"
        assert watch.freed > 0
    await until(lambda: engine.load.free_pages == engine.facts.total_pages)
    engine.check_invariants()
    return was_held


@pytest.mark.parametrize("by_deadline", [False, True], ids=["cancel", "deadline"])
async def test_what_is_queued_never_reaches_the_engine(by_deadline, monkeypatch):
    async with serving_embedded(**SETTINGS | {"max_batch_size": 1}) as server:
        driver, stop = server.app.driver, Stop()
        watch = Watch(driver, monkeypatch)
        before(monkeypatch, driver.model.engine, "step", stop)
        first = asyncio.ensure_future(tokens_of(server.inference.GenerateStream(asked("first", (7, 8, 9), 9))))
        await asyncio.to_thread(stop.reached.wait, 60)
        victim = server.inference.GenerateStream(asked(VICTIM, PROMPT, 9), timeout=0.5 if by_deadline else None)
        reading = asyncio.ensure_future(read_to_end(victim))
        await until(lambda: driver.find(VICTIM) is not None)
        if not by_deadline:
            victim.cancel()
        await until(lambda: driver.find(VICTIM) is None, 30)
        assert not driver.queue.num_tokens
        stop.go_on.set()
        with pytest.raises(ENDED):
            await reading
        assert len(await first) == 9
        assert watch.ended_at is None


async def test_what_waits_to_be_written_is_freed_too(monkeypatch):
    # Without these options the client's core reads on for its application, and no write ever waits.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    async with serving_embedded(options=options, **SETTINGS) as server:
        driver = server.app.driver
        engine = driver.model.engine
        request = asked(VICTIM, (7, 8, 9), 480)
        request.output.CopyFrom(pb.OutputOptions(logprobs=True, top_logprobs=20))
        watch = Watch(driver, monkeypatch)
        victim = server.inference.GenerateStream(request)
        await until(lambda: driver.find(VICTIM) is not None)
        stream = driver.find(VICTIM)
        # Unread tokens gather only while a write waits.
        await until(lambda: stream.outputs[0]._num_unread > 20 or stream.ended)
        assert stream.outputs[0]._num_unread > 20, "the whole output fitted into the window"
        before(monkeypatch, engine, "step", lambda: time.sleep(0.1))  # the output must not be whole before the cancel
        victim.cancel()
        await until(lambda: not driver.live())
        # One step may have been handed to the compute thread, and not have begun.
        assert watch.ended_at - watch.asked_at <= 1
        assert engine.load.free_pages == engine.facts.total_pages
