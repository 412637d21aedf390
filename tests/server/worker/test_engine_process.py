"""The engine in a process of its own: the same streams, and what happens to them when it dies, hangs or babbles."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import signal
from contextlib import asynccontextmanager, suppress
from functools import cache, partial
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from pilotfish.engine.params import Guided
from pilotfish.engine.text import guided as guided_text
from pilotfish.server.errors import Unavailable
from pilotfish.server.lifecycle import State
from pilotfish.server.model import ServedModel
from pilotfish.server.worker import remote
from pilotfish.server.worker.fork_server import ForkServer
from pilotfish.v1 import control_pb2
from pilotfish.v1 import generation_pb2 as pb
from tests.server.fake_engine import FakeEngine, served
from tests.server.fake_grammar import FakeCompiler
from tests.server.test_generate import collect, request, streamed
from tests.server.test_life import LONG, code_of, health_of, metric, read_to_end, reason_of, watched
from tests.server.worker import fake_child
from tests.serving import http_client, serving, until

EXPECTED = FakeEngine()
FAKE = "tests.server.worker.fake_child"


def around(engine, compile_grammar, config, codec, chat):
    assert codec is chat is None
    return served(engine, compile_grammar=compile_grammar)


def read(config, _):
    """Says in a folder that it was read."""
    if Path(config.target).is_dir():
        (Path(config.target) / "text").unlink(missing_ok=True)
    return None, None


class KeptForkServer(ForkServer):
    """Forks the fake engines of one server after the other: one of each server's own would import everything again."""

    def close(self) -> None:
        """It ends with this process."""

    @staticmethod
    @cache
    def get() -> KeptForkServer:
        kept = KeptForkServer(fake_child.PROGRAM, (FAKE, "torch"))
        atexit.register(super(KeptForkServer, kept).close)
        return kept


