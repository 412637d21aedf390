"""Converts protocol messages to results. No other module of this package reads the protocol's answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from google.protobuf.message import Message

from pilotfish.client import results
from pilotfish.v1 import control_pb2, generation_pb2

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ResultT = TypeVar("ResultT", bound="DataclassInstance")
_SCALARS = (str, int, float, bool)


class _Enum(Protocol):
    """A protobuf enum, of which only the names are used."""

    def values(self) -> Sequence[int]: ...
    def Name(self, number: Any) -> str: ...  # noqa: N802 - protobuf's spelling


def completion(message: generation_pb2.GenerateResponse) -> results.Completion:
    """Convert the answer of a unary call."""
    return results.Completion(
        request_id=message.request_id,
        model=message.model,
        outputs=tuple(map(_output, message.outputs)),
        prompt_logprobs=_prompt_logprobs(message),
        prompt_token_ids=_prompt_token_ids(message),
        starts_in_reasoning=message.starts_in_reasoning,
    )


def _output(message: generation_pb2.Output) -> results.Output:
    return results.Output(
        index=message.index,
        text=message.text,
        token_ids=tuple(message.token_ids),
        from_draft=tuple(message.from_draft),
        logprobs=tuple(map(_logprob, message.logprobs)),
        finished=finished(message.finished),
    )


def event(message: generation_pb2.GenerateStreamResponse) -> results.Event:
    """Convert one message of a stream."""
    if message.WhichOneof("event") == "finished":
        return finished(message.finished)
    delta = message.delta
    return results.Delta(
        index=delta.index,
        text=delta.text,
        token_ids=tuple(delta.token_ids),
        from_draft=tuple(delta.from_draft),
        text_lengths=tuple(delta.text_lengths),
        logprobs=tuple(map(_logprob, delta.logprobs)),
        prompt_logprobs=_prompt_logprobs(message),
        prompt_token_ids=_prompt_token_ids(message),
        starts_in_reasoning=message.starts_in_reasoning,
    )


def _logprob(message: generation_pb2.TokenLogprob) -> results.TokenLogprob:
    top = tuple(results.Candidate(candidate.token_id, candidate.logprob) for candidate in message.top)
    return results.TokenLogprob(message.logprob, top)


def _prompt_logprobs(
    message: generation_pb2.GenerateResponse | generation_pb2.GenerateStreamResponse,
) -> results.PromptLogprobs | None:
    """Convert prompt log-probabilities. The message has no entry for the first token of the prompt."""
    if not message.HasField("prompt_logprobs"):
        return None
    return (None, *map(_logprob, message.prompt_logprobs.logprobs))


def _prompt_token_ids(
    message: generation_pb2.GenerateResponse | generation_pb2.GenerateStreamResponse,
) -> results.Tokens | None:
    return tuple(message.prompt_token_ids.ids) if message.HasField("prompt_token_ids") else None


def finished(message: generation_pb2.Finished) -> results.Finished:
    """Convert the end of one output."""
    return results.Finished(
        index=message.index,
        finish_reason=_word(generation_pb2.FinishReason, message.finish_reason, "FINISH_REASON_"),
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        stop_string=message.stop_string if message.HasField("stop_string") else None,
        usage=_copied(results.Usage, message.usage),
        speculation_stats=_copied(results.SpeculationStats, message.speculation_stats),
        timing=_copied(results.Timing, message.timing),
        seed=message.seed,
        speculation=_speculation(message.speculation),
        interruptions=message.interruptions,
    )


def server_info(message: control_pb2.GetServerInfoResponse) -> results.ServerInfo:
    """Convert the answer of GetServerInfo."""
    state = _word(control_pb2.ServerState, message.state, "SERVER_STATE_")
    return _copied(results.ServerInfo, message, state=state)


def model_info(message: control_pb2.GetModelInfoResponse) -> results.ModelInfo:
    """Convert the answer of GetModelInfo."""
    return _copied(results.ModelInfo, message, speculation=_speculation(message.speculation))


def load(message: control_pb2.GetLoadResponse) -> results.Load:
    """Convert the answer of GetLoad."""
    return _copied(results.Load, message)


def _speculation(message: generation_pb2.SpeculationOptions) -> results.Speculation:
    mode = _word(generation_pb2.SpeculationMode, message.mode, "SPECULATION_MODE_")
    verification = _word(generation_pb2.Verification, message.verification, "VERIFICATION_")
    return _copied(results.Speculation, message, mode=mode, verification=verification)


def _copied(kind: type[ResultT], message: Message, **converted: Any) -> ResultT:
    """Build a result from the fields of `message` with the same names, except for those that are `converted` already.

    Repeated fields become tuples.
    """
    values = {each.name: getattr(message, each.name) for each in fields(kind) if each.name not in converted}
    plain = {name: value if isinstance(value, _SCALARS) else tuple(value) for name, value in values.items()}
    return kind(**plain, **converted)


def _word(enum: _Enum, number: int, prefix: str) -> str:
    """Convert FINISH_REASON_STOP to "stop"; a value unknown to this client (from a newer server) keeps its number."""
    return enum.Name(number).removeprefix(prefix).lower() if number in enum.values() else str(number)
