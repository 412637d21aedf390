"""The only file that sees both protocol and engine types. Knows no network and no time.

In: every violation is collected before one is raised, and what is not served yet is refused by name.
Out: one chunk of a stream becomes at most two messages.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from engine.errors import InvalidRequest, Unsupported, Violation
from engine.types import (
    Finished,
    FinishReason,
    Request,
    SamplingParams,
    Speculation,
    SpeculationMode,
    SpeculationParams,
    SpeculationStats,
    Verification,
)
from pilotfish.v1 import control_pb2 as control_pb
from pilotfish.v1 import generation_pb2 as pb
from server.errors import NotFound
from server.model import ServedModel
from server.outputs import Chunk, End, Timeline

AnyGenerateRequest: TypeAlias = pb.GenerateRequest | pb.GenerateStreamRequest

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

_MODES = {
    pb.SPECULATION_MODE_AUTO: SpeculationMode.AUTO,
    pb.SPECULATION_MODE_OFF: SpeculationMode.OFF,
    pb.SPECULATION_MODE_FIXED: SpeculationMode.FIXED,
}
_VERIFICATIONS = {
    pb.VERIFICATION_COUPLED: Verification.COUPLED,
    pb.VERIFICATION_REJECTION: Verification.REJECTION,
}
_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
    FinishReason.DEADLINE: pb.FINISH_REASON_DEADLINE,
    FinishReason.ABORTED: pb.FINISH_REASON_ABORTED,
}  # ERROR is a status, never a message


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request in the engine's words, and what its reader wants to see of the output."""

    request: Request
    token_ids: bool
    interval: int  # tokens to gather before a message after the first is sent


# ------------------------------------------------------------------------------------------------------------- in


def require_model(name: str | None, model: ServedModel) -> None:
    """Raise NotFound unless `name` is the served model's; None is."""
    if name is not None and name != model.name:
        raise NotFound(f"model is {name!r}; this server has {model.name!r}")


def wanted(message: AnyGenerateRequest, model: ServedModel) -> Wanted:
    """Check and translate a request. Encodes its text, which takes a while for a long one.

    Raises:
        NotFound: another model than the served one.
        InvalidRequest: with every violation at once.
        Unsupported: fields that are not served yet, all of them.
    """
    require_model(message.model if message.HasField("model") else None, model)
    found = list(_violations(message, model))
    request = Request(
        request_id=message.request_id if message.HasField("request_id") else secrets.token_hex(12),
        # After a violation any prompt will do: the rest is checked with it, and nothing is run.
        token_ids=_prompt(message, model) if not found else (0,),
        sampling=_sampling(message),
        speculation=_speculation(message.speculation),
    )
    unsupported = [*_unsupported(message)]
    try:
        model.engine.check(request)
    except InvalidRequest as invalid:
        found += invalid.violations
    except Unsupported as error:
        unsupported.append(str(error))
    if found:
        raise InvalidRequest(found)
    if unsupported:
        raise Unsupported("not served yet: " + "; ".join(unsupported))
    output = message.output
    return Wanted(
        request,
        token_ids=output.token_ids if output.HasField("token_ids") else True,
        interval=output.stream_interval if output.HasField("stream_interval") else 1,
    )


def _violations(message: AnyGenerateRequest, model: ServedModel) -> Iterator[Violation]:
    """What only the protocol can get wrong; the engine checks the rest."""
    if message.HasField("request_id") and not _REQUEST_ID.fullmatch(message.request_id):
        yield Violation("request_id", f"is {message.request_id[:40]!r}; expected 1 to 128 of A-Z a-z 0-9 . _ : -")
    match message.WhichOneof("input"):
        case None:
            yield Violation("input", "is missing; expected prompt or token_ids")
        case "prompt" if model.codec is None:
            yield Violation("prompt", "is text, and the model has no tokenizer; send token_ids")
    if message.stopping.stop and model.codec is None:
        yield Violation("stopping.stop", "is text, and the model has no tokenizer; use stop_token_ids")
    if message.sampling.HasField("n") and message.sampling.n < 1:
        yield Violation("sampling.n", "is 0; expected 1 or more")
    if message.output.HasField("stream_interval") and message.output.stream_interval < 1:
        yield Violation("output.stream_interval", "is 0; expected 1 or more")
    yield from _unknown_enums(message.speculation)


