"""Cancel and deadline in each phase of a request's life: its pages are free before another step begins."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
import pytest

from engine import target_pass
from pilotfish.v1 import generation_pb2 as pb
from server.model import ServedModel
from server.worker import engine_process
from server.worker.remote import EngineProgram
from tests.server.test_life import read_to_end
from tests.serving import serving_embedded, until

SETTINGS = {
    "max_model_len": 512,
    "max_batch_tokens": 64,
    "max_batch_size": 2,
    "speculation": "fixed",
    "proposer": "model",
}
# A deadline ends a request as a cancel does, and takes longer to come.
WAYS = [pytest.param(False, id="cancel"), pytest.param(True, id="deadline", marks=pytest.mark.slow)]
VICTIM = "victim"  # or what begins with it
PROMPT = tuple(range(5, 205))  # longer than a step's budget


@dataclass
class Stop:
    """Holds the compute thread where `reached` was set, until it may go on."""

    reached: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)

    def __call__(self) -> None:
        self.reached.set()
        assert self.go_on.wait(60)


def is_victim(sequence) -> bool:
    return sequence.request_id.startswith(VICTIM)


def while_prefilling(engine, stop, patch):
    run = target_pass.TargetPass._pass

    def held(self, plan, proposal, watch):
        if any(is_victim(w.sequence) and not w.reaches_end for w in plan.works):
            stop()
        return run(self, plan, proposal, watch)

    patch.setattr(target_pass.TargetPass, "_pass", held)


def while_drafting(engine, stop, patch):
    proposer = engine.proposers.by_name["model"]
    propose = proposer.propose

    def held(sequences, k_each):
        if any(map(is_victim, sequences)):
            stop()
        return propose(sequences, k_each)

    patch.setattr(proposer, "propose", held)


def while_verifying(engine, stop, patch):
    verify_rows = target_pass.verify_rows

    def held(fed, logits):
        if any(is_victim(f.sequence) and f.drafts for f in fed):
            stop()
        return verify_rows(fed, logits)

    patch.setattr(target_pass, "verify_rows", held)


def while_riding(engine, stop, patch):
    launch = engine.rounds.launch

    def held(works):
        if any(w.sequence.request_id == VICTIM for w in works):
            stop()
        launch(works)

    patch.setattr(engine.rounds, "launch", held)


class Watch:
    """How many steps begin between the wish to end the victim and its end, and what that frees."""

    def __init__(self, driver, patch) -> None:
        self.steps, self.freed = 0, 0
        self.asked_at: int | None = None
        self.ended_at: int | None = None
        engine = driver.model.engine
        end, finish, step = driver.end, engine.finish, engine.step

        def watched_end(stream, *args):
            if stream.request_id == VICTIM and self.asked_at is None:
                self.asked_at = self.steps
            end(stream, *args)

        def watched_finish(request_id, *args, **kwargs):
            before = engine.free_pages
            events = finish(request_id, *args, **kwargs)
            if request_id == VICTIM and events:
                self.ended_at, self.freed = self.steps, engine.free_pages - before
            return events

        def watched_step():
            self.steps += 1
            return step()

        for owner, name, watched in (
            (driver, "end", watched_end),
            (engine, "finish", watched_finish),
            (engine, "step", watched_step),
        ):
            patch.setattr(owner, name, watched)


def asked(request_id, prompt, most):
    stopping = pb.StoppingParams(max_tokens=most, ignore_eos=True)
    return pb.GenerateRequest(request_id=request_id, token_ids=pb.TokenIds(ids=prompt), stopping=stopping)


async def tokens_of(call):
    return [token async for message in call for token in message.delta.token_ids]


async def ended_in_time(attempt, by_deadline) -> None:
    """Run `attempt` without a deadline, or with later and later ones until it says that the victim was held.

    How fast the machine is then decides how long the test takes, and not whether it passes.
    """
    for seconds in (1.0, 4.0, 16.0) if by_deadline else (None,):
        if await attempt(seconds):
            return
    pytest.fail("the deadline always passed before the victim came to where it is held")


async def test_pages_are_free_before_another_step_begins():
    await held_in_each(while_prefilling, while_drafting, while_verifying)


@pytest.mark.slow
async def test_pages_are_free_before_another_step_begins_in_rounds_on_the_device():
    await held_in_each(while_riding, loop="rounds")


async def held_in_each(*holds, loop="plain"):
    """A victim in each phase is cancelled, and another one's deadline passes."""
    async with serving_embedded(loop=loop, **SETTINGS) as server:
        driver = server.app.driver
        engine = driver.model.engine
        neighbour = asked("neighbour", (7, 8, 9), 200)
        wanted = await tokens_of(server.inference.GenerateStream(neighbour))

        async def attempt(seconds, hold, by_deadline) -> bool:
            with pytest.MonkeyPatch.context() as patch:
                stop, watch = Stop(), Watch(driver, patch)
                hold(engine, stop, patch)
                beside = asyncio.ensure_future(tokens_of(server.inference.GenerateStream(neighbour)))
                await until(lambda: watch.steps > 3)
                # Few tokens: where a machine is slow, a call that cannot be done in its time is refused at once.
                victim = server.inference.GenerateStream(asked(VICTIM, PROMPT, 20), timeout=seconds)
                reading = asyncio.ensure_future(read_to_end(victim))
                await until(lambda: stop.reached.is_set() or reading.done())
                was_held = stop.reached.is_set()
                if not by_deadline:
                    victim.cancel()
                if was_held:
                    await until(lambda: watch.asked_at is not None)
                stop.go_on.set()
                with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
                    await reading
                assert await beside == wanted
                await until(lambda: not driver.live())
            if was_held:
                assert watch.ended_at == watch.asked_at, "another step began with pages that nobody waits for"
                assert watch.freed > 0
            await until(lambda: engine.free_pages == engine.total_pages)
            engine.check_invariants()
            return was_held

        for hold in holds:
            for by_deadline in (False, True):
                await ended_in_time(partial(attempt, hold=hold, by_deadline=by_deadline), by_deadline)


