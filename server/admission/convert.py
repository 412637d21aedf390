"""Conversion of messages to engine types. All violations are raised in one error. Knows no network and no time.

Only this file and `answers.py`, which converts back, use both protocol and engine types.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from engine.config import Bounds
from engine.errors import ContextExcess, InvalidRequest, Unsupported, Violation, shown
from engine.params import MAX_SEED, Guided, SamplingParams, SpeculationParams, Verification
from engine.request.validation import most_prompt_tokens, prompt_too_long
from engine.text.stops import NO_ASIDES
from engine.types import Request
from pilotfish.v1 import generation_pb2 as pb
from server.admission.conversation import answer_of, text_of_conversation
from server.admission.resume import MAX_INTERRUPTIONS, MODES, VERIFICATIONS, emitted_outputs, received_outputs
from server.errors import NotFound
from server.formats.structure import Answer, structure_of
from server.model import ServedModel
from server.streams.stream import ReceivedOutput, SendOptions

Values = TypeVar("Values", bound=Sized)

MAX_PRIORITY = 100
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request as an engine type, and the options of its output stream."""

    request: Request
    request_id: str  # the id that the caller uses
    token_ids: bool
    prompt_token_ids: bool
    sending: SendOptions
    priority: int  # higher goes first
    model: str  # the name of the adapter, if it has one, else of the model
    fingerprint: str  # of both together
    answer: Answer | None = None  # of a conversation: what its structure was made of

    @property
    def starts_in_reasoning(self) -> bool:
        return self.answer is not None and self.answer.starts_in_reasoning


def require_model(name: str | None, model: ServedModel) -> None:
    """Raise NotFound unless `name` is the served model, one of its adapters, or None."""
    if name is not None and name != model.name and name not in model.engine.adapters:
        known = ", ".join(map(repr, [model.name, *sorted(model.engine.adapters)]))
        raise NotFound(f"model is {shown(name)}; this server has {known}")


def adapter_of(message: pb.GenerateRequest, model: ServedModel, found: list[Violation]) -> str | None:
    """Return the adapter that a request names, also as its model; None for the model alone. Raises NotFound."""
    name = message.adapter if message.HasField("adapter") else None
    if name is not None and name not in model.engine.adapters:
        known = ", ".join(map(repr, sorted(model.engine.adapters))) or "none"
        raise NotFound(f"adapter is {shown(name)}; this server has {known}")
    of_model = message.model if message.HasField("model") and message.model != model.name else None
    if None not in (name, of_model) and name != of_model:
        found.append(Violation("adapter", f"is {shown(name)}, and model is {shown(of_model)}; expected the same"))
    return name or of_model


def text_of(message: pb.GenerateRequest, model: ServedModel, found: list[Violation]) -> str | None:
    """Return the text that has to be encoded: the prompt, or the conversation as the chat template writes it.

    None if there is none, or if it cannot be used; violations of its length and of the template are added to `found`.
    Raises NotFound if the message names another model.
    """
    require_model(message.model if message.HasField("model") else None, model)
    field = message.WhichOneof("input")
    if model.codec is None or field not in ("prompt", "messages") or (field == "messages" and model.chat is None):
        return None
    try:
        is_chat = field == "messages"
        text = text_of_conversation(message.messages, model) if is_chat else message.prompt
    except InvalidRequest as invalid:
        found += invalid.violations
        return None
    most = most_prompt_tokens(model.engine.config, model.engine.max_model_len)
    try:
        model.codec.require_room(field, text, most)
    except InvalidRequest as invalid:
        excess = ContextExcess(model.engine.max_model_len, model.codec.least_tokens(text), most, is_bound=True)
        found += (replace(violation, excess=excess) for violation in invalid.violations)
        return None
    return text


def prediction_of(message: pb.GenerateRequest, model: ServedModel, found: list[Violation]) -> str | None:
    """Return the text of the prediction, which has to be encoded; None if there is none, or if it cannot be used."""
    if message.prediction.WhichOneof("content") != "text" or model.codec is None:
        return None
    try:
        model.codec.require_room("prediction", message.prediction.text, model.engine.max_model_len)
    except InvalidRequest as invalid:
        found += invalid.violations
        return None
    return message.prediction.text


