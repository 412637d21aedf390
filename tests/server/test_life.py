"""Cancellation, a full queue, draining, death: every request ends once, and pages come back within one step."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pilotfish.engine.types import FinishReason
from pilotfish.server.app import SERVICES
from pilotfish.server.errors import Aborted
from pilotfish.server.lifecycle import State
from pilotfish.v1 import control_pb2
from pilotfish.v1 import generation_pb2 as pb
from tests.server.fake_engine import FakeEngine, served
from tests.server.test_generate import detail, error_of, request, streamed
from tests.serving import serving, until

LONG = pb.StoppingParams(max_tokens=3000)


async def code_of(call):
    return (await error_of(call)).code()


@asynccontextmanager
async def busy(**config):
    """A server whose only place is taken until the engine's gate opens; in the end it has served whoever has it."""
    engine = FakeEngine(batch=1)
    engine.gate.clear()
    async with serving(engine, **config) as server:
        first = asyncio.ensure_future(streamed(server, request_id="first"))
        await until(lambda: engine.load.num_running == 1)
        yield server
        engine.gate.set()
        _, ids, ends, _ = await first
        assert (tuple(ids), len(ends)) == (engine.expected(20), 1)


def reason_in(error):
    return detail(error, error_details_pb2.ErrorInfo).reason


async def reason_of(call):
    """Why it ends without an answer, though nothing is wrong with it."""
    error = await error_of(call)
    assert error.code() == grpc.StatusCode.UNAVAILABLE, error.details()
    assert "memory" not in error.details(), "the server's own error is for the log"
    return reason_in(error)