@pytest.mark.parametrize("by_deadline", WAYS)
async def test_what_is_queued_never_reaches_the_engine(by_deadline, monkeypatch):
    async with serving_embedded(**SETTINGS | {"max_batch_size": 1}) as server:
        driver = server.app.driver
        watch, stop = Watch(driver, monkeypatch), Stop()
        step = driver.model.engine.step
        monkeypatch.setattr(driver.model.engine, "step", lambda: (stop(), step())[1])
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
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await reading
        assert len(await first) == 9
        assert watch.ended_at is None


@pytest.mark.parametrize("by_deadline", WAYS)
async def test_what_waits_to_be_written_is_freed_too(by_deadline):
    # Without these options the client's core reads on for its application, and no write ever waits.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    async with serving_embedded(options=options, **SETTINGS) as server:
        driver = server.app.driver
        engine = driver.model.engine
        request = asked(VICTIM, (7, 8, 9), 480)
        request.output.CopyFrom(pb.OutputOptions(logprobs=True, top_logprobs=20))

        async def attempt(seconds) -> bool:
            with pytest.MonkeyPatch.context() as patch:
                watch = Watch(driver, patch)
                victim = server.inference.GenerateStream(request, timeout=seconds)
                await until(lambda: driver.find(VICTIM) is not None or victim.done())
                stream = driver.find(VICTIM)
                # Unread tokens gather only while a write waits.
                await until(lambda: stream is None or stream.outputs[0]._num_unread > 20 or stream.ended)
                was_waiting = stream is not None and stream.outputs[0]._num_unread > 20
                assert by_deadline or was_waiting, "the whole output fitted into the window"
                step = engine.step  # from here on slow: the output must not be whole before the deadline
                patch.setattr(engine, "step", lambda: (time.sleep(0.1), step())[1])
                if not by_deadline:
                    victim.cancel()
                await until(lambda: not driver.live())
            if was_waiting:  # one step may have been handed to the compute thread, and not have begun
                assert watch.ended_at - watch.asked_at <= 1
            assert engine.free_pages == engine.total_pages
            return was_waiting

        await ended_in_time(attempt, by_deadline)