@asynccontextmanager
async def apart(*, with_own_forks=False, **config):
    """A server whose fake engine is in another process, which does not outlive it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "read_text", read)
        patch.setattr(ServedModel, "around", around)
        own = partial(ForkServer, fake_child.PROGRAM, (FAKE,))
        async with serving(start_forks=own if with_own_forks else KeptForkServer.get, **config) as server:
            server.host = server.app.host
            server.kill = lambda number=signal.SIGKILL: os.kill(server.host.pid, number)
            yield server
    assert server.host.pid is None


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def prompt(*tokens: int) -> dict[str, pb.TokenIds]:
    return {"token_ids": pb.TokenIds(ids=(1, 2, *tokens))}


def slow(**fields) -> pb.GenerateRequest:
    """A stream that lasts until it is ended."""
    return request(**prompt(fake_child.SLOW), **{"stopping": LONG, **fields})


async def answers(server, **fields) -> bool:
    """Whether a request gets what a request gets."""
    _, ids, ends, _ = await streamed(server, **fields)
    return tuple(ids) == EXPECTED.expected(20) and len(ends) == 1


async def begun(calls) -> None:
    for call in calls:
        assert (await call.read()).delta.token_ids


async def restarted(server, times: int = 1) -> None:
    await until(lambda: metric(server, "engine_restarts_total") == times, 60)
    assert server.app.lifecycle.state is State.READY
    assert await health_of(server) == "SERVING"
    assert metric(server, "engine_up") == 1


async def test_streams_are_what_they_are_in_one_process():
    async with apart() as server, serving(compile_grammar=FakeCompiler()) as beside:
        for fields in (
            {"stopping": pb.StoppingParams(max_tokens=50)},
            {"stopping": pb.StoppingParams(max_tokens=100, stop=["x says"])},
            {"sampling": pb.SamplingParams(n=3, seed=5), "stopping": pb.StoppingParams(max_tokens=9)},
            {"output": pb.OutputOptions(logprobs=True, prompt_logprobs=True, top_logprobs=3)},
            {"guided": pb.GuidedDecoding(choice=pb.Choice(choices=["ab ab", "babab"]))},
            {"sampling": pb.SamplingParams(logit_bias={3: 1.5}, banned_token_ids=[4]), "cache_salt": "s"},
        ):
            there, here = [s.inference.Generate(request(**fields)) for s in (server, beside)]
            assert shown(await there) == shown(await here), fields
        await until(lambda: not server.host.has_work)
        assert server.host.load.free_pages == server.host.facts.total_pages
        assert metric(server, "spec_draft_tokens_total") > 0
        assert metric(server, "batch_size_count", kind="verify") > 0
        assert metric(server, "kv_usage_ratio") == 0


def shown(answer: pb.GenerateResponse) -> pb.GenerateResponse:
    """Without what differs between any two requests."""
    answer.request_id = ""
    for output in answer.outputs:
        output.finished.ClearField("timing")
        output.finished.ClearField("seed")
    return answer


async def test_cancel_deadline_abort_and_poison_reach_it():
    async with apart(max_batch_size=4) as server:
        calls = [server.inference.GenerateStream(slow(request_id=f"r{i}")) for i in range(4)]
        await begun(calls)
        queued = server.inference.GenerateStream(slow())
        late = server.inference.GenerateStream(slow(), timeout=0.2)
        assert await code_of(collect(late)) == grpc.StatusCode.DEADLINE_EXCEEDED
        calls[0].cancel()
        await server.control.Abort(control_pb2.AbortRequest(request_id="r1"))
        (end,) = await read_to_end(calls[1])
        assert end.finish_reason == pb.FINISH_REASON_ABORTED
        assert (await queued.read()).delta.token_ids  # there was room for it
        await server.control.Abort(control_pb2.AbortRequest(all=True))
        await until(lambda: not server.app.driver.live())
        await until(lambda: server.host.load.free_pages == server.host.facts.total_pages)
        poisoned = server.inference.GenerateStream(request(**prompt(99)))
        assert await code_of(collect(poisoned)) == grpc.StatusCode.INTERNAL
        running = server.inference.GenerateStream(slow(), timeout=0.3)
        assert await code_of(collect(running)) == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: server.host.load.free_pages == server.host.facts.total_pages)
        assert await answers(server)


SOME = pb.StoppingParams(max_tokens=90)


@pytest.mark.parametrize("accident", ["KILL", "RAISE", "GARBAGE", "HANG"])
async def test_who_brings_it_down_ends_and_the_others_go_on_with_the_next(accident, caplog):
    hang_seconds = 0.5 if accident == "HANG" else 60
    async with apart(hang_seconds=hang_seconds, max_batch_size=4) as server:
        calls = [server.inference.GenerateStream(slow(stopping=SOME)) for _ in range(3)]
        await begun(calls)
        watch = await watched(server)
        bad = request(**prompt(getattr(fake_child, accident)), stopping=LONG, request_id="bad")
        poison = server.inference.GenerateStream(bad)
        calls.append(server.inference.GenerateStream(slow(stopping=SOME)))  # is queued
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await code_of(collect(poison)) == grpc.StatusCode.INTERNAL
        assert "request bad crashed the engine" in caplog.text
        for i, call in enumerate(calls):
            ends = await read_to_end(call)
            assert ends[0].usage.completion_tokens == SOME.max_tokens, i
            assert ends[0].interruptions == (0 if i == 3 else 2)
        assert await answers(server)
        await until(lambda: server.host.load.free_pages == server.host.facts.total_pages)
        watch.cancel()


@pytest.mark.parametrize(("accident", "crashes"), [(fake_child.EXIT, 2), (fake_child.KILL, 4)])
async def test_alone_it_takes_two_crashes_or_four_kills_and_none_of_them_counts(accident, crashes):
    async with apart(max_engine_crashes=crashes - 1) as server:
        for times in (1, 2):
            bad = request(**prompt(accident), stopping=LONG)
            assert await code_of(collect(server.inference.GenerateStream(bad))) == grpc.StatusCode.INTERNAL
            assert metric(server, "interrupted_requests_total") == crashes * times
            await until(lambda: server.app.lifecycle.state is State.READY)
            assert await answers(server)


async def test_a_stop_string_that_one_output_had_ends_it_alone_in_a_structure():
    choices = ["ab ab ab ab", "babab babab babab"]
    asked = request(
        sampling=pb.SamplingParams(n=2, seed=1),
        stopping=pb.StoppingParams(max_tokens=50, stop=["ab a"]),
        guided=pb.GuidedDecoding(choice=pb.Choice(choices=choices)),
    )
    async with apart() as server:
        messages = [message async for message in server.inference.GenerateStream(asked)]
        tokens = [t for m in messages if m.HasField("delta") and m.delta.index == 0 for t in m.delta.token_ids]
        longer = served(EXPECTED).codec.encode(choices[1])
        outputs = [pb.ReceivedOutput(token_ids=tokens), pb.ReceivedOutput(index=1, token_ids=longer[:1])]
        fingerprint = messages[0].resume_info.fingerprint
        asked.resume.CopyFrom(pb.Resume(fingerprint=fingerprint, outputs=outputs))
        _, _, ends, rest_of_it = await collect(server.inference.GenerateStream(asked))
        assert {end.index: end.usage.completion_tokens for end in ends} == {0: len(tokens), 1: len(longer) + 1}
        assert "".join(m.delta.text for m in rest_of_it) == choices[1][len(served(EXPECTED).codec.decode(longer[:1])) :]


@pytest.mark.parametrize("way", ["cancel", "abort"])
async def test_an_end_ordered_of_a_lost_engine_holds(way, monkeypatch):
    """The engine stands still when it is told, and never says that it has ended the request."""
    async with apart() as server:
        finish, told = server.host.finish, []

        def told_to(*ending):
            finish(*ending)
            told.append(ending)

        monkeypatch.setattr(server.host, "finish", told_to)
        asked = slow(request_id="me", stopping=pb.StoppingParams(max_tokens=3000, ignore_eos=True))
        call = server.inference.GenerateStream(asked)
        await begun([call])
        server.kill(signal.SIGSTOP)
        if way == "cancel":
            call.cancel()
        else:
            assert (await server.control.Abort(control_pb2.AbortRequest(request_id="me"))).aborted_requests == 1
        await until(lambda: told)
        server.kill()
        if way == "abort":
            (end,) = await read_to_end(call)
            assert (end.finish_reason, end.interruptions) == (pb.FINISH_REASON_ABORTED, 1)
            assert end.usage.completion_tokens < 3000
        await restarted(server)
        await until(lambda: not server.app.driver.live())
        await until(lambda: server.host.load.free_pages == server.host.facts.total_pages)
        assert await answers(server)


async def test_a_successor_that_does_not_load_is_given_up(tmp_path):
    hangs = tmp_path / "the first successor hangs"
    hangs.touch()
    async with apart(hang_seconds=0.5, target=str(hangs)) as server:
        call = server.inference.GenerateStream(slow(stopping=SOME))
        await begun([call])
        server.kill()
        (end,) = await read_to_end(call)
        assert (end.usage.completion_tokens, end.interruptions) == (SOME.max_tokens, 1)
        assert not hangs.exists()
        await restarted(server)


async def test_during_recovery_both_front_ends_report_it(monkeypatch):
    async with apart() as server:
        victim, restart, gate = server.host.pid, server.host.restart, asyncio.Event()

        async def gated():
            await gate.wait()
            await restart()

        monkeypatch.setattr(server.host, "restart", gated)
        call = server.inference.GenerateStream(slow(stopping=SOME))
        await begun([call])
        server.kill()
        await until(lambda: server.app.lifecycle.state is State.RECOVERING)
        assert await reason_of(server.inference.Generate(request())) == "ENGINE_RESTARTING"
        async with http_client(server) as http:
            refused = await http.post("/v1/completions", json={"prompt": "ab"})
            health = await http.get("/health")
        assert (refused.status_code, health.status_code) == (503, 503)
        assert health.json()["status"] == "recovering"
        assert metric(server, "engine_up") == 0
        gate.set()
        await restarted(server)
        (end,) = await read_to_end(call)
        assert (end.usage.completion_tokens, end.interruptions) == (SOME.max_tokens, 1)
        assert state_of(victim) == "", "it was waited for"
        assert await answers(server)


async def test_it_dies_when_idle_again_and_again_until_it_is_once_too_often_and_leaves_no_descriptor(caplog):
    files = 0
    with caplog.at_level(logging.INFO):
        async with apart(max_engine_crashes=3) as server:
            for times in (1, 2, 3):
                assert await answers(server)
                server.kill()
                await restarted(server, times)
                await until(lambda: open_files() <= (files or open_files()))  # noqa: B023  # awaited before files moves on
                files = open_files()
            assert await answers(server)
            server.kill()
            async with asyncio.timeout(30):
                assert await server.running == 1
            assert server.app.lifecycle.state is State.FAILED
    messages = [record.getMessage() for record in caplog.records]
    assert messages.count("loading a fake") == 4


async def test_a_stopped_process_is_silent_and_so_hung_and_one_without_work_is_not():
    async with apart(hang_seconds=0.4) as server:
        await asyncio.sleep(0.9)
        call = server.inference.GenerateStream(slow(stopping=pb.StoppingParams(max_tokens=300)))
        assert len((await collect(call))[1]) == 300, "its steps are many times as short"
        assert metric(server, "engine_restarts_total") == 0
        server.kill(signal.SIGSTOP)
        await restarted(server)
        assert await answers(server)


async def test_a_step_that_does_not_end_is_one_though_structures_are_compiled_beside_it():
    async with apart(hang_seconds=0.5) as server:
        bad = request(**prompt(fake_child.HANG), stopping=SOME, request_id="bad")
        hanging = server.inference.GenerateStream(bad)
        await begun([hanging])
        asked, compiled = Guided(choice=("ab",)), 0
        while not metric(server, "engine_restarts_total"):
            with suppress(Unavailable):
                await server.host.compile(asked)
                compiled += 1
            await asyncio.sleep(0.01)
        assert compiled
        assert await code_of(read_to_end(hanging)) == grpc.StatusCode.INTERNAL


async def test_waiting_for_a_structure_ends_with_an_error_if_the_engine_is_lost():
    async with apart() as server:
        victim = server.host.pid
        server.kill(signal.SIGSTOP)
        body = {"prompt": "ab", "guided_choice": ["ab"]}
        async with http_client(server) as http:
            waiting = asyncio.ensure_future(http.post("/v1/completions", json=body))
            await until(lambda: server.host._worker._asked)
            os.kill(victim, signal.SIGKILL)
            assert (await waiting).status_code == 503
            await restarted(server)
            answer = await http.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "ab")


@pytest.mark.parametrize(("regex", "status"), [("ab|cd", 200), ("ab(", 400)])
async def test_a_structure_is_compiled_once_from_http_to_its_end(tmp_path, regex, status):
    """In the engine's process, whether it is refused or not; in that of the front ends never."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guided_text, "_compile", lambda *_: pytest.fail("compiled in the front ends' process"))
        (tmp_path / "compiled").touch()
        async with apart(target=str(tmp_path)) as server, http_client(server) as http:
            body = {"prompt": "ab", "guided_regex": regex, "n": 2}
            answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == status
    if status == 200:
        assert {choice["text"] for choice in answer.json()["choices"]} <= {"ab", "cd"}
    assert (tmp_path / "compiled").read_text() == f"{regex}\n"


