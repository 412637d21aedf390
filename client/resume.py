"""Retries of requests, and resumption of interrupted streams, for both clients.

This module makes no calls and does not sleep. It returns the next request, its timeout and the pause before it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import grpc

from pilotfish.client import convert
from pilotfish.client.connection import Retry
from pilotfish.client.errors import DeadlineExceededError, RequestFailedError
from pilotfish.client.results import Event
from pilotfish.v1 import generation_pb2 as pb

# gRPC reports CANCELLED for calls that reach a server during its shutdown. Calls that their own caller cancels do not
# come here.
_INTERRUPTED = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})
# Refusals that another server, or the same one later, may not repeat: the server has another model, other limits or
# other proposers than the first one, or it has not detected yet that the earlier call lost its connection.
_REFUSED_HERE = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.ALREADY_EXISTS,
    }
)
_MAX_DOUBLINGS = 30


class Patience:
    """The deadline of one request and its budget of attempts, which is renewed whenever something arrives.

    `retry` None means a single attempt. `uniform` returns random numbers from 0 to 1, which spread the pauses of many
    callers.
    """

    def __init__(
        self,
        retry: Retry | None,
        deadline: float | None,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self._retry, self._clock, self._uniform = retry, clock, uniform
        self._end = None if deadline is None else clock() + deadline
        self._num_failures = 0  # since the last arrival
        self._is_resent = False
        self._server_exists = False

    @property
    def timeout(self) -> float | None:
        """Return the seconds until the deadline: the timeout of the next call."""
        return None if self._end is None else max(0.0, self._end - self._clock())

    def renew(self) -> None:
        """Record that something arrived."""
        self._num_failures = 0

    def pause_before_resending(self, error: RequestFailedError) -> float:
        """Return the pause before the same request is sent again, after a call that received nothing.

        gRPC has retried the call already. Further attempts follow only if a Pilotfish server has answered that it is
        unavailable, for instance because it drains, so that an address without a server is reported quickly. Raises
        `error` if the request must not be sent again.
        """
        self._server_exists = self._server_exists or error.reason is not None
        is_ours = self._is_resent and error.code is grpc.StatusCode.ALREADY_EXISTS  # the earlier call of this request
        if not is_ours and not (self._server_exists and error.code in _INTERRUPTED):
            raise error from None
        return self.pause(error)

    def pause(self, error: RequestFailedError) -> float:
        """Return the pause before the next attempt. Raises `error` after the last one."""
        self._num_failures += 1
        if self._retry is None or self._num_failures > self._retry.resume_attempts:
            raise error from None
        doublings = min(self._num_failures - 1, _MAX_DOUBLINGS)
        longest = min(self._retry.first_pause * 2.0**doublings, self._retry.longest_pause)
        requested, own = error.retry_seconds or 0.0, longest * (1 + self._uniform()) / 2
        left = self.timeout
        if left is not None:
            if left <= requested:
                raise _late(error) from None
            own = min(own, left / 2)  # leave time for an attempt
        self._is_resent = True
        return max(own, requested)


class ResumableStream:
    """One stream over several calls: the request of each call, and what was received so far."""

    def __init__(self, request: pb.GenerateRequest, patience: Patience) -> None:
        self._first, self._patience = request, patience
        self._info: pb.ResumeInfo | None = None
        self._outputs: dict[int, pb.ReceivedOutput] = {}
        self._num_continued = 0
        self._call_has_begun = False

    @property
    def timeout(self) -> float | None:
        """Return the timeout of the next call."""
        return self._patience.timeout

    @property
    def is_complete(self) -> bool:
        """Whether the end of every output has arrived."""
        num_outputs = self._first.sampling.n if self._first.sampling.HasField("n") else 1
        return sum(output.finished for output in self._outputs.values()) == num_outputs

    def next_request(self) -> pb.GenerateRequest:
        """Return the request of the next call: the caller's, or one that resumes the stream."""
        self._call_has_begun = False
        if self._info is None:
            return self._first
        request = pb.GenerateRequest()
        request.CopyFrom(self._first)
        request.sampling.seed, request.stopping.max_tokens = self._info.seed, self._info.max_tokens
        request.speculation.CopyFrom(self._info.speculation)
        resume = pb.Resume(fingerprint=self._info.fingerprint, interruptions=self._num_continued)
        resume.outputs.extend(self._outputs[index] for index in sorted(self._outputs))
        request.resume.CopyFrom(resume)
        return request

    def take(self, message: pb.GenerateStreamResponse) -> Event:
        """Record a message and return its event.

        Raises RequestFailedError if the call restarts the stream, because its server is too old to resume streams.
        """
        if not self._call_has_begun:
            self._begin_call(message)
        self._patience.renew()
        is_end = message.HasField("finished")
        index = message.finished.index if is_end else message.delta.index
        output = self._outputs.setdefault(index, pb.ReceivedOutput(index=index))
        if is_end:
            output.finished = True
            output.ClearField("token_ids")  # no longer required
        else:
            output.token_ids.extend(message.delta.token_ids)
            output.tail = output.tail or len(message.delta.text) > sum(message.delta.text_lengths)
        return convert.event(message)

    def _begin_call(self, message: pb.GenerateStreamResponse) -> None:
        if self._info is not None:
            if message.resume_info.fingerprint != self._info.fingerprint:
                raise RequestFailedError(grpc.StatusCode.FAILED_PRECONDITION, "the server cannot resume streams")
            self._num_continued += 1
        elif not self._outputs and message.resume_info.fingerprint:
            self._info = message.resume_info
        self._call_has_begun = True

    def pause_after(self, error: RequestFailedError) -> float | None:
        """Return the pause before the next call; None if everything has arrived in spite of `error`.

        Raises `error`, or DeadlineExceededError, if the stream ends with it.
        """
        if self.is_complete:
            return None
        if self._info is None:
            if self._outputs:  # the server cannot resume streams
                raise error from None
            return self._patience.pause_before_resending(error)
        is_transient = error.code in _INTERRUPTED or (not self._call_has_begun and _is_refused_here(error))
        if not is_transient:
            raise error from None
        return self._patience.pause(error)


def _is_refused_here(error: RequestFailedError) -> bool:
    """Whether another server, or the same one later, may resume the stream that this one has refused."""
    is_full = error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and error.retry_seconds is not None
    return is_full or error.code in _REFUSED_HERE


def _late(error: RequestFailedError) -> DeadlineExceededError:
    problem = f"the deadline passes before the next attempt; the last one ended with {error}"
    return DeadlineExceededError(grpc.StatusCode.DEADLINE_EXCEEDED, problem)