# --------------------------------------------------------------------------------- the same in a process of its own

HOLDS = [while_prefilling, while_drafting, while_verifying]
APART = "from tests.e2e.test_phases import held_engine; held_engine()"
FOLDER = "PILOTFISH_TEST_HOLDS"  # where files say that a phase was reached, and that it may go on


@dataclass
class StopByFile:
    """Holds the engine's process in a phase of the victim that is named after it."""

    phase: str

    def __call__(self, name: str) -> None:
        folder = Path(os.environ[FOLDER])
        if self.phase in name and not (folder / f"{name}.go").exists():
            (folder / f"{name}.reached").touch()
            while not (folder / f"{name}.go").exists():
                time.sleep(0.002)


def held_engine() -> None:
    """The program of an engine's process that can be held in every phase."""

    def load(config, progress, *, is_successor=False):
        model = ServedModel.load(config, progress)
        for hold in HOLDS:
            stop = StopByFile(hold.__name__)
            patch, live = pytest.MonkeyPatch(), model.engine._live
            hold(model.engine, lambda stop=stop, live=live: [stop(name) for name in live if VICTIM in name], patch)
        return model

    engine_process.main(load)


class OutputsAfter:
    """How many steps of the engine are told of between the wish to end the victim and its end."""

    def __init__(self, driver, victim, patch) -> None:
        self.steps: int | None = None
        self.is_over = False
        end, turn = driver.end, driver.host.turn

        def watched_end(stream, *args):
            if stream.request_id == victim and self.steps is None:
                self.steps = 0
            end(stream, *args)

        async def watched_turn(wake):
            brought = await turn(wake)
            ends = brought is not None and [e.request_id for e in brought.events if e.finished is not None]
            if self.steps is not None and not self.is_over and brought is not None:
                self.is_over = victim in ends
                self.steps += brought.stats is not None and not self.is_over
            return brought

        patch.setattr(driver, "end", watched_end)
        patch.setattr(driver.host, "turn", watched_turn)


@pytest.mark.slow
@pytest.mark.parametrize("by_deadline", [False, True], ids=["cancel", "deadline"])
async def test_in_a_process_of_its_own_only_the_step_under_way_is_finished(by_deadline, monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    async with serving_embedded(program=EngineProgram(APART), engine_process=True, **SETTINGS) as server:
        driver = server.app.driver
        neighbour = asked("neighbour", (7, 8, 9), 400)
        wanted = await tokens_of(server.inference.GenerateStream(neighbour))

        async def attempt(seconds, hold) -> bool:
            name = f"{VICTIM}-{hold.__name__}-{seconds}"
            reached, go = tmp_path / f"{name}.reached", tmp_path / f"{name}.go"
            beside = asyncio.ensure_future(tokens_of(server.inference.GenerateStream(neighbour)))
            with pytest.MonkeyPatch.context() as patch:
                after = OutputsAfter(driver, name, patch)
                victim = server.inference.GenerateStream(asked(name, PROMPT, 20), timeout=seconds)
                reading = asyncio.ensure_future(read_to_end(victim))
                await until(lambda: reached.exists() or reading.done())
                was_held = reached.exists()
                if not by_deadline:
                    victim.cancel()
                if was_held:
                    await until(lambda: after.steps is not None)
                    await until(lambda: all(ending.is_told for ending in driver._endings.values()))
                go.touch()
                with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
                    await reading
                assert await beside == wanted
                if was_held:
                    await until(lambda: after.is_over)
                    assert after.steps <= 1, "a step began with a request that nobody waits for"
            engine = driver.model.engine
            await until(lambda: engine.free_pages == engine.total_pages)
            return was_held

        for hold in HOLDS:
            await ended_in_time(partial(attempt, hold=hold), by_deadline)
