"""What two processes say to each other: everything comes back as it went, and what is no message is none."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections import deque
from contextlib import closing, suppress
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish.engine.config import Bounds
from pilotfish.engine.errors import Violation
from pilotfish.engine.params import (
    Guided,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    SpeculationSettings,
    Verification,
)
from pilotfish.engine.stats import EngineLoad, Forward, StepOutput, StepStats
from pilotfish.engine.types import (
    DraftStats,
    FinishedOutput,
    FinishReason,
    Logprob,
    ReceivedOutput,
    Request,
    Resume,
    TokenEvent,
    TopLogprob,
)
from pilotfish.server.worker import wire
from pilotfish.server.worker.engine_process import EngineServer, FrontEndGone, Link, Structures, serve
from pilotfish.server.worker.worker import Worker
from tests.engine.text.test_codec import CODEC
from tests.server.fake_engine import FakeEngine
from tests.server.fake_grammar import FakeCompiler

LIMIT = 1 << 20
LOAD = EngineLoad(1, 0, 7, 6, 1.5)
REQUEST = Request(
    request_id="alice/r",
    token_ids=(1, 2, 2**31),
    sampling=SamplingParams(
        temperature=0.5, logit_bias={7: -1.5}, seed=2**64 - 1, stop=("€",), guided=Guided(choice=("a", "b"))
    ),
    speculation=SpeculationParams(mode=SpeculationMode.FIXED, verification=Verification.REJECTION),
    cache_salt="s",
)
FINISHED = FinishedOutput(
    reason=FinishReason.STOP,
    prompt_tokens=3,
    completion_tokens=2,
    seed=2**64 - 1,
    speculation=SpeculationSettings(
        mode=SpeculationMode.AUTO, num_draft_tokens=4, proposer="model", verification=Verification.COUPLED
    ),
    stats=DraftStats(2, 8, 4, (2, 2)),
    stop_token_id=0,
)
EVENT = TokenEvent(
    request_id="alice/r",
    index=1,
    token_ids=(5, 6),
    from_draft=(True, False),
    logprobs=(Logprob(-math.inf, (TopLogprob(1, -0.5),)), Logprob(-1.0)),
    prompt_logprobs=(None, Logprob(-2.0)),
    finished=FINISHED,
)
STATS = StepStats(forwards=(Forward("verify", 2, 8),), phase_seconds={"plan": 0.5}, accepted_per_position=(1, 0))
TO_ENGINE = [
    wire.Start("{}", "json", 0.5),
    REQUEST,
    wire.Finish("alice/r", FinishReason.STOP, 1, 20),
    wire.Finish("alice/r", FinishReason.CANCELLED, is_dropped=True),
    wire.Taken(),
    wire.Start("{}", "json", 0.5, is_successor=True),
    wire.CalibrationText((1, 2)),
    wire.Compile(4, Guided(json_schema="{}"), ((1, 2), ())),
]
TO_FRONT_END = [
    wire.Progress("loading"),
    wire.Refused("no"),
    wire.Ready(FakeEngine().facts, LOAD),
    StepOutput((EVENT,), STATS, LOAD, 3),
    StepOutput((), None, LOAD, 3),
    wire.Heartbeat(),
    wire.Answer(4, violations=(Violation("guided", "is wrong"),)),
    wire.Answer(5, refused="no"),
]


@pytest.mark.parametrize("size", [1, 7, 10**6])
def test_everything_comes_back_as_it_went(size):
    for messages in (TO_ENGINE, TO_FRONT_END):
        stream = b"".join(wire.framed(message, LIMIT) for message in messages)
        frames = wire.Frames(LIMIT)
        parts = [stream[i : i + size] for i in range(0, len(stream), size)]
        assert [wire.read(payload) for part in parts for payload in frames.feed(part)] == messages


OTHER_SHAPES = [["Add", 1], ["Output"], [], {"type": "Add"}, 3, None, ["Add", "1", 2, {}]]
KINDS = [wire.framed(message, LIMIT)[4] for message in (TO_ENGINE[2], TO_FRONT_END[3])]
CUT = [bytes(wire.framed(TO_ENGINE[1], LIMIT)[4:-1]), b"\0\x91\xa1\xff"]  # the second one has a name that is not UTF-8
UNKNOWN = [b"", b"\xff\x90"]


def test_what_is_no_message_is_refused():
    shapes = list(map(msgspec.msgpack.encode, OTHER_SHAPES))
    for data in (*(bytes([kind]) + shape for kind in KINDS for shape in shapes), *CUT, *UNKNOWN):
        with pytest.raises(wire.WireError):
            wire.read(data)


@settings(max_examples=30)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error_of_ours(data):
    for read in (wire.read, lambda data: list(wire.Frames(100).feed(data))):
        with suppress(wire.WireError):
            read(data)


def test_what_is_too_large_is_refused_on_both_sides_before_it_is_read():
    with pytest.raises(wire.EncodeError):
        wire.framed(TO_ENGINE[1], 10)
    for sampling in (SamplingParams(stop=("\ud800",)), SamplingParams(seed=2**64)):
        with pytest.raises(wire.EncodeError):
            wire.framed(replace(REQUEST, sampling=sampling), LIMIT)
    with pytest.raises(wire.WireError, match="limit is 10"):
        list(wire.Frames(10).feed((11).to_bytes(4, "big")))


def test_log_probabilities_of_the_largest_request_fit():
    bounds = Bounds(max_total_logprobs=1 << 12)
    top = tuple(TopLogprob(2**31, -1e300) for _ in range(15))
    found = tuple(Logprob(-1e300, top) for _ in range((1 << 12) // 16))
    event = TokenEvent(request_id="r", prompt_logprobs=found)
    size = len(wire.framed(StepOutput((event,), STATS, LOAD, 3), LIMIT))
    assert size < wire.most_bytes(bounds) - wire.most_bytes(Bounds(max_total_logprobs=0)) + 1000


# ------------------------------------------------------------------------------- the engine's side, on this thread


class FrontEnds:
    """The other end of an `EngineServer` around a fake, which takes one turn at a time."""

    def __init__(self, engine: FakeEngine) -> None:
        self.socket, theirs = socket.socketpair()
        self.engine, self.compiler, self.link, self.theirs = engine, FakeCompiler(), Link(theirs), theirs
        structures = Structures(lambda: self.compiler)
        self.server = EngineServer(self.link, engine, structures, wire.Start("{}", "json", 0.01))
        self.frames = wire.Frames(LIMIT)
        self.socket.setblocking(False)

    def close(self) -> None:
        self.socket.close()
        self.compiler.gate.set()
        self.theirs.close()

    def say(self, *messages):
        """Send messages, and wait until they are read."""
        waiting = self.link.received.qsize()
        for message in messages:
            self.socket.sendall(wire.framed(message, LIMIT))
        while self.link.received.qsize() < waiting + len(messages):
            time.sleep(0.0001)

    def turn(self, times: int = 1):
        """What it says in these turns, heartbeats aside."""
        heard = []
        for _ in range(times):
            self.server.turn()
            try:
                heard += [wire.read(p) for p in self.frames.feed(self.socket.recv(1 << 20))]
            except BlockingIOError:
                continue
        return [message for message in heard if not isinstance(message, wire.Heartbeat)]


@pytest.fixture
def front_ends():
    with closing(FrontEnds(FakeEngine())) as both:
        yield both


def asked(name: str, **sampling) -> Request:
    return Request(request_id=name, token_ids=(1, 2), sampling=SamplingParams(**{"max_tokens": 300, **sampling}))


def test_it_runs_no_further_ahead_than_two_outputs(front_ends):
    front_ends.say(asked("a"))
    assert len(front_ends.turn(10)) == 2
    front_ends.say(wire.Taken())
    assert len(front_ends.turn(10)) == 1
    assert front_ends.engine.steps == 3


def test_an_end_frees_pages_before_the_next_step_and_comes_at_once(front_ends):
    front_ends.say(asked("a"), asked("b"))
    front_ends.turn()
    front_ends.say(wire.Taken(), wire.Finish("a", FinishReason.CANCELLED))
    first, second = front_ends.turn()
    assert [event.request_id for event in first.events] == ["a"]
    assert (first.stats, first.load.free_pages) == (None, front_ends.engine.facts.total_pages - 1)
    assert [event.request_id for event in second.events] == ["b"]
    assert front_ends.engine.steps == 2


def test_a_dropped_request_has_no_events_and_its_id_is_free(front_ends):
    front_ends.say(asked("a"))
    front_ends.turn()
    front_ends.say(wire.Finish("a", FinishReason.CANCELLED, is_dropped=True), asked("a", max_tokens=1))
    (output,) = front_ends.turn()
    assert [(event.request_id, event.finished.reason) for event in output.events] == [("a", FinishReason.LENGTH)]
    assert output.num_orders == 3
    front_ends.say(
        wire.Finish("a", FinishReason.CANCELLED), wire.Finish("z", FinishReason.CANCELLED, is_dropped=True)
    )  # both are over
    (idle,) = front_ends.turn()
    assert (idle.events, idle.num_orders) == ((), 5)


def answer_to(front_ends, asked, seconds=30.0):
    """The answer to a message, without a turn of the thread that steps."""
    front_ends.socket.sendall(wire.framed(asked, LIMIT))
    front_ends.socket.settimeout(seconds)
    [payload] = front_ends.frames.feed(front_ends.socket.recv(1 << 20))
    front_ends.socket.setblocking(False)
    return wire.read(payload)


def test_a_structure_is_compiled_and_answered_while_a_step_runs_and_added_without_another_compilation(front_ends):
    guided = Guided(choice=("ab",))
    front_ends.say(asked("a"))
    front_ends.engine.gate.clear()
    stepping = threading.Thread(target=front_ends.server.turn)
    stepping.start()
    assert answer_to(front_ends, wire.Compile(2, guided)) == wire.Answer(2)
    assert not front_ends.engine.steps
    front_ends.engine.gate.set()
    stepping.join()
    front_ends.say(wire.Taken(), asked("g", guided=guided))
    front_ends.turn()
    assert [request.request_id for request in front_ends.engine.requests] == ["a", "g"]
    assert front_ends.compiler.asked == [guided]


def test_what_is_wrong_with_a_structure_or_with_the_tokens_is_answered(front_ends):
    refused = answer_to(front_ends, wire.Compile(1, Guided(regex="a")))
    assert [(refused.number, v.field) for v in refused.violations] == [(1, "guided.regex")]
    ab, ends = Guided(choice=("ab",)), CODEC.encode("ab")
    assert answer_to(front_ends, wire.Compile(2, ab, ((), ends[:1], ends))) == wire.Answer(2)
    [unfit] = answer_to(front_ends, wire.Compile(3, ab, ((), (*ends, 5)))).violations
    assert str(unfit) == f"resume.outputs[1].token_ids[{len(ends)}] is 5, which does not fit the structure"
    front_ends.compiler.compile = lambda _: 1 / 0
    assert answer_to(front_ends, wire.Compile(4, ab)) == wire.Answer(4, fault="the structure could not be compiled")


def test_recompiling_a_structure_blocks_no_other_request(front_ends):
    front_ends.compiler.gate.clear()
    front_ends.say(asked("g", guided=Guided(choice=("ab",))), asked("a"))
    (output,) = front_ends.turn()
    assert [event.request_id for event in output.events] == ["a"]
    front_ends.say(wire.Taken(), wire.Finish("g", FinishReason.CANCELLED, is_dropped=True))
    (output,) = front_ends.turn()
    assert [event.request_id for event in output.events] == ["a"]
    front_ends.compiler.gate.set()
    front_ends.say(wire.Taken(), wire.Finish("a", FinishReason.CANCELLED, is_dropped=True))
    front_ends.turn(3)
    assert not front_ends.engine.has_work


def test_an_output_that_is_finished_while_a_structure_compiles_ends_when_it_is_added_and_the_others_go_on(front_ends):
    front_ends.compiler.gate.clear()
    emitted = (ReceivedOutput(token_ids=(5, 6, 7)), ReceivedOutput(token_ids=(8,)))
    request = replace(
        asked("g", guided=Guided(choice=("ab",)), n=2, seed=3, max_tokens=9), resume=Resume(outputs=emitted)
    )
    front_ends.say(request, wire.Finish("g", FinishReason.STOP, 0, 2))
    assert [output.events for output in front_ends.turn()] == [()]
    front_ends.compiler.gate.set()
    front_ends.say(wire.Taken())
    ends = [event for output in front_ends.turn(20) for event in output.events if event.finished is not None]
    assert [(event.index, event.finished.reason) for event in ends[:1]] == [(0, FinishReason.STOP)]
    assert ends[0].finished.completion_tokens == 2
    front_ends.say(wire.Finish("g", FinishReason.CANCELLED, is_dropped=True))
    front_ends.turn(3)
    assert not front_ends.engine.has_work


def test_the_structure_of_a_dropped_request_does_not_bring_it_back_under_the_id_of_the_next_one(front_ends):
    front_ends.compiler.gate.clear()
    first, second = (asked("g", guided=Guided(choice=(text,))) for text in ("ab", "ba"))
    front_ends.say(first, wire.Finish("g", FinishReason.CANCELLED, is_dropped=True), second)
    front_ends.turn()
    front_ends.compiler.gate.set()
    while not front_ends.engine.requests:
        front_ends.turn()
    front_ends.turn(3)
    assert [request.sampling.guided for request in front_ends.engine.requests] == [second.sampling.guided]


def test_an_idle_engine_does_one_chore_at_a_time_and_none_while_anybody_waits(front_ends):
    """A chore is a recording: a request that comes meanwhile waits for one at most."""
    chores = ["a", "b", "c"]
    front_ends.engine.idle_tick = lambda _: chores.pop() and bool(chores)
    front_ends.server._heartbeat_seconds = 600.0
    front_ends.turn()
    assert chores == ["a", "b"]
    front_ends.compiler.gate.clear()
    guided = asked("g", guided=Guided(choice=("ab",)), max_tokens=1)
    front_ends.say(asked("a", max_tokens=2), guided)
    front_ends.turn()
    while front_ends.engine.has_work:
        front_ends.say(wire.Taken())
        front_ends.turn()
    assert (front_ends.server._patience, chores) == (600.0, ["a", "b"])  # one whose structure is compiled waits, too
    front_ends.compiler.gate.set()
    while front_ends.engine.has_work or front_ends.server._compiling:
        front_ends.say(wire.Taken())
        front_ends.turn()
    assert chores == ["a", "b"]
    while chores:  # the notice that the structure is compiled may take a turn
        front_ends.turn()
    assert front_ends.server._patience == 600.0


def test_idle_work_sends_heartbeats_and_stops_at_the_next_order(front_ends):
    heard = []

    def idle_tick(is_wanted):
        heard.extend(is_wanted() for _ in range(3))
        front_ends.say(asked("a", max_tokens=1))
        heard.append(is_wanted())
        return True

    front_ends.engine.idle_tick, front_ends.server._heartbeat_seconds = idle_tick, 0.0
    front_ends.server.turn()
    assert heard == [False, False, False, True]
    beats = [wire.read(p) for p in front_ends.frames.feed(front_ends.socket.recv(1 << 20))]
    assert [type(beat) for beat in beats] == [wire.Heartbeat] * 5


def test_a_standby_does_not_calibrate_until_it_serves(front_ends):
    calls = []
    front_ends.engine.idle_tick = lambda is_wanted: calls.append(is_wanted is not None)
    front_ends.server._is_successor, front_ends.server._heartbeat_seconds = True, 0.0
    front_ends.turn(3)
    assert calls == [False] * 3
    front_ends.say(asked("a", max_tokens=1))
    front_ends.turn(3)
    assert calls[3:] == [True] * 2


def test_an_engine_calibrates_with_the_text_of_its_front_ends(front_ends):
    front_ends.say(wire.CalibrationText((1, 2)))
    assert not front_ends.turn(), "it is no order"
    assert front_ends.engine.calibration_text == (1, 2)


def test_an_engine_calibrates_only_with_a_text(front_ends):
    calls = []
    front_ends.engine.idle_tick = lambda is_wanted: calls.append(is_wanted is not None)
    front_ends.server._heartbeat_seconds, front_ends.engine.calibration_text = 0.0, None
    front_ends.turn(2)
    front_ends.say(wire.CalibrationText(()))
    front_ends.turn(2)
    assert calls == [False, False, True, True]


def test_an_engine_calibrates_only_after_a_while_without_an_order(front_ends):
    """Between the requests of one caller, and between the start and the first request, it does not."""
    calls = []
    front_ends.engine.idle_tick = lambda is_wanted: calls.append(is_wanted is not None) or True
    front_ends.server._heartbeat_seconds = 600.0
    front_ends.turn(2)
    front_ends.server._heartbeat_seconds = 0.0
    front_ends.turn()
    front_ends.server._heartbeat_seconds = 600.0
    front_ends.turn()
    assert calls == [False, False, True, True]
    front_ends.say(asked("a", max_tokens=1))
    front_ends.turn(2)
    assert calls[4:] == [False]


def test_what_the_engine_refuses_fails_alone(front_ends):
    bad = Request(request_id="bad", token_ids=(1,), sampling=SamplingParams(n=2), adapter="gone")
    front_ends.say(bad, asked("a", max_tokens=1))
    first, second = front_ends.turn()
    assert [event.finished.reason for event in first.events] == [FinishReason.ERROR] * 2
    assert second.events[0].finished.reason is FinishReason.LENGTH


def test_logprobs_of_prompts_go_apart(front_ends):
    front_ends.say(*(asked(f"r{i}", prompt_logprobs=1) for i in (1, 2)), asked("a"))
    outputs = front_ends.turn()
    assert [[event.request_id for event in output.events] for output in outputs] == [["r1"], ["r2"], ["a"]]
    assert [output.stats is None for output in outputs] == [True, True, False]


@pytest.mark.parametrize(
    "data", [b"\0\0\0\3abc", b"\xff\xff\xff\xff", wire.framed(TO_ENGINE[1], LIMIT), wire.framed(TO_FRONT_END[0], LIMIT)]
)
def test_a_process_ends_after_an_invalid_message(data):
    ours, theirs = socket.socketpair()
    ours.sendall(data)
    with ours, theirs, pytest.raises(wire.WireError):
        serve(Link(theirs), lambda *_: pytest.fail("nothing was to be loaded"))


async def test_an_engine_that_sends_an_order_is_killed():
    killed = []
    worker = Worker(SimpleNamespace(kill=lambda: killed.append(1)), LIMIT, print)
    worker.connection_made(SimpleNamespace(abort=lambda: None))
    worker.data_received(wire.framed(REQUEST, LIMIT))
    assert (type(worker.loss), killed) == (wire.WireError, [1])


def test_a_process_that_is_left_alone_ends(front_ends):
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs, pytest.raises(FrontEndGone):
        serve(Link(theirs), lambda *_: pytest.fail("nothing was to be loaded"))
    front_ends.say(asked("a"))
    front_ends.turn()
    front_ends.socket.close()
    with pytest.raises(FrontEndGone):
        deque(iter(front_ends.server.turn, ...))  # for ever