def wanted(
    message: pb.GenerateRequest,
    model: ServedModel,
    text: str | None = None,
    prompt: tuple[int, ...] | None = None,
    prediction: tuple[int, ...] | None = None,
    known: Iterable[Violation] = (),
) -> Wanted:
    """Check and convert a request. This encodes no text and compiles no structure.

    `text` is that of the prompt, which was encoded as `prompt`; `prediction` are the tokens of a text, too. With
    violations that are `known` already, which the error lists too, the message may lack an input.

    Raises:
        NotFound: the adapter that the request names is not loaded.
        InvalidRequest: the request is invalid; the error lists all violations.
        Unsupported: this server or model lacks something that the request needs; the error lists all of it.
        ResumeRefused: the request continues a stream of another model.
    """
    found = list(known)
    found += _violations(message, model, needs_input=not found)
    adapter = adapter_of(message, model, found)
    fingerprint = model.fingerprint_with(adapter)
    received = received_outputs(message, model, fingerprint, found)
    token_ids = _prompt(message, model, found) if prompt is None else prompt
    request = Request(
        request_id=message.request_id if message.HasField("request_id") else secrets.token_hex(12),
        token_ids=token_ids,
        sampling=_sampling(message, model, found, len(token_ids)),
        speculation=_speculation(message, model, found),
        cache_salt=message.cache_salt if message.HasField("cache_salt") else None,
        emitted=emitted_outputs(received),
        prediction=_predicted(message, model, found) if prediction is None else prediction,
        adapter=adapter,
    )
    unsupported, answer = list[str](), None
    if message.HasField("guided") and model.compile_grammar is None:
        unsupported.append("guided asks for a structure of text; this model is served without")
    try:
        request, answer = _with_answer(request, message, model, text)
    except InvalidRequest as invalid:
        found += invalid.violations
    except Unsupported as error:
        unsupported.append(str(error))
    try:
        model.engine.check(request)
    except InvalidRequest as invalid:
        # The engine has two counts of likeliest tokens, for output and prompt; the protocol has one.
        names = {"output.prompt_logprobs": "output.top_logprobs"}
        found += (replace(v, field=names.get(v.field, v.field)) for v in invalid.violations)
    except Unsupported as error:
        unsupported.append(str(error))
    if found:
        raise InvalidRequest(dict.fromkeys(found))
    if unsupported:
        raise Unsupported("; ".join(unsupported))
    output = message.output
    return Wanted(
        request,
        request_id=request.request_id,
        token_ids=output.token_ids if output.HasField("token_ids") else True,
        prompt_token_ids=output.prompt_token_ids,
        model=adapter or model.name,
        fingerprint=fingerprint,
        answer=answer,
        sending=_sending(message, model, received, answer),
        priority=message.priority,
    )


def _sending(
    message: pb.GenerateRequest, model: ServedModel, received: tuple[ReceivedOutput, ...], answer: Answer | None
) -> SendOptions:
    output, asides = message.output, NO_ASIDES
    shows = message.WhichOneof("input") == "messages" and bool(
        model.format.special
    )  # they may mark calls and reasoning
    if answer is not None and message.stopping.stop_in_answer:
        asides = model.format.asides(answer.tools, starts_in_reasoning=answer.starts_in_reasoning)
    return SendOptions(
        asides=asides,
        skip_special_tokens=output.skip_special_tokens if output.HasField("skip_special_tokens") else not shows,
        interval=output.stream_interval if output.HasField("stream_interval") else 1,
        digests=output.digests,
        received=received,
        interruptions=min(message.resume.interruptions + 1, MAX_INTERRUPTIONS) if received else 0,
    )


