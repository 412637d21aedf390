"""Converts gRPC messages to requests, and events to messages. Independent of network and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, MutableSequence, Sized
from collections.abc import Sequence as Seq
from itertools import chain
from typing import Any, Literal, TypeVar, cast

from pilotfish.engine.config import Bounds
from pilotfish.engine.errors import Violation
from pilotfish.engine.params import (
    Guided,
    OutputOptions,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    SpeculationSettings,
    Verification,
)
from pilotfish.engine.request.validation import prompt_too_long
from pilotfish.engine.types import FinishedOutput, Logprob, ReceivedOutput, Request, Resume, TokenEvent
from pilotfish.server.admission.check import NO_TOKENS, Prompt
from pilotfish.server.chat import MAX_MESSAGES, MAX_TOOLS, ChatMessage, Conversation, ToolCall
from pilotfish.server.formats.base import ANY_OBJECT, Tool
from pilotfish.server.model import ServedModel
from pilotfish.server.streams.stream import NOTHING_RECEIVED, OutputStream
from pilotfish.server.turns import max_len_of
from pilotfish.v1 import control_pb2 as control_pb
from pilotfish.v1 import generation_pb2 as pb

Values = TypeVar("Values", bound=Sized)

MAX_AT_ONCE = 100  # tokens whose log-probabilities are converted before other tasks run; each has many candidates
_MODES = {pb.SpeculationMode.Value(f"SPECULATION_MODE_{mode.name}"): mode for mode in SpeculationMode}
_RULES = {pb.Verification.Value(f"VERIFICATION_{rule.name}"): rule for rule in Verification}
_CHOICES = {pb.TOOL_CHOICE_MODE_NONE: "none", pb.TOOL_CHOICE_MODE_REQUIRED: "required"}  # all others: "auto"


# ------------------------------------------------------------------------------------------ from message to request


def request_of(
    message: pb.GenerateRequest, model: ServedModel, found: list[Violation]
) -> tuple[Request, Prompt, str | None]:
    """Return the request of a message, and its prompt and prediction if they are text.

    A message can have millions of entries: they are counted before any is copied. Violations are added to `found`, and
    the rest of the request is still checked.
    """
    token_ids, prompt = _input(message, model, found)
    prediction, predicted = _prediction(message, model, found)
    request = Request(
        request_id=message.request_id,
        model=_given(message, "model"),
        token_ids=token_ids,
        sampling=_sampling(message, model, found),
        speculation=_speculation(message.speculation, found),
        output=_output(message, found),
        priority=message.priority,
        cache_salt=_given(message, "cache_salt"),
        resume=_resume(message, model, found) if message.HasField("resume") else None,
        prediction=predicted,
        adapter=_given(message, "adapter"),
    )
    if message.HasField("request_id") and not message.request_id:
        found.append(Violation("request_id", "is ''; expected 1 to 128 of A-Z a-z 0-9 . _ : -"))
    return request, prompt, prediction


def num_outputs(message: pb.GenerateRequest) -> int:
    """Return the number of requested outputs."""
    return message.sampling.n if message.sampling.HasField("n") else 1


def _given(message: Any, name: str) -> Any:
    """Return an optional field; None if it is unset."""
    return getattr(message, name) if message.HasField(name) else None


def _bounded(values: Values, field: str, noun: str, most: int, found: list[Violation]) -> Values | tuple[()]:
    """Return a repeated field or a map. If it has more entries than `most`, add a violation and return nothing."""
    if len(values) <= most:
        return values
    found.append(Violation(field, f"has {len(values)} {noun}; the limit is {most}"))
    return ()


def _input(message: pb.GenerateRequest, model: ServedModel, found: list[Violation]) -> tuple[tuple[int, ...], Prompt]:
    match message.WhichOneof("input"):
        case "prompt":
            return (), message.prompt
        case "messages":
            conversation = _conversation(message.messages, found)
            return ((), conversation) if conversation is not None else (NO_TOKENS, None)
        case "token_ids":
            ids = message.token_ids.ids
            too_long = list(prompt_too_long(len(ids), model.engine.config, model.engine.facts.limits.max_model_len))
            found += too_long
            return NO_TOKENS if too_long else tuple(ids), None
    found.append(Violation("input", "is missing; expected prompt, token_ids or messages"))
    return NO_TOKENS, None


def _prediction(
    message: pb.GenerateRequest, model: ServedModel, found: list[Violation]
) -> tuple[str | None, tuple[int, ...]]:
    kind = message.prediction.WhichOneof("content")
    if message.HasField("prediction") and kind is None:
        found.append(Violation("prediction", "is empty; expected text or token_ids"))
    ids = message.prediction.token_ids.ids
    tokens = tuple(_bounded(ids, "prediction.token_ids", "tokens", model.engine.facts.limits.max_model_len, found))
    return message.prediction.text if kind == "text" else None, tokens


def _conversation(asked: pb.ChatMessages, found: list[Violation]) -> Conversation | None:
    if len(asked.messages) > MAX_MESSAGES:
        problem = f"has {len(asked.messages)} messages; expected 1 to {MAX_MESSAGES}"
        found.append(Violation("messages", problem))
        return None
    mode = asked.tool_choice.mode
    if mode not in pb.ToolChoiceMode.values():  # proto3 accepts unknown ones; a newer client may send them
        found.append(Violation("messages.tool_choice.mode", f"is {mode}, which is not supported"))
    return Conversation(
        messages=tuple(map(_turn, asked.messages)),
        tools=tuple(
            Tool(tool.name, tool.description, tool.parameters or ANY_OBJECT, tool.strict)
            for tool in _bounded(asked.tools, "messages.tools", "functions", MAX_TOOLS, found)
        ),
        tool_choice=cast("Literal['auto', 'none', 'required']", _CHOICES.get(mode, "auto")),
        tool_name=_given(asked.tool_choice, "name"),
        parallel_tool_calls=asked.parallel_tool_calls or not asked.HasField("parallel_tool_calls"),
        template_arguments=asked.template_arguments or "{}",
        add_generation_prompt=_given(asked, "add_generation_prompt"),
        continue_final_message=asked.continue_final_message,
        thinking_budget=_given(asked, "thinking_budget"),
    )


def _turn(turn: pb.ChatMessage) -> ChatMessage:
    return ChatMessage(
        role=turn.role,
        content=turn.content,
        name=_given(turn, "name"),
        tool_calls=tuple(ToolCall(call.id, call.name, call.arguments) for call in turn.tool_calls),
        tool_call_id=_given(turn, "tool_call_id"),
        reasoning=_given(turn, "reasoning"),
    )


def _sampling(message: pb.GenerateRequest, model: ServedModel, found: list[Violation]) -> SamplingParams:
    sampling, stopping, output = message.sampling, message.stopping, message.output
    bounds, vocab = model.engine.config, model.engine.facts.limits.vocab_size
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
            if len(kept) < len(values):  # already a violation; check the default instead
                del given[name]
    own: dict[str, Any] = {name: given[name] for name in given.keys() & SamplingParams.__dataclass_fields__.keys()}
    biases = _bounded(sampling.logit_bias, "sampling.logit_bias", "tokens", bounds.max_logit_bias, found)
    own |= {
        "logit_bias": dict(biases),
        "guided": _guided(message.guided, bounds, found) if message.HasField("guided") else None,
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
    return Guided() if kind is None else Guided(**{kind: getattr(asked, kind)})  # the check reports what is missing


def _output(message: pb.GenerateRequest, found: list[Violation]) -> OutputOptions:
    output = message.output
    if output.top_logprobs and not (output.logprobs or output.prompt_logprobs):
        problem = f"is {output.top_logprobs}; expected logprobs or prompt_logprobs with it"
        found.append(Violation("output.top_logprobs", problem))
    return OutputOptions(
        token_ids=output.token_ids or not output.HasField("token_ids"),
        prompt_token_ids=output.prompt_token_ids,
        stream_interval=output.stream_interval if output.HasField("stream_interval") else 1,
        digests=output.digests,
        skip_special_tokens=_given(output, "skip_special_tokens"),
        stop_in_answer=message.stopping.stop_in_answer,
    )


def _speculation(asked: pb.SpeculationOptions, found: list[Violation]) -> SpeculationParams:
    for name, number, known in (("mode", asked.mode, _MODES), ("verification", asked.verification, _RULES)):
        if number and number not in known:  # proto3 accepts unknown ones; a newer client may send them
            found.append(Violation(f"speculation.{name}", f"is {number}, which is not supported"))
    return SpeculationParams(
        mode=_MODES.get(asked.mode),
        num_draft_tokens=_given(asked, "num_draft_tokens"),
        proposer=_given(asked, "proposer"),
        verification=_RULES.get(asked.verification),
    )


def _resume(message: pb.GenerateRequest, model: ServedModel, found: list[Violation]) -> Resume:
    """Return the received part of each output; empty if there are more outputs than the request may have."""
    asked, n = message.resume, num_outputs(message)
    outputs: dict[int, ReceivedOutput] = {}
    if n > model.engine.config.max_n:  # already a violation
        return Resume(fingerprint=asked.fingerprint)
    if len(asked.outputs) > n:
        found.append(Violation("resume.outputs", f"has {len(asked.outputs)} outputs; sampling.n is {n}"))
    else:
        for i, output in enumerate(asked.outputs):
            wrong = [
                *_received_violations(
                    f"resume.outputs[{i}]", output, n, outputs, model.engine.facts.limits.max_model_len
                )
            ]
            found += wrong
            if not wrong:
                outputs[output.index] = _received(output, model.engine.facts.limits.max_model_len)
    dense = tuple(outputs.get(index, NOTHING_RECEIVED) for index in range(n))
    return Resume(outputs=dense, fingerprint=asked.fingerprint, interruptions=asked.interruptions)


def _received_violations(
    field: str, output: pb.ReceivedOutput, n: int, others: dict[int, ReceivedOutput], most: int
) -> Iterator[Violation]:
    if len(output.token_ids) > most:
        yield Violation(f"{field}.token_ids", f"has {len(output.token_ids)} tokens; the limit is {most}")
    if output.index >= n or output.index in others:
        problem = "occurs twice" if output.index in others else f"is {output.index}; expected 0 to {n - 1}"
        yield Violation(f"{field}.index", problem)
    if output.token_ids and output.num_tokens:
        problem = f"is {output.num_tokens}, and token_ids are set; expected one of the two"
        yield Violation(f"{field}.num_tokens", problem)


def _received(output: pb.ReceivedOutput, most: int) -> ReceivedOutput:
    """Convert one output; `most`: the context's length."""
    tokens = tuple(output.token_ids)
    return ReceivedOutput(
        token_ids=tokens,
        # With a digest, received tokens are compared with it just as regenerated ones are.
        num_tokens=min(output.num_tokens or (len(tokens) if output.digest or output.recount else 0), most),
        digest=output.digest,
        tail=output.tail,
        has_ended=output.finished and not output.recount,
        recount=output.finished and output.recount,
    )