async def test_a_model_that_cannot_be_served_is_no_crash(caplog):
    async with apart(target="none", ready=False) as server:
        assert await server.running == 1
        assert metric(server, "engine_restarts_total") == 0
    assert "no such model" in caplog.text


@pytest.mark.parametrize(("kills", "most"), [(1, 5), (2, 2), (3, 2)])
async def test_an_engine_that_is_killed_while_it_loads_is_loaded_again(tmp_path, caplog, kills, most):
    for number in range(kills):
        (tmp_path / str(number)).touch()
    async with apart(target=str(tmp_path), max_engine_crashes=most) as server:
        told = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert [record.exc_info for record in told] == [None] * kills
        assert all(f"the engine process ended while loading {tmp_path}" in record.getMessage() for record in told)
        assert [("giving up" in record.getMessage()) for record in told] == [i > most for i in range(1, kills + 1)]
        if kills > most:
            assert await server.running == 1
        else:
            assert (await streamed(server))[0]


async def test_the_text_is_read_while_the_engine_loads(tmp_path):
    """The engine waits for it here, and the front ends must not wait for the engine."""
    (tmp_path / "text").touch()
    async with apart(target=str(tmp_path)) as server:
        assert await answers(server)


async def test_an_engine_that_calibrates_serves_at_once_is_alive_and_may_be_killed(tmp_path):
    (tmp_path / "calibrating").touch()
    async with apart(target=str(tmp_path), hang_seconds=0.4) as server:
        for times in (1, 2):
            await until(lambda: (tmp_path / "calibrating").read_text() == "now")
            await asyncio.sleep(0.9)  # a silence of that length would be the end of it
            assert metric(server, "engine_restarts_total") == times - 1
            server.kill()
            await restarted(server, times)
            (tmp_path / "calibrating").write_text("")
            assert await answers(server), "and calibrates again"