def _unknown_enums(asked: pb.SpeculationOptions) -> Iterator[Violation]:
    """Numbers that a newer client may know: proto3 lets them through."""
    if asked.mode and asked.mode not in _MODES:
        yield Violation("speculation.mode", f"is {asked.mode}, which this server does not know")
    if asked.verification and asked.verification not in _VERIFICATIONS:
        yield Violation("speculation.verification", f"is {asked.verification}, which this server does not know")


def _unsupported(message: AnyGenerateRequest) -> Iterator[str]:
    """Fields whose feature comes later, if they ask for more than their default."""
    sampling, stopping, output = message.sampling, message.stopping, message.output
    asked = {
        "messages": message.HasField("messages"),
        "sampling.repetition_penalty": sampling.HasField("repetition_penalty") and sampling.repetition_penalty != 1.0,
        "sampling.presence_penalty": sampling.presence_penalty != 0.0,
        "sampling.frequency_penalty": sampling.frequency_penalty != 0.0,
        "sampling.n": sampling.n > 1,
        "sampling.logit_bias": bool(sampling.logit_bias),
        "stopping.min_tokens": stopping.min_tokens > 0,
        "output.logprobs": output.logprobs,
        "output.top_logprobs": output.top_logprobs > 0,
        "output.prompt_logprobs": output.prompt_logprobs,
        "guided": message.HasField("guided"),
        "priority": message.priority != 0,
    }
    return (field for field, used in asked.items() if used)


def _prompt(message: AnyGenerateRequest, model: ServedModel) -> tuple[int, ...]:
    if message.HasField("token_ids"):
        return tuple(message.token_ids.ids)
    if message.HasField("messages"):
        return (0,)  # refused as unsupported, once everything else is checked
    assert model.codec is not None, "a violation before this"
    return model.codec.encode(message.prompt)


def _sampling(message: AnyGenerateRequest) -> SamplingParams:
    sampling, stopping = message.sampling, message.stopping
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed if sampling.HasField("seed") else None,
        max_tokens=stopping.max_tokens if stopping.HasField("max_tokens") else None,
        stop=tuple(stopping.stop),
        stop_token_ids=tuple(stopping.stop_token_ids),
        ignore_eos=stopping.ignore_eos,
    )


def _speculation(asked: pb.SpeculationOptions) -> SpeculationParams:
    return SpeculationParams(
        mode=_MODES.get(asked.mode),
        num_draft_tokens=asked.num_draft_tokens if asked.HasField("num_draft_tokens") else None,
        proposer=asked.proposer if asked.HasField("proposer") else None,
        verification=_VERIFICATIONS.get(asked.verification),
    )


# ------------------------------------------------------------------------------------------------------------ out


def stream_responses(chunk: Chunk, asked: Wanted, *, first: bool) -> Iterator[pb.GenerateStreamResponse]:
    """A chunk's messages: its tokens and text if there are any, then the end if it is there."""
    request_id = asked.request.request_id if first else ""
    if chunk.text or (chunk.token_ids and asked.token_ids):
        delta = pb.TokenDelta(index=chunk.index, text=chunk.text)
        if asked.token_ids:
            delta.token_ids.extend(chunk.token_ids)
            delta.from_draft.extend(chunk.from_draft)
            delta.text_lengths.extend(map(len, chunk.texts))
        yield pb.GenerateStreamResponse(request_id=request_id, delta=delta)
        request_id = ""
    if chunk.end is not None:
        yield pb.GenerateStreamResponse(request_id=request_id, finished=finished(chunk.index, chunk.end))