# -------------------------------------------------------------------------------------------- from events to messages


async def responses(stream: OutputStream, model: ServedModel) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
    """Yield the messages of a stream: per event its tokens, if any, then its end, if any."""
    is_first = True
    while events := await stream.read():
        for message in chain.from_iterable(_of_event(event, stream.request) for event in events):
            if is_first:
                message.request_id = stream.own_id
                message.resume_info.CopyFrom(_resume_info(stream.request, model))
                _add_prompt(message, stream)
                is_first = False
            yield message


def _of_event(event: TokenEvent, request: Request) -> Iterator[pb.GenerateStreamResponse]:
    text, has_ids = event.text, request.output.token_ids and bool(event.token_ids)
    if text or has_ids or event.logprobs or event.prompt_logprobs:
        # One call with a dictionary takes two thirds of the time of a message whose fields are set one by one.
        delta: Any = {"index": event.index, "text": text, "digest": event.digest, "text_offset": event.text_offset}
        if has_ids:
            delta |= _tokens(event)
        message = pb.GenerateStreamResponse(delta=delta)
        if event.logprobs:
            message.delta.logprobs.extend(map(_logprob, event.logprobs))
        if event.prompt_logprobs:
            message.prompt_logprobs.SetInParent()  # present also without entries
            known = (of for of in event.prompt_logprobs if of is not None)  # the first token has none
            message.prompt_logprobs.logprobs.extend(map(_logprob, known))
        yield message
    if event.finished is not None:
        yield pb.GenerateStreamResponse(finished=_finished(event.index, event.finished, request))


