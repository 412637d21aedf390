"""Conversion of HTTP bodies to messages of the protocol, which `server.admission` checks. Knows no engine.

If some fields of a body are invalid by themselves, the other fields are still checked, so that one error lists all
violations.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import InvalidRequest, Violation
from pilotfish.v1 import generation_pb2 as pb
from server.admission.resume import parse_event_id
from server.http.types import ChatBody, CompletionBody, GenerateBody, GenerationFields, OpenAiBody

OPENAI_TEMPERATURE = 1.0  # OpenAI's default; the default of `/generate` and gRPC is 0


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """A body as a message, and the violations that are known already."""

    message: pb.GenerateRequest
    wrong: tuple[Violation, ...] = ()
    timeout: float | None = None  # seconds
    resume: pb.Resume | None = None  # what the caller received of an interrupted stream


def asked(body: GenerationFields) -> ParsedBody:
    """Convert a body whose fields are valid by themselves."""
    return ParsedBody(_message(body), tuple(body.conflicts()), body.timeout)


def rest(kind: type[GenerationFields], found: Any, faulty: Iterable[str]) -> ParsedBody | None:
    """Convert a body without its `faulty` fields; the message may have no input. None if the body is no JSON object."""
    if not isinstance(found, dict):
        return None
    kept = {name: value for name, value in found.items() if name not in faulty}
    field, nothing = kind.no_input
    has_input = kept.get(field) is not None
    body = kind.model_validate(kept if has_input else kept | {field: nothing})
    read = asked(body)
    if not has_input:
        read.message.ClearField("prompt")
        read.message.ClearField("messages")
    return read


def continued(read: ParsedBody, event_id: str, max_n: int) -> ParsedBody:
    """Make the request continue the stream after the event with this id; an invalid id is one more violation.

    Outputs that were finished are computed again, too, because the usage at the end includes them.
    """
    try:
        seed, resume = parse_event_id(event_id, max_n)
    except InvalidRequest as invalid:
        return replace(read, wrong=(*read.wrong, *invalid.violations))
    message = read.message
    if message.sampling.HasField("seed") and message.sampling.seed != seed:
        wrong = Violation("seed", f"is {message.sampling.seed}; the stream that Last-Event-ID names has {seed}")
        return replace(read, wrong=(*read.wrong, wrong))
    message.sampling.seed = seed
    message.resume.CopyFrom(resume)
    for output in message.resume.outputs:
        output.tail, output.recount = output.tail or output.finished, True
    return replace(read, resume=resume)


def _message(body: GenerationFields) -> pb.GenerateRequest:
    match body:
        case GenerateBody():
            return generate_request(body)
        case CompletionBody():
            return completion_request(body)
        case ChatBody():
            return chat_request(body)
    raise AssertionError(f"no route takes a {type(body).__name__}")


def generate_request(body: GenerateBody) -> pb.GenerateRequest:
    """Convert a body of `POST /generate`. `k_draft` is the number of drafts in every round; 0 turns speculation off."""
    request = _common(body, body.max_new_tokens)
    request.prompt = body.prompt
    if body.k_draft is not None:
        request.speculation.num_draft_tokens = body.k_draft
        request.speculation.mode = pb.SPECULATION_MODE_FIXED if body.k_draft else pb.SPECULATION_MODE_OFF
    return request


def completion_request(body: CompletionBody) -> pb.GenerateRequest:
    """Convert a body of `POST /v1/completions`."""
    request = _common(body, body.max_tokens)
    _ask_as_openai(request, body)
    if isinstance(body.prompt, str):
        request.prompt = body.prompt
    else:
        request.token_ids.CopyFrom(pb.TokenIds(ids=body.prompt))
    if body.logprobs is not None:
        request.output.logprobs, request.output.top_logprobs = True, body.logprobs
    return request


def chat_request(body: ChatBody) -> pb.GenerateRequest:
    """Convert a body of `POST /v1/chat/completions`."""
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    request = _common(body, limit)
    _ask_as_openai(request, body)
    turns = [pb.ChatMessage(role=turn.role, content=turn.text) for turn in body.messages]
    request.messages.CopyFrom(pb.ChatMessages(messages=turns))
    request.output.logprobs = bool(body.logprobs)
    request.output.top_logprobs = body.top_logprobs or 0
    return request


def _ask_as_openai(request: pb.GenerateRequest, body: OpenAiBody) -> None:
    if body.temperature is None:
        request.sampling.temperature = OPENAI_TEMPERATURE
    if body.n is not None:
        request.sampling.n = body.n
    if body.response_format is None or body.response_format.type == "text":
        return
    wanted = body.response_format.json_schema
    schema = {"type": "object"} if wanted is None else wanted.schema_
    request.guided.CopyFrom(pb.GuidedDecoding(json_schema=json.dumps(schema)))


def _common(body: GenerationFields, max_tokens: int | None) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        model=body.model,
        sampling=_sampling(body),
        stopping=pb.StoppingParams(
            max_tokens=max_tokens,
            min_tokens=body.min_tokens,
            stop=body.stop or (),
            stop_token_ids=body.stop_token_ids or (),
            ignore_eos=body.ignore_eos,
        ),
        speculation=_speculation(body),
        guided=_guided(body),
        cache_salt=body.cache_salt,
        priority=body.priority,
        output=pb.OutputOptions(digests=body.event_ids),
    )


def _sampling(body: GenerationFields) -> pb.SamplingParams:
    allowed = body.allowed_token_ids
    return pb.SamplingParams(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=body.logit_bias or {},
        allowed_token_ids=None if allowed is None else pb.TokenIds(ids=allowed),
        banned_token_ids=body.banned_token_ids or (),
        seed=body.seed,
    )


def _speculation(body: GenerationFields) -> pb.SpeculationOptions:
    asked = body.speculation
    if asked is None:
        return pb.SpeculationOptions()
    mode, rule = asked.mode, asked.verification
    return pb.SpeculationOptions(
        mode=pb.SpeculationMode.Value(f"SPECULATION_MODE_{mode.upper()}") if mode else None,
        num_draft_tokens=asked.num_draft_tokens,
        proposer=asked.proposer,
        verification=pb.Verification.Value(f"VERIFICATION_{rule.upper()}") if rule else None,
    )


def _guided(body: GenerationFields) -> pb.GuidedDecoding | None:
    schema = body.guided_json
    if schema is not None:
        return pb.GuidedDecoding(json_schema=schema if isinstance(schema, str) else json.dumps(schema))
    if body.guided_regex is not None:
        return pb.GuidedDecoding(regex=body.guided_regex)
    if body.guided_grammar is not None:
        return pb.GuidedDecoding(grammar=body.guided_grammar)
    choice = body.guided_choice
    return None if choice is None else pb.GuidedDecoding(choice=pb.Choice(choices=choice))