def response(chunks: Iterable[Chunk], asked: Wanted, model: ServedModel) -> pb.GenerateResponse:
    """Every output, each whole, in one message."""
    outputs = [_output(chunk, asked) for chunk in chunks]
    return pb.GenerateResponse(request_id=asked.request.request_id, model=model.name, outputs=outputs)


def _output(chunk: Chunk, asked: Wanted) -> pb.Output:
    assert chunk.end is not None, "half an output"
    output = pb.Output(index=chunk.index, text=chunk.text, finished=finished(chunk.index, chunk.end))
    if asked.token_ids:
        output.token_ids.extend(chunk.token_ids)
        output.from_draft.extend(chunk.from_draft)
        output.text_lengths.extend(map(len, chunk.texts))
    return output


def finished(index: int, end: End) -> pb.Finished:
    """The terminal message of one output."""
    result = end.finished
    message = pb.Finished(
        index=index,
        finish_reason=_FINISH_REASONS[result.reason],
        usage=_usage(result),
        speculation_stats=_stats(result.stats),
        timing=_timing(end.timeline),
        seed=result.seed,
        speculation=speculation_settings(result.speculation),
    )
    _set_matched_stop(message, result, end.stop_string)
    return message


def _usage(result: Finished) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=result.prompt_tokens,
        completion_tokens=result.completion_tokens,
        cached_prompt_tokens=result.cached_prompt_tokens,
    )


def _set_matched_stop(message: pb.Finished, result: Finished, stop_string: str | None) -> None:
    if stop_string is not None:
        message.stop_string = stop_string
    elif result.stop_token_id is not None:
        message.stop_token_id = result.stop_token_id


def _timing(timeline: Timeline) -> pb.Timing:
    arrived, started, first, ended = timeline.arrived, timeline.started, timeline.first_token, timeline.ended
    assert started is not None, "only what started has an End"
    assert ended is not None, "an End without a time"
    return pb.Timing(
        queue_seconds=started - arrived,
        time_to_first_token_seconds=None if first is None else first - arrived,
        total_seconds=ended - arrived,
    )


def _stats(stats: SpeculationStats) -> pb.SpeculationStats:
    return pb.SpeculationStats(
        rounds=stats.rounds,
        drafted=stats.drafted,
        accepted=stats.accepted,
        accepted_per_position=stats.accepted_per_position,
        acceptance_length=stats.acceptance_length if stats.rounds else 0.0,
    )


def speculation_settings(settings: Speculation) -> pb.SpeculationOptions:
    """Effective settings, every field set."""
    return pb.SpeculationOptions(
        mode=next(number for number, mode in _MODES.items() if mode is settings.mode),
        num_draft_tokens=settings.num_draft_tokens,
        proposer=settings.proposer,
        verification=next(number for number, rule in _VERIFICATIONS.items() if rule is settings.verification),
    )


def model_info(model: ServedModel) -> control_pb.GetModelInfoResponse:
    """The model, its limits, and what a request gets that asks for nothing."""
    engine, config = model.engine, model.engine.config
    return control_pb.GetModelInfoResponse(
        model=model.name,
        draft_model=model.draft_name or "",
        device=model.device,
        dtype=config.dtype,
        vocab_size=engine.vocab_size,
        max_model_len=engine.max_model_len,
        eos_token_ids=sorted(engine.eos_token_ids),
        has_tokenizer=model.codec is not None,
        proposers=sorted(engine.proposer_names, key=lambda name: (name != engine.default_proposer, name)),
        speculation=speculation_settings(
            Speculation(
                mode=config.speculation,
                num_draft_tokens=config.num_draft_tokens,
                proposer=engine.default_proposer,
                verification=config.verification,
            )
        ),
        max_batch_size=config.max_batch_size,
        max_batch_tokens=config.max_batch_tokens,
    )