def _violations(message: pb.GenerateRequest, model: ServedModel, *, needs_input: bool) -> Iterator[Violation]:
    """Yield violations in fields that the engine does not have; the engine checks the others."""
    if message.HasField("request_id") and not _REQUEST_ID.fullmatch(message.request_id):
        yield Violation("request_id", f"is {shown(message.request_id)}; expected 1 to 128 of A-Z a-z 0-9 . _ : -")
    match message.WhichOneof("input"):
        case None if needs_input:
            yield Violation("input", "is missing; expected prompt, token_ids or messages")
        case "prompt" if model.codec is None:
            yield Violation("prompt", "is text, and the model has no tokenizer; send token_ids")
        case "messages" if model.chat is None or model.codec is None:
            yield Violation("messages", "is a conversation, and the model has no chat template; send prompt")
    if message.stopping.stop and model.codec is None:
        yield Violation("stopping.stop", "is text, and the model has no tokenizer; use stop_token_ids")
    if message.output.HasField("stream_interval") and message.output.stream_interval < 1:
        yield Violation("output.stream_interval", "is 0; expected 1 or more")
    if message.output.top_logprobs and not (message.output.logprobs or message.output.prompt_logprobs):
        problem = f"is {message.output.top_logprobs}, and neither logprobs nor prompt_logprobs are asked for"
        yield Violation("output.top_logprobs", problem)
    if not -MAX_PRIORITY <= message.priority <= MAX_PRIORITY:
        yield Violation("priority", f"is {message.priority}; expected {-MAX_PRIORITY} to {MAX_PRIORITY}")


def _prompt(message: pb.GenerateRequest, model: ServedModel, found: list[Violation]) -> tuple[int, ...]:
    """Return the tokens that the caller sent, or a placeholder if there are none or too many.

    With a placeholder the rest of the request is checked, and then it is refused.
    """
    nothing, ids = (0,), message.token_ids.ids
    if not message.HasField("token_ids"):
        return nothing
    too_long = list(prompt_too_long(len(ids), model.engine.config, model.engine.max_model_len))
    found += too_long
    return nothing if too_long else tuple(ids)


def _predicted(message: pb.GenerateRequest, model: ServedModel, found: list[Violation]) -> tuple[int, ...]:
    kind = message.prediction.WhichOneof("content")
    if message.HasField("prediction") and kind is None:
        found.append(Violation("prediction", "is empty; expected text or token_ids"))
    if kind == "text" and model.codec is None:
        found.append(Violation("prediction.text", "is text, and the model has no tokenizer; send token_ids"))
    ids = message.prediction.token_ids.ids
    return tuple(_bounded(ids, "prediction.token_ids", "tokens", model.engine.max_model_len, found))


def _with_answer(
    request: Request, message: pb.GenerateRequest, model: ServedModel, text: str | None
) -> tuple[Request, Answer | None]:
    if message.WhichOneof("input") != "messages":
        return request, None
    answer = answer_of(message, request.sampling.guided, model, text)
    try:
        guided = structure_of(answer, model.format)
    except (
        ValueError,
        RecursionError,
    ) as error:  # a strict tool's schema, sound in JSON, that calls are not written by
        raise InvalidRequest.of("messages.tools", f"cannot be called as this model writes calls: {error}") from error
    size = 0 if guided is None or guided == answer.content else len((guided.grammar or "").encode())
    most = model.engine.config.max_structure_bytes
    if size > most:
        field = "messages.tools" if answer.tools else "guided"
        raise InvalidRequest.of(field, f"make a structure of {size} bytes; the limit is {most}")
    return with_structure(request, guided), answer


def with_structure(request: Request, guided: Guided | None) -> Request:
    """Return the same request with another structure."""
    return replace(request, sampling=replace(request.sampling, guided=guided))


def _bounded(values: Values, field: str, noun: str, most: int, found: list[Violation]) -> Values | tuple[()]:
    """Return a repeated field or a map; nothing, and one more violation, if it has more entries than `most`.

    A message can have millions of entries. They are counted before any of them is copied or looked at.
    """
    if len(values) <= most:
        return values
    found.append(Violation(field, f"has {len(values)} {noun}; the limit is {most}"))
    return ()


