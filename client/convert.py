"""Converts protocol messages to results. No other file of this package reads answers of the protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from client import results
from pilotfish.v1 import control_pb2, generation_pb2


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
        usage=_usage(message.usage),
        speculation_stats=_speculation_stats(message.speculation_stats),
        timing=_timing(message.timing),
        seed=message.seed,
        speculation=_speculation(message.speculation),
        interruptions=message.interruptions,
    )


def server_info(message: control_pb2.GetServerInfoResponse) -> results.ServerInfo:
    """Convert the answer of GetServerInfo."""
    return results.ServerInfo(
        version=message.version,
        state=_word(control_pb2.ServerState, message.state, "SERVER_STATE_"),
        uptime_seconds=message.uptime_seconds,
        max_queue_requests=message.max_queue_requests,
        max_queue_tokens=message.max_queue_tokens,
    )


def model_info(message: control_pb2.GetModelInfoResponse) -> results.ModelInfo:
    """Convert the answer of GetModelInfo."""
    return results.ModelInfo(
        model=message.model,
        draft_model=message.draft_model,
        device=message.device,
        dtype=message.dtype,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        eos_token_ids=tuple(message.eos_token_ids),
        has_tokenizer=message.has_tokenizer,
        proposers=tuple(message.proposers),
        speculation=_speculation(message.speculation),
        max_batch_size=message.max_batch_size,
        max_batch_tokens=message.max_batch_tokens,
        adapters=tuple(message.adapters),
    )


def load(message: control_pb2.GetLoadResponse) -> results.Load:
    """Convert the answer of GetLoad."""
    return results.Load(
        running_requests=message.running_requests,
        waiting_requests=message.waiting_requests,
        queued_tokens=message.queued_tokens,
        total_pages=message.total_pages,
        free_pages=message.free_pages,
        spec_gain_ratio=message.spec_gain_ratio,
    )


def _usage(message: generation_pb2.Usage) -> results.Usage:
    return results.Usage(
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        cached_prompt_tokens=message.cached_prompt_tokens,
        accepted_prediction_tokens=message.accepted_prediction_tokens,
        rejected_prediction_tokens=message.rejected_prediction_tokens,
    )


def _speculation_stats(message: generation_pb2.SpeculationStats) -> results.SpeculationStats:
    return results.SpeculationStats(
        rounds=message.rounds,
        drafted=message.drafted,
        accepted=message.accepted,
        accepted_per_position=tuple(message.accepted_per_position),
        acceptance_length=message.acceptance_length,
        gain_ratio=message.gain_ratio,
    )


def _timing(message: generation_pb2.Timing) -> results.Timing:
    return results.Timing(
        queue_seconds=message.queue_seconds,
        time_to_first_token_seconds=message.time_to_first_token_seconds,
        total_seconds=message.total_seconds,
    )


def _speculation(message: generation_pb2.SpeculationOptions) -> results.Speculation:
    return results.Speculation(
        mode=_word(generation_pb2.SpeculationMode, message.mode, "SPECULATION_MODE_"),
        num_draft_tokens=message.num_draft_tokens,
        proposer=message.proposer,
        verification=_word(generation_pb2.Verification, message.verification, "VERIFICATION_"),
    )


def _word(enum: _Enum, number: int, prefix: str) -> str:
    """Convert FINISH_REASON_STOP to "stop"; a value unknown to this client (from a newer server) keeps its number."""
    return enum.Name(number).removeprefix(prefix).lower() if number in enum.values() else str(number)