async def health_of(server, service=""):
    stub = health_pb2_grpc.HealthStub(server.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


async def read_to_end(call) -> list[pb.Finished]:
    """The ends of a stream, some of which has been read."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return [message.finished for message in messages if message.HasField("finished")]


def metric(server, name, **labels):
    return server.app.metrics.registry.get_sample_value(f"pilotfish_{name}", labels)


# ----------------------------------------------------------------------------------------- a reader, a full queue


async def test_a_reader_that_stalls_is_cut_and_its_pages_are_freed(caplog):
    # Without this option the client's core reads on for its application, and the server notices nothing.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    engine = FakeEngine(step_seconds=0.0005, burst=40)
    async with serving(engine, options=options, stall_seconds=0.3, drain_seconds=1) as server:
        engine.max_model_len = 10**6
        asked = request(stopping=pb.StoppingParams(max_tokens=900_000))
        calls = []
        for _ in range(2):  # the second one comes when the first one has left the queue, which has no room for both
            calls.append(server.inference.GenerateStream(asked))
            await calls[-1].read()
        told, gone = calls
        await until(lambda: not server.app.driver.live(), 30)
        assert metric(server, "stream_stalls_total") == 2
        assert engine.load.free_pages == engine.facts.total_pages
        error = await error_of(read_to_end(told))  # it reads on after all, and is told
        assert error.code() == grpc.StatusCode.ABORTED
        assert "0.3 seconds" in error.details()
        gone.cancel()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_full_queue_refuses_with_a_time_to_come_again():
    async with busy(max_queue_requests=2) as server:
        calls = [asyncio.ensure_future(streamed(server)) for _ in range(2)]
        await until(lambda: len(server.app.driver.queue) == 2)
        error = await error_of(server.inference.Generate(request()))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 1000
        assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"
        assert metric(server, "admission_rejected_total", reason="queue_full") == 1
        assert metric(server, "requests_waiting") == 2
        server.engine.gate.set()
        for _, ids, ends, _ in await asyncio.gather(*calls):
            assert tuple(ids) == server.engine.expected(20)
            assert len(ends) == 1


# ---------------------------------------------------------------------------------------------------------- abort


async def test_abort_ends_one_or_all_and_their_callers_get_what_there_is():
    engine = FakeEngine(batch=2, step_seconds=0.01)
    async with serving(engine) as server:
        outputs = []
        for i in range(3):  # the third is queued
            outputs.append(asyncio.ensure_future(streamed(server, request_id=f"r{i}", stopping=LONG)))
            await until(lambda: server.app.driver.find(f"r{i}"))  # noqa: B023  # awaited before i moves on
        await until(lambda: engine.load.num_running == 2 and engine.steps > 2)
        await server.control.Abort(control_pb2.AbortRequest(request_id="r2"))
        assert await code_of(outputs[2]) == grpc.StatusCode.ABORTED
        one = await server.control.Abort(control_pb2.AbortRequest(request_id="r0"))
        assert one.aborted_requests == 1
        await server.control.Abort(control_pb2.AbortRequest(all=True))
        for output in outputs[:2]:
            _, ids, (end,), _ = await output
            assert end.finish_reason == pb.FINISH_REASON_ABORTED
            assert tuple(ids) == engine.expected(end.usage.completion_tokens)
        assert engine.load.free_pages == engine.facts.total_pages
        abort = server.control.Abort(control_pb2.AbortRequest(request_id="r0"))
        assert await code_of(abort) == grpc.StatusCode.NOT_FOUND
        assert await code_of(server.control.Abort(control_pb2.AbortRequest())) == grpc.StatusCode.INVALID_ARGUMENT


# --------------------------------------------------------------------------------------------- start, drain, death


async def test_health_is_not_serving_until_the_model_is_warm():
    release = asyncio.Event()
    loop = asyncio.get_running_loop()

    def load(_config, progress):
        progress("loading weights")
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result(20)
        return served(FakeEngine())

    async with serving(load=load, ready=False) as server:
        for service in ("", *SERVICES):
            assert await health_of(server, service) == "NOT_SERVING"
        error = await error_of(server.inference.Generate(request()))
        assert (error.code(), reason_in(error)) == (grpc.StatusCode.UNAVAILABLE, "STARTING")
        assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"
        info = await server.control.GetServerInfo(control_pb2.GetServerInfoRequest())
        assert info.state == control_pb2.SERVER_STATE_STARTING
        assert metric(server, "engine_up") == 0
        release.set()
        await until(lambda: server.app.lifecycle.state is State.READY)
        for service in ("", *SERVICES):
            assert await health_of(server, service) == "SERVING"
        assert metric(server, "engine_up") == 1


async def test_a_stop_while_loading_ends_cleanly():
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def load(_config, progress):
        progress("one")
        asyncio.run_coroutine_threadsafe(stopped.wait(), loop).result(20)
        progress("two")
        raise AssertionError("loading goes on after a stop")

    async with serving(load=load, ready=False) as server:
        server.app.stop()
        stopped.set()
        assert await server.running == 0


async def test_sigterm_drains_live_streams_and_refuses_new_ones():
    engine = FakeEngine(batch=1, step_seconds=0.005)
    async with serving(engine) as server:
        stopping = pb.StoppingParams(max_tokens=90)
        calls = [asyncio.ensure_future(streamed(server, stopping=stopping)) for _ in range(2)]
        await until(lambda: len(server.app.driver.live()) == 2)  # one runs, one is queued: both were accepted
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: server.app.lifecycle.state is State.DRAINING)
        assert await health_of(server) == "NOT_SERVING"
        assert await reason_of(server.inference.Generate(request())) == "DRAINING"
        for _, ids, ends, _ in await asyncio.gather(*calls):
            assert tuple(ids) == engine.expected(90)
            assert len(ends) == 1
        assert await server.running == 0


@pytest.mark.parametrize("second_signal", [True, False])
async def test_what_does_not_finish_in_time_is_cut(second_signal):
    engine = FakeEngine(step_seconds=0.01)
    async with serving(engine, drain_seconds=60 if second_signal else 0.1) as server:
        call = asyncio.ensure_future(streamed(server, stopping=LONG))
        await until(lambda: engine.load.num_running == 1)
        server.app.stop()
        await until(lambda: server.app.lifecycle.state is State.DRAINING)
        if second_signal:
            server.app.stop()
        assert await reason_of(call) == "DRAINING"
        assert await server.running == 0
        assert engine.load.free_pages == engine.facts.total_pages


async def watched(server):
    """The health of the whole server, change by change."""
    watch = health_pb2_grpc.HealthStub(server.channel).Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    return watch


async def test_an_engine_that_crashes_begins_again_in_place_and_every_stream_goes_on():
    engine = FakeEngine(batch=1, step_seconds=0.01)
    stopping = pb.StoppingParams(max_tokens=60)
    async with serving(engine) as server:
        watch = await watched(server)
        for times in (1, 2):
            outputs = [asyncio.ensure_future(streamed(server, stopping=stopping)) for _ in "ab"]
            await until(lambda: len(server.app.driver.live()) == 2)  # one runs, one is queued
            engine.fault = RuntimeError("out of memory")
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            assert metric(server, "engine_restarts_total") == times
            assert metric(server, "engine_up") == 1
            for _, tokens, ends, _ in await asyncio.gather(*outputs):
                assert tuple(tokens) == engine.expected(60)
                assert len(ends) == 1
            await until(lambda: engine.load.free_pages == engine.facts.total_pages)
        watch.cancel()


async def test_who_leaves_while_the_engine_is_lost_does_not_wait_for_another(monkeypatch):
    """Also who leaves after the loss and before its requests wait for another engine."""
    engine, gate = FakeEngine(batch=2, step_seconds=0.01), asyncio.Event()
    async with serving(engine) as server:
        driver, host = server.app.driver, server.app.host
        restart = host.restart

        async def gated():
            await gate.wait()
            await restart()

        monkeypatch.setattr(host, "restart", gated)
        outputs = [asyncio.ensure_future(streamed(server, stopping=LONG)) for _ in "ab"]
        await until(lambda: engine.load.num_running == 2)
        early, late = driver.live()

        async def leave(state):
            if state is State.RECOVERING:
                driver.end(early, FinishReason.ABORTED, Aborted("left"))

        server.app.lifecycle.listen(leave)
        engine.fault = RuntimeError("out of memory")
        await until(lambda: early.ended)
        await until(lambda: late.outputs[0].interruptions)
        driver.end(late, FinishReason.ABORTED, Aborted("left"))
        await driver.wait_idle()
        assert [await code_of(output) for output in outputs] == [grpc.StatusCode.ABORTED] * 2
        gate.set()
        await until(lambda: server.app.lifecycle.state is State.READY)
        assert (await server.inference.Generate(request())).outputs


@pytest.mark.parametrize("reason", ["ENGINE_DEAD", "ENGINE_HUNG"])
async def test_an_engine_that_stays_broken_or_never_ends_a_step_ends_every_stream_and_the_server(reason):
    engine, hangs = FakeEngine(batch=1, step_seconds=0.001), reason == "ENGINE_HUNG"
    async with serving(engine, hang_seconds=0.3 if hangs else 60.0, max_engine_crashes=0) as server:
        watch = await watched(server)
        calls = [asyncio.ensure_future(streamed(server, stopping=LONG)) for _ in "ab"]
        await until(lambda: len(server.app.driver.live()) == 2 and engine.steps > 2)
        if hangs:
            engine.gate.clear()
        else:
            engine.fault = RuntimeError("out of memory")
        assert [await reason_of(call) for call in calls] == [reason] * 2
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        async with asyncio.timeout(20):
            assert await server.running == 1
        assert server.app.lifecycle.state is State.FAILED
        assert metric(server, "engine_up") == 0
