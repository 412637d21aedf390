"""Conversion of engine types to messages. One chunk becomes at most two messages. Knows no network and no time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, MutableSequence
from collections.abc import Sequence as Seq

from engine.params import SpeculationSettings
from engine.types import Logprob
from pilotfish.v1 import control_pb2 as control_pb
from pilotfish.v1 import generation_pb2 as pb
from server.admission.convert import Wanted
from server.admission.resume import speculation_settings
from server.model import ServedModel
from server.streams.stream import Chunk, End

MAX_AT_ONCE = 100  # tokens whose log-probabilities are converted before others have a turn; each has many candidates


def stream_responses(chunk: Chunk, asked: Wanted, *, first: bool) -> Iterator[pb.GenerateStreamResponse]:
    """Yield the messages of a chunk: its tokens if it has any, then its end if it has one."""
    request_id = asked.request_id if first else ""
    if chunk.text or chunk.logprobs or chunk.prompt_logprobs or (chunk.token_ids and asked.token_ids):
        delta = pb.TokenDelta(index=chunk.index, text=chunk.text, logprobs=map(_logprob, chunk.logprobs))
        if asked.token_ids:
            _add_tokens(delta, chunk)
        delta.digest, delta.text_offset = chunk.digest, chunk.text_offset
        known = (of for of in chunk.prompt_logprobs if of is not None)  # the engine has None for the first token
        prompt = pb.PromptLogprobs(logprobs=map(_logprob, known)) if chunk.prompt_logprobs else None
        yield pb.GenerateStreamResponse(request_id=request_id, delta=delta, prompt_logprobs=prompt)
        request_id = ""
    if chunk.end is not None:
        yield pb.GenerateStreamResponse(
            request_id=request_id, finished=finished(chunk.index, chunk.end, len(asked.request.prediction))
        )


def add_prompt(message: pb.GenerateStreamResponse | pb.GenerateResponse, asked: Wanted) -> None:
    """Add what the caller asked to know of the prompt, and whether it ends inside of the reasoning."""
    message.starts_in_reasoning = asked.starts_in_reasoning
    if asked.prompt_token_ids:
        message.prompt_token_ids.ids.extend(asked.request.token_ids)


async def response(chunks: Seq[Chunk], asked: Wanted) -> pb.GenerateResponse:
    """Return all outputs, each complete, in one message; others have turns while many log-probabilities enter."""
    found = pb.GenerateResponse(request_id=asked.request_id, model=asked.model)
    add_prompt(found, asked)
    for chunk in chunks:
        assert chunk.end is not None, "half an output"
        end = finished(chunk.index, chunk.end, len(asked.request.prediction))
        output = found.outputs.add(index=chunk.index, text=chunk.text, finished=end)
        if asked.token_ids:
            _add_tokens(output, chunk)
        await _add_logprobs(output.logprobs, chunk.logprobs)
    if chunks[0].prompt_logprobs:
        found.prompt_logprobs.SetInParent()  # present also without entries
        await _add_logprobs(found.prompt_logprobs.logprobs, [of for of in chunks[0].prompt_logprobs if of is not None])
    return found


async def _add_logprobs(message: MutableSequence[pb.TokenLogprob], found: Seq[Logprob]) -> None:
    for start in range(0, len(found), MAX_AT_ONCE):
        message.extend(map(_logprob, found[start : start + MAX_AT_ONCE]))
        await asyncio.sleep(0)


def _add_tokens(message: pb.TokenDelta | pb.Output, chunk: Chunk) -> None:
    message.token_ids.extend(chunk.token_ids)
    message.from_draft.extend(chunk.from_draft)
    message.text_lengths.extend(map(len, chunk.texts))


def _logprob(of: Logprob) -> pb.TokenLogprob:
    top = [pb.Candidate(token_id=candidate.token_id, logprob=candidate.logprob) for candidate in of.top]
    return pb.TokenLogprob(logprob=of.logprob, top=top)


def finished(index: int, end: End, num_predicted: int) -> pb.Finished:
    """Return the terminal message of one output, of which the caller predicted so many tokens."""
    result = end.finished
    timeline, stats = end.timeline, result.stats
    assert timeline.started is not None, "only what started has an End"
    assert timeline.ended is not None, "an End without a time"
    message = pb.Finished(
        index=index,
        finish_reason=pb.FinishReason.Value(f"FINISH_REASON_{result.reason.name}"),  # an ERROR is a status instead
        usage=pb.Usage(
            accepted_prediction_tokens=result.accepted_prediction_tokens,
            rejected_prediction_tokens=num_predicted - result.accepted_prediction_tokens,
            prompt_tokens=result.prompt_tokens,
            completion_tokens=result.completion_tokens,
            cached_prompt_tokens=result.cached_prompt_tokens,
        ),
        speculation_stats=pb.SpeculationStats(
            rounds=stats.rounds,
            drafted=stats.drafted,
            accepted=stats.accepted,
            accepted_per_position=stats.accepted_per_position,
            acceptance_length=stats.acceptance_length if stats.rounds else 0.0,
            gain_ratio=result.spec_gain,
        ),
        timing=pb.Timing(
            queue_seconds=timeline.started - timeline.arrived,
            time_to_first_token_seconds=(
                None if timeline.first_token is None else timeline.first_token - timeline.arrived
            ),
            total_seconds=timeline.ended - timeline.arrived,
        ),
        seed=result.seed,
        speculation=speculation_settings(result.speculation),
        interruptions=end.interruptions,
    )
    if end.stop_string is not None:
        message.stop_string = end.stop_string
    elif result.stop_token_id is not None:
        message.stop_token_id = result.stop_token_id
    return message


def model_info(model: ServedModel, adapters: Seq[str]) -> control_pb.GetModelInfoResponse:
    """Return the model, its limits, its adapters, and the default speculation settings of a request."""
    engine, config = model.engine, model.engine.config
    return control_pb.GetModelInfoResponse(
        model=model.name,
        draft_model=model.draft_name or "",
        device=model.device,
        dtype=engine.dtype,
        vocab_size=engine.vocab_size,
        max_model_len=engine.max_model_len,
        eos_token_ids=sorted(engine.eos_token_ids),
        has_tokenizer=model.codec is not None,
        proposers=sorted(engine.proposer_names, key=lambda name: (name != engine.default_proposer, name)),
        speculation=speculation_settings(
            SpeculationSettings(
                mode=config.speculation,
                num_draft_tokens=config.num_draft_tokens,
                proposer=engine.default_proposer,
                verification=config.verification,
            )
        ),
        max_batch_size=config.max_batch_size,
        max_batch_tokens=config.max_batch_tokens,
        adapters=adapters,
    )