async def response(stream: OutputStream) -> pb.GenerateResponse:
    """Return all complete outputs in one message. Other tasks run while many log-probabilities are converted."""
    events, request = await stream.read_all(), stream.request
    found = pb.GenerateResponse(request_id=stream.own_id, model=request.model or "")
    _add_prompt(found, stream)
    for event in events:
        assert event.finished is not None, "half an output"
        end = _finished(event.index, event.finished, request)
        tokens = _tokens(event) if request.output.token_ids else {}
        output = found.outputs.add(index=event.index, text=event.text, finished=end, **tokens)
        await _add_logprobs(output.logprobs, event.logprobs)
    if events[0].prompt_logprobs:
        found.prompt_logprobs.SetInParent()  # present also without entries
        await _add_logprobs(found.prompt_logprobs.logprobs, [of for of in events[0].prompt_logprobs if of is not None])
    return found


def _resume_info(request: Request, model: ServedModel) -> pb.ResumeInfo:
    """Return what the caller needs to resume the stream of `request` on another server with this fingerprint."""
    assert request.sampling.seed is not None, "set when the request was checked"
    return pb.ResumeInfo(
        fingerprint=model.fingerprint_with(request.adapter),
        seed=request.sampling.seed,
        max_tokens=max_len_of(request, model.engine) - len(request.token_ids),
        speculation=_settings(model.engine.speculation_of(request)),
    )