async def test_an_engine_that_fails_to_load_is_not_loaded_again(caplog):
    async with apart(target="broken", ready=False) as server:
        assert await server.running == 1
    [told] = [
        record for record in caplog.records if record.levelno >= logging.ERROR and record.name == "pilotfish.server.app"
    ]
    assert (told.exc_info, told.getMessage().endswith("giving up")) == (None, True)


async def test_a_stop_while_it_loads_leaves_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "read_text", read)
    number = tmp_path / "number"
    source = f"""import os, pathlib, socket, sys
pathlib.Path({str(number)!r}).write_text(f"{{os.getpid()}} {{os.getppid()}}.")
while socket.socket(fileno=int(sys.argv[1])).recv(1000): pass"""
    async with serving(start_forks=partial(ForkServer, source, ()), ready=False) as server:
        await until(lambda: number.exists() and number.read_text().endswith("."))
        engine, forks = number.read_text()[:-1].split()
        server.app.stop()
        assert await server.running == 0
        assert state_of(forks) == state_of(engine) == "", "both were waited for"


async def test_engines_that_step_or_load_end_by_themselves(tmp_path, caplog):
    """The standby is loading, and would be for long."""
    hangs = tmp_path / "the first successor hangs"
    hangs.touch()
    with caplog.at_level(logging.INFO):
        async with apart(target=str(hangs), standby=True, drain_seconds=0.0) as server:
            call = server.inference.GenerateStream(slow())
            await begun([call])
            await until(lambda: not hangs.exists())
            server.app.stop()
            assert await reason_of(read_to_end(call)) == "DRAINING"
    ends = [message for message in caplog.messages if "has ended" in message]
    assert [end.rpartition(": ")[2] for end in ends] == ["exit status 0"] * 2
    assert not any("killed" in message for message in caplog.messages)


def state_of(pid: int | str) -> str:
    """One letter as in ps; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


@pytest.mark.parametrize("second_signal", [True, False])
async def test_a_crash_while_draining_ends_no_stream(second_signal):
    async with apart(drain_seconds=60) as server:
        call = server.inference.GenerateStream(slow(stopping=LONG if second_signal else SOME))
        await begun([call])
        server.app.stop()
        await until(lambda: server.app.lifecycle.state is State.DRAINING)
        server.kill()
        if second_signal:
            await until(lambda: metric(server, "engine_up") == 0 or metric(server, "engine_restarts_total"))
            server.app.stop()
            assert await reason_of(read_to_end(call)) == "DRAINING"
        else:
            (end,) = await read_to_end(call)
            assert (end.usage.completion_tokens, end.interruptions) == (SOME.max_tokens, 1)
        assert await server.running == 0


async def test_an_id_that_lives_again_gets_its_own_tokens():
    async with apart() as server:
        for _ in range(8):
            call = server.inference.GenerateStream(slow(request_id="again"))
            await begun([call])
            call.cancel()
            await until(lambda: server.app.driver.find("again") is None)
            assert await answers(server, request_id="again")