def _max_tokens(stopping: pb.StoppingParams, model: ServedModel, prompt_tokens: int) -> int | None:
    """Return the most tokens to generate; with `fit_context` at most as many as there is room for."""
    asked = stopping.max_tokens if stopping.HasField("max_tokens") else None
    if not stopping.fit_context or asked == 0:
        return asked
    room = max(1, model.engine.max_model_len - prompt_tokens)
    return min(limit for limit in (asked, room, model.engine.config.max_output_tokens) if limit is not None)


def _sampling(
    message: pb.GenerateRequest, model: ServedModel, found: list[Violation], prompt_tokens: int
) -> SamplingParams:
    sampling, stopping, output = message.sampling, message.stopping, message.output
    bounds, vocab = model.engine.config, model.engine.vocab_size
    given = {about.name: value for part in (sampling, stopping) for about, value in part.ListFields()}
    lists: dict[str, tuple[str, Any, str, int]] = {
        "allowed_token_ids": ("sampling", sampling.allowed_token_ids.ids, "ids", vocab),
        "banned_token_ids": ("sampling", sampling.banned_token_ids, "ids", vocab),
        "stop": ("stopping", stopping.stop, "strings", bounds.max_stops),
        "stop_token_ids": ("stopping", stopping.stop_token_ids, "ids", bounds.max_stops),
    }
    for name, (group, values, noun, most) in lists.items():
        if name in given:
            kept = given[name] = tuple(_bounded(values, f"{group}.{name}", noun, most, found))
            if len(kept) < len(values):  # refused, so as good as absent
                del given[name]
    own: dict[str, Any] = {name: given[name] for name in given.keys() & SamplingParams.__dataclass_fields__.keys()}
    own |= {
        "logit_bias": dict(
            _bounded(sampling.logit_bias, "sampling.logit_bias", "tokens", bounds.max_logit_bias, found)
        ),
        "guided": _guided(message.guided, bounds, found) if message.HasField("guided") else None,
        "seed": given.get("seed", secrets.randbelow(MAX_SEED + 1)),
        "max_tokens": _max_tokens(stopping, model, prompt_tokens),
        "logprobs": output.top_logprobs if output.logprobs else None,
        "prompt_logprobs": output.top_logprobs if output.prompt_logprobs else None,
    }
    return SamplingParams(**own)


def _guided(asked: pb.GuidedDecoding, bounds: Bounds, found: list[Violation]) -> Guided | None:
    kind = asked.WhichOneof("constraint")
    if kind == "choice" and len(asked.choice.choices) > bounds.max_choices:
        problem = f"has {len(asked.choice.choices)} texts; expected 1 to {bounds.max_choices}"
        found.append(Violation("guided.choice", problem))
        return None
    if kind == "choice":
        return Guided(choice=tuple(asked.choice.choices))
    return Guided() if kind is None else Guided(**{kind: getattr(asked, kind)})  # the engine reports what is missing


def _speculation(message: pb.GenerateRequest, model: ServedModel, found: list[Violation]) -> SpeculationParams:
    """Convert the settings. A continued request may name a proposer of another server, on which no token depends."""
    for name, known in (("mode", MODES), ("verification", VERIFICATIONS)):
        number = getattr(message.speculation, name)  # proto3 accepts unknown ones; a newer client may send them
        if number and number not in known:
            found.append(Violation(f"speculation.{name}", f"is {number}, which this server does not know"))
    asked, verification = message.speculation, VERIFICATIONS.get(message.speculation.verification)
    is_of_another = message.HasField("resume") and asked.proposer not in model.engine.proposer_names
    has_proposer = asked.HasField("proposer") and not (is_of_another and verification is Verification.COUPLED)
    return SpeculationParams(
        mode=MODES.get(asked.mode),
        num_draft_tokens=asked.num_draft_tokens if asked.HasField("num_draft_tokens") else None,
        proposer=asked.proposer if has_proposer else None,
        verification=verification,
    )