def _add_prompt(message: pb.GenerateStreamResponse | pb.GenerateResponse, stream: OutputStream) -> None:
    """Add the tokens of the prompt, if requested, and whether it ends within the reasoning."""
    message.starts_in_reasoning = stream.starts_in_reasoning
    if stream.request.output.prompt_token_ids:
        message.prompt_token_ids.ids.extend(stream.request.token_ids)


async def _add_logprobs(message: MutableSequence[pb.TokenLogprob], found: Seq[Logprob]) -> None:
    for start in range(0, len(found), MAX_AT_ONCE):
        message.extend(map(_logprob, found[start : start + MAX_AT_ONCE]))
        await asyncio.sleep(0)


def _tokens(event: TokenEvent) -> dict[str, Any]:
    """Return fields of a TokenDelta or an Output."""
    return {"token_ids": event.token_ids, "from_draft": event.from_draft, "text_lengths": map(len, event.texts)}


def _logprob(of: Logprob) -> pb.TokenLogprob:
    top = [pb.Candidate(token_id=candidate.token_id, logprob=candidate.logprob) for candidate in of.top]
    return pb.TokenLogprob(logprob=of.logprob, top=top)


def _settings(settings: SpeculationSettings) -> pb.SpeculationOptions:
    """Return the effective settings with every field set."""
    return pb.SpeculationOptions(
        mode=pb.SpeculationMode.Value(f"SPECULATION_MODE_{settings.mode.name}"),
        num_draft_tokens=settings.num_draft_tokens,
        proposer=settings.proposer,
        verification=pb.Verification.Value(f"VERIFICATION_{settings.verification.name}"),
    )


def _finished(index: int, end: FinishedOutput, request: Request) -> pb.Finished:
    """Return the terminal message of one output."""
    stats, timing = end.stats, end.timing
    assert timing is not None, "the stream adds it"
    message = pb.Finished(
        index=index,
        finish_reason=pb.FinishReason.Value(f"FINISH_REASON_{end.reason.name}"),  # an ERROR ends the call with a status
        usage=pb.Usage(
            accepted_prediction_tokens=end.accepted_prediction_tokens,
            rejected_prediction_tokens=len(request.prediction) - end.accepted_prediction_tokens,
            prompt_tokens=end.prompt_tokens,
            completion_tokens=end.completion_tokens,
            cached_prompt_tokens=end.cached_prompt_tokens,
        ),
        speculation_stats=pb.SpeculationStats(
            rounds=stats.rounds,
            drafted=stats.drafted,
            accepted=stats.accepted,
            accepted_per_position=stats.accepted_per_position,
            acceptance_length=stats.acceptance_length if stats.rounds else 0.0,
            gain_ratio=end.spec_gain,
        ),
        timing=pb.Timing(
            queue_seconds=timing.queue,
            time_to_first_token_seconds=timing.first_token,
            total_seconds=timing.total,
        ),
        seed=end.seed,
        speculation=_settings(end.speculation),
        interruptions=end.interruptions,
    )
    if end.stop_string is not None:
        message.stop_string = end.stop_string
    elif end.stop_token_id is not None:
        message.stop_token_id = end.stop_token_id
    return message


def model_info(model: ServedModel, adapters: Seq[str]) -> control_pb.GetModelInfoResponse:
    """Return the model, its limits, its adapters, and the default speculation settings of a request."""
    engine, config = model.engine, model.engine.config
    return control_pb.GetModelInfoResponse(
        model=model.name,
        draft_model=model.draft_name or "",
        device=model.device,
        dtype=engine.facts.dtype,
        vocab_size=engine.facts.limits.vocab_size,
        max_model_len=engine.facts.limits.max_model_len,
        eos_token_ids=sorted(engine.facts.limits.eos_token_ids),
        has_tokenizer=model.codec is not None,
        proposers=sorted(engine.facts.proposer_names, key=lambda name: (name != engine.facts.default_proposer, name)),
        speculation=_settings(
            SpeculationSettings(
                mode=config.speculation,
                num_draft_tokens=config.num_draft_tokens,
                proposer=engine.facts.default_proposer,
                verification=config.verification,
            )
        ),
        max_batch_size=config.max_batch_size,
        max_batch_tokens=config.max_batch_tokens,
        adapters=adapters,
    )
