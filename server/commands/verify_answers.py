"""How `pilotfish verify` asks and compares: whole answers, streams and resumed streams, and their first difference."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

import grpc

from client import Client, Delta, Event, Finished, GenerateOptions, Output, errors
from client.connection import Connection
from client.options import build_request
from client.resume import Patience, ResumableStream
from pilotfish.v1.generation_pb2_grpc import InferenceServiceStub
from server.commands.verify_cases import VerifyCase

Way = Literal["alone", "in company", "streamed", "resumed"]
WAYS: tuple[Way, ...] = ("alone", "in company", "streamed", "resumed")
_DEADLINE = 300.0  # seconds for one answer


class VerifyClient:
    """Asks one server. Threads may share it."""

    def __init__(self, connection: Connection) -> None:
        address, token, tls = connection.address, connection.token, connection.tls
        self.client = Client(address, token=token, tls=tls, retry=connection.retry)
        self._channel, self._metadata = connection.channel(), connection.metadata
        self._inference = InferenceServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.client.close()
        self._channel.close()

    def ask(self, case: VerifyCase, options: GenerateOptions, way: Way, cut: int) -> tuple[Output, ...]:
        """Return all outputs of a case, received in this way; a resumed stream is cut after `cut` tokens."""
        if way == "streamed":
            with closing(self.client.stream(case.prompt, deadline=_DEADLINE, **options)) as events:
                return outputs_of(list(events))
        if way == "resumed":
            return outputs_of(self._resumed(case, options, cut))
        return self.client.generate(case.prompt, deadline=_DEADLINE, **options).outputs

    def _resumed(self, case: VerifyCase, options: GenerateOptions, cut: int) -> list[Event]:
        """Receive a stream until there are `cut` tokens, cancel the call, and continue it with another one."""
        stream = ResumableStream(build_request(case.prompt, options), Patience(None, _DEADLINE))
        events: list[Event] = []
        try:
            self._receive(stream, events, cut)
            if not stream.is_complete:
                self._receive(stream, events, None)
        except grpc.RpcError as failure:
            raise errors.from_grpc(failure) from None
        return events

    def _receive(self, stream: ResumableStream, events: list[Event], cut: int | None) -> None:
        call = self._inference.GenerateStream(stream.next_request(), timeout=stream.timeout, metadata=self._metadata)
        num_tokens = 0
        try:
            for message in call:
                event = stream.take(message)
                events.append(event)
                num_tokens += len(event.token_ids) if isinstance(event, Delta) else 0
                if cut is not None and num_tokens >= cut:
                    return
        finally:
            call.cancel()  # has no effect on a call that has ended


def outputs_of(events: list[Event]) -> tuple[Output, ...]:
    """Return the outputs that the events of a stream make up, by index."""
    ends = {event.index: event for event in events if isinstance(event, Finished)}
    return tuple(_output([e for e in events if isinstance(e, Delta) and e.index == i], ends[i]) for i in sorted(ends))


def _output(deltas: list[Delta], end: Finished) -> Output:
    return Output(
        index=end.index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        from_draft=tuple(draft for delta in deltas for draft in delta.from_draft),
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
        finished=end,
    )


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Where two answers part: `what` differs in `output`, at token `position` if it is about one token."""

    what: str
    output: int
    position: int | None
    expected: str
    found: str
    is_near_tie: bool = False


def first_difference(
    expected: tuple[Output, ...], found: tuple[Output, ...], tolerance: float, *, is_greedy: bool
) -> FirstDifference | None:
    """Compare two answers; log-probabilities may differ by `tolerance`."""
    if len(expected) != len(found):
        return FirstDifference("number of outputs", 0, None, str(len(expected)), str(len(found)))
    pairs = zip(expected, found, strict=True)
    differences = (_difference(want, got, tolerance, is_greedy=is_greedy) for want, got in pairs)
    return next((difference for difference in differences if difference is not None), None)


def largest_gap(expected: tuple[Output, ...], found: tuple[Output, ...]) -> float:
    """Return by how much the log-probabilities of equal beginnings differ at most."""
    gaps = [
        abs(before.logprob - after.logprob)
        for want, got in zip(expected, found, strict=False)
        for before, after, _ in zip(want.logprobs, got.logprobs, range(_num_equal(want, got)), strict=False)
    ]
    return max(gaps, default=0.0)


def _difference(want: Output, got: Output, tolerance: float, *, is_greedy: bool) -> FirstDifference | None:
    index, at = want.index, _num_equal(want, got)
    if len(got.logprobs) != len(got.token_ids):
        numbers = str(len(got.token_ids)), str(len(got.logprobs))
        return FirstDifference("number of log-probabilities", index, None, *numbers)
    odd = next((i for i in range(at) if not abs(_logprob(want, i) - _logprob(got, i)) <= tolerance), None)
    if want.token_ids != got.token_ids:
        is_near_tie = is_greedy and odd is None and _is_near_tie(want, got, at, tolerance)
        return FirstDifference("token", index, at, _token(want, at), _token(got, at), is_near_tie)
    if odd is not None:
        return FirstDifference("log-probability", index, odd, f"{_logprob(want, odd)!r}", f"{_logprob(got, odd)!r}")
    for what, mine, theirs in (
        ("text", want.text, got.text),
        ("end", _end(want.finished), _end(got.finished)),
        ("seed", want.finished.seed, got.finished.seed),
    ):
        if mine != theirs:
            return FirstDifference(what, index, None, repr(mine), repr(theirs))
    return None


def _is_near_tie(want: Output, got: Output, at: int, tolerance: float) -> bool:
    """Whether plain decoding found both tokens as likely as each other, but for rounding."""
    if tolerance == 0 or at >= min(len(want.token_ids), len(got.token_ids)):
        return False
    chosen = want.logprobs[at]
    others = (one.logprob for one in chosen.top if one.token_id == got.token_ids[at])
    return any(abs(chosen.logprob - other) <= tolerance for other in others)


def _num_equal(want: Output, got: Output) -> int:
    """The length of the beginning that both have in common."""
    shorter = min(len(want.token_ids), len(got.token_ids))
    return next((i for i in range(shorter) if want.token_ids[i] != got.token_ids[i]), shorter)


def _logprob(output: Output, at: int) -> float:
    return output.logprobs[at].logprob


def _token(output: Output, at: int) -> str:
    return str(output.token_ids[at]) if at < len(output.token_ids) else "the end"


def _end(finished: Finished) -> tuple[str, int | None, str | None, int]:
    return finished.finish_reason, finished.stop_token_id, finished.stop_string, finished.usage.completion_tokens
