"""Answers of OpenAI's completions and chat completions, and the chunks of their streams."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import msgspec

from pilotfish.engine.text.codec import Codec, OutputText
from pilotfish.engine.types import FinishedOutput, FinishReason, Logprob, TokenEvent
from pilotfish.server.chat import Conversation
from pilotfish.server.formats.base import CallArguments, CallStart, Content, Piece, Reasoning
from pilotfish.server.http.agents import AgentBody
from pilotfish.server.http.bodies import ParsedBody
from pilotfish.server.http.calls import Answers, Events, Json, encoded, list_of
from pilotfish.server.http.openai.bodies import ChatBody, CompletionBody, OpenAiBody
from pilotfish.server.http.pieces import TOKENS_PER_TURN, CallReader, call_id
from pilotfish.server.model import ServedModel
from pilotfish.server.streams.stream import OutputStream


def usage_of(prompts: Iterable[Sequence[FinishedOutput]], num_predicted: int, reasoning_tokens: int) -> Json:
    """Return the total usage, given the final events of each prompt's outputs. A prompt counts once.

    `num_predicted`: tokens of the prediction.

    The cached tokens of a prompt are the minimum over its outputs, because the first output caches it for later ones.
    """
    by_prompt = list(prompts)
    every = [end for ends in by_prompt for end in ends]
    accepted = sum(end.accepted_prediction_tokens for end in every)
    details = {
        "reasoning_tokens": reasoning_tokens,
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": num_predicted * len(every) - accepted,
    }
    cached = sum(min(end.cached_prompt_tokens for end in ends) for ends in by_prompt)
    counted = usage_so_far(
        sum(ends[0].prompt_tokens for ends in by_prompt), sum(end.completion_tokens for end in every)
    )
    return counted | {"prompt_tokens_details": {"cached_tokens": cached}, "completion_tokens_details": details}


def usage_so_far(prompt_tokens: int, completion_tokens: int) -> Json:
    """Return the usage so far."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def speculation_of(finished: FinishedOutput) -> Json:
    """Return the speculation statistics of one output, named as in gRPC."""
    stats = finished.stats
    return {
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "accepted_per_position": list(stats.accepted_per_position),
        "acceptance_length": stats.acceptance_length if stats.rounds else 0.0,
        "gain_ratio": finished.spec_gain,
    }


def metrics_of(finished: FinishedOutput) -> Json:
    """Return the same for the only output of an answer, in vLLM's format, which AIPerf reads.

    Entry j of the histogram counts the rounds with exactly j accepted drafts; without rounds it is empty.
    """
    stats = finished.stats
    if not stats.rounds:
        return {}
    kept = [stats.rounds, *stats.accepted_per_position]  # entry j counts the rounds with at least j accepted drafts
    found = {
        "mean_acceptance_length": stats.acceptance_length,
        "draft_acceptance_rate": stats.accepted / stats.drafted if stats.drafted else 0.0,
        "acceptance_histogram": [*(least - more for least, more in pairwise(kept)), kept[-1]],
        "num_spec_steps": stats.rounds,
        "num_accepted_draft_tokens": stats.accepted,
        "num_draft_tokens": stats.drafted,
        "num_spec_tokens": len(kept) - 1,
    }
    return {"metrics": {"speculative_decoding": found}}


IMPOSSIBLE = -9999.0  # for minus infinity (a token masked by the model), which JSON does not have
MAX_NAMES = 4096  # text of tokens, cached per answer
FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}  # all other reasons: "abort"


def _spelt(codec: Codec | None, silent: Collection[int], token: int, leads: bool) -> tuple[str, list[int] | None]:
    """Return a token as text, or its id if the token alone is not valid text, and the bytes of the text.

    `silent` tokens have no text in these answers; `leads`: the output's text begins with this token.
    """
    data = None if codec is None else codec.spelling.bytes_of(token, leads=leads)
    if data is None:
        return f"token_id:{token}", None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = ""
    return text or f"token_id:{token}", None if token in silent else list(data)


class AnswerFormat(Answers):
    """Base of completions and chat completions.

    Outputs are numbered across all prompts; those of one prompt are consecutive.
    """

    prefix: ClassVar[str]
    whole: ClassVar[str]  # `object` of an answer
    chunk: ClassVar[str]  # `object` of an event
    closing: ClassVar[Json]  # the choice of an output's end
    outputs_per_prompt = 1 << 32  # only in the format with one prompt

    def __init__(self, read: ParsedBody[Any], streams: Sequence[OutputStream], model: ServedModel) -> None:
        super().__init__(read, streams, model)
        body: OpenAiBody = read.body
        request = streams[0].request
        self._num_predicted = len(request.prediction)
        self._prompt_tokens = sum(len(stream.request.token_ids) for stream in streams)
        skips_special = request.output.skip_special_tokens
        special = model.codec.special_tokens if skips_special and model.codec is not None else frozenset()
        silent = special if body.ignore_eos else special | model.engine.facts.limits.eos_token_ids
        self._silent = silent  # tokens without text in these answers
        self._spelt = lru_cache(MAX_NAMES)(partial(_spelt, model.codec, silent))
        self._include_usage, self._has_running_usage = body.stream_options.include_usage, body.has_running_usage
        self._has_stats = body.return_speculation_stats
        self._has_metrics = self._has_stats and body.n in (None, 1)  # sent with the only output
        self._begun: set[int] = set()  # outputs whose text has begun
        self._created = int(time.time())

    async def answer(self, outputs: Sequence[TokenEvent]) -> Json:
        """Return the whole answer. Its choices, which may be long, are encoded one by one."""
        choices, ends = list[msgspec.Raw](), dict[int, list[FinishedOutput]]()
        for i, output in enumerate(outputs):
            assert output.finished is not None, "half an output"
            choice = await self._choice(output) | self._ended(output.finished, i) | {"index": i}
            choices.append(msgspec.Raw(encoded(choice)))
            ends.setdefault(output.index // self.outputs_per_prompt, []).append(output.finished)
            await asyncio.sleep(0)
        whole = self._envelope(self.whole, choices) | {"usage": self._usage([*ends.values()])}
        return whole | self._metrics(ends[0][0])

    async def events(self, events: Events) -> AsyncIterator[list[Json]]:
        """Yield the chunks of each event, then the total usage, if requested."""
        ends: dict[int, list[FinishedOutput]] = {}
        begun: set[int] = set()
        completion_tokens = 0
        async for event in events:
            choices = [] if event.index in begun else await self._opening(event.index)
            begun.add(event.index)
            choices += await self._pieces(event)
            if event.finished is not None:
                ends.setdefault(event.index // self.outputs_per_prompt, []).append(event.finished)
                choices.append(self.closing | self._ended(event.finished, event.index))
            completion_tokens += len(event.token_ids)
            so_far = usage_so_far(self._prompt_tokens, self._counted(completion_tokens))
            usage = {"usage": so_far if self._has_running_usage else None} if self._include_usage else {}
            chunks = [
                self._envelope(self.chunk, [{"finish_reason": None} | choice | {"index": event.index}]) | usage
                for choice in choices
            ]
            if event.finished is not None and not self._include_usage:
                chunks[-1] |= self._metrics(event.finished)
            yield chunks
        if self._include_usage:
            every = [ends[prompt] for prompt in sorted(ends)]
            whole = self._envelope(self.chunk, []) | {"usage": self._usage(every)}
            yield [whole | self._metrics(every[0][0])]

    def _envelope(self, kind: str, choices: Sequence[Json | msgspec.Raw]) -> Json:
        return {
            "id": f"{self.prefix}-{self._request_id}",
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _ended(self, finished: FinishedOutput, index: int) -> Json:
        """Return the end of an output, and the seed that reproduces it (not an OpenAI field; clients ignore it)."""
        ended = {"finish_reason": self._reason(finished, index), "seed": finished.seed}
        return ended | ({"speculation_stats": speculation_of(finished)} if self._has_stats else {})

    def _reason(self, finished: FinishedOutput, index: int) -> str:
        return FINISH_REASONS.get(finished.reason, "abort")

    def _metrics(self, finished: FinishedOutput) -> Json:
        return metrics_of(finished) if self._has_metrics else {}

    def _usage(self, ends: Sequence[Sequence[FinishedOutput]]) -> Json:
        usage = usage_of(ends, self._num_predicted, self._reasoning_tokens())
        return usage | usage_so_far(usage["prompt_tokens"], self._counted(usage["completion_tokens"]))

    def _counted(self, completion_tokens: int) -> int:
        """Return how many of the generated tokens are sent."""
        return completion_tokens

    def _reasoning_tokens(self) -> int:
        return 0

    def _leading(self, event: TokenEvent) -> int:
        """Return the index of the token with which an output's text begins; -1: it began before, or has not begun."""
        if event.index in self._begun or event.text_offset:
            return -1
        leading = self._leading_of(event.token_ids)
        if leading >= 0:
            self._begun.add(event.index)
        return leading

    def _leading_of(self, tokens: Iterable[int]) -> int:
        """Return the index of an output's first token with text; -1 if none has text."""
        return next((i for i, token in enumerate(tokens) if token not in self._silent), -1)

    @abstractmethod
    async def _choice(self, output: TokenEvent) -> Json: ...

    @abstractmethod
    async def _pieces(self, event: TokenEvent) -> list[Json]: ...

    @abstractmethod
    async def _opening(self, index: int) -> list[Json]: ...


class ChatAnswers(AnswerFormat):
    """Answers of `/v1/chat/completions`."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"
    closing: ClassVar[Json] = {"delta": {}, "logprobs": None}

    def __init__(self, read: ParsedBody[Any], streams: Sequence[OutputStream], model: ServedModel) -> None:
        super().__init__(read, streams, model)
        asked = read.conversation
        self._is_parsed = is_parsed(asked, model)  # parsed content may differ from the text
        # If the caller named the function, its call is the expected answer and does not set the finish reason.
        self._is_forced = asked.tool_name is not None
        self._reader = CallReader(asked, streams[0], model.format if self._is_parsed else None)
        self._num_calls: dict[int, int] = {}  # of each output

    async def _choice(self, output: TokenEvent) -> Json:
        read = await self._reader.read(output)
        reasoning = "".join(piece.text for piece in read if isinstance(piece, Reasoning))
        content = "".join(piece.text for piece in read if isinstance(piece, Content))
        calls = [self._call(output.index, piece.index, piece.name) for piece in read if isinstance(piece, CallStart)]
        for piece in read:
            if isinstance(piece, CallArguments):
                calls[piece.index]["function"]["arguments"] += piece.text
        self._num_calls[output.index] = len(calls)
        message: Json = {"role": "assistant", "content": content or None if calls else content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {"message": message, "logprobs": await self._logprobs(output)}

    async def _pieces(self, event: TokenEvent) -> list[Json]:
        logprobs = await self._logprobs(event)
        if not self._is_parsed:
            is_text = event.texts or event.tail
            return [{"delta": {"content": event.text}, "logprobs": logprobs}] if is_text else []
        deltas = [self._delta(event.index, piece) for piece in await self._reader.read(event)]
        if not deltas and logprobs is not None:
            deltas = [{}]
        return [{"delta": delta, "logprobs": None if i else logprobs} for i, delta in enumerate(deltas)]

    def _delta(self, index: int, piece: Piece) -> Json:
        match piece:
            case Reasoning():
                return {"reasoning_content": piece.text}
            case Content():
                return {"content": piece.text}
            case CallStart():
                self._num_calls[index] += 1
                return {"tool_calls": [{"index": piece.index} | self._call(index, piece.index, piece.name)]}
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}

    def _call(self, index: int, number: int, name: str) -> Json:
        identity = call_id(self._request_id, index, number)
        return {"id": identity, "type": "function", "function": {"name": name, "arguments": ""}}

    async def _opening(self, index: int) -> list[Json]:
        self._num_calls[index] = 0
        return [{"delta": {"role": "assistant", "content": ""}, "logprobs": None}]

    def _reason(self, finished: FinishedOutput, index: int) -> str:
        has_called = self._num_calls[index] and not self._is_forced and not self._reader.is_in_call(index)
        is_own_end = finished.reason is FinishReason.STOP
        return "tool_calls" if has_called and is_own_end else super()._reason(finished, index)

    def _reasoning_tokens(self) -> int:
        return self._reader.reasoning_tokens.total()

    async def _logprobs(self, output: TokenEvent) -> Json | None:
        if not output.logprobs:
            return None

        leading = self._leading(output)

        def made(i: int) -> Json:
            token, of = output.token_ids[i], output.logprobs[i]
            top = [self._entry(rival.token_id, rival.logprob, leads=i == leading) for rival in of.top]
            return self._entry(token, of.logprob, leads=i == leading) | {"top_logprobs": top}

        return {"content": await list_of(len(output.logprobs), made), "refusal": None}

    def _entry(self, token: int, logprob: float, *, leads: bool) -> Json:
        name, data = self._spelt(token, leads)
        return {"token": name, "logprob": max(logprob, IMPOSSIBLE), "bytes": data}


def is_parsed(asked: Conversation, model: ServedModel) -> bool:
    """Whether reasoning or calls are parsed."""
    return bool(asked.callable_tools) or model.format.reasoning is not None


def fit(read: ParsedBody[Any], model: ServedModel, *, is_continued: bool) -> bool:
    """Adapt a conversation to the parsing of its text; return whether its stream can be resumed.

    `is_continued`: the request resumes a stream. Parsing needs the text from its beginning, and a resumed stream has
    only the rest.
    """
    body, prompt = read.body, read.prompts[0]
    if isinstance(body, AgentBody):
        if model.format.reasoning is None and isinstance(prompt, Conversation):
            read.prompts[0] = replace(prompt, thinking_budget=None)
    elif not isinstance(body, ChatBody):
        return True
    elif not isinstance(prompt, Conversation) or not is_parsed(prompt, model):
        if body.skip_special_tokens is None:  # they are not parsed
            read.request = replace(read.request, output=replace(read.request.output, skip_special_tokens=True))
        return True
    for field in ["Last-Event-ID"] * is_continued + ["event_ids"] * body.event_ids:
        read.refuse(field, "is not supported where reasoning or calls are parsed: such a stream cannot be resumed")
    return False


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is sent before its outputs; `lengths[i]` is the number of characters added by token i."""

    text: str = ""
    token_ids: Sequence[int] = ()
    lengths: Sequence[int] = ()
    logprobs: Sequence[Logprob] = ()  # of all tokens but the first


NO_ECHO = Echo()
NOTHING = TokenEvent(request_id="")


class TextAnswers(AnswerFormat):
    """Answers of `/v1/completions`, with `n` outputs of each prompt."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"
    closing: ClassVar[Json] = {"text": "", "logprobs": None}

    def __init__(self, read: ParsedBody[Any], streams: Sequence[OutputStream], model: ServedModel) -> None:
        super().__init__(read, streams, model)
        body: CompletionBody = read.body
        self._body, self._codec, self.outputs_per_prompt = body, model.codec, body.n or 1
        self._prompts = list(zip(read.prompts, (stream.request.token_ids for stream in streams), strict=True))
        self._has_metrics = self._has_metrics and len(self._prompts) == 1
        self._echoes: dict[int, Echo] = {}  # by prompt

    async def _echo_before(self, event: TokenEvent) -> Echo:
        """Return the echo of an event's prompt. The first event of each prompt belongs to its output 0."""
        prompt = event.index // self.outputs_per_prompt
        if prompt not in self._echoes:
            self._echoes[prompt] = await self._echo(prompt, event)
        return self._echoes[prompt]

    async def _echo(self, prompt: int, first: TokenEvent) -> Echo:
        """Return the echo of a prompt; `first` is the first event of its output 0."""
        if not self._body.echo:
            return NO_ECHO
        (sent, token_ids), texts = self._prompts[prompt], list[str]()
        logprobs = [of for of in first.prompt_logprobs if of is not None]
        if self._codec is not None and (logprobs or not isinstance(sent, str)):
            decoder = OutputText(self._codec)
            for start in range(0, len(token_ids), TOKENS_PER_TURN):
                texts += decoder.push(token_ids[start : start + TOKENS_PER_TURN])
                await asyncio.sleep(0)
            texts.append(decoder.flush())
        text = sent if isinstance(sent, str) else "".join(texts)
        return Echo(text, token_ids, [len(text) for text in texts[:-1]] or [0] * len(token_ids), logprobs)

    async def events(self, events: Events) -> AsyncIterator[list[Json]]:
        """Yield the chunks of each event; each output's first text is preceded by the prompt."""
        async for chunks in super().events(self._with_echoes(events) if self._body.echo else events):
            yield chunks

    async def _with_echoes(self, events: Events) -> Events:
        """Yield the events, delaying those of a prompt until its log-probabilities arrive with output 0."""
        held: dict[int, list[TokenEvent]] = {}
        async for event in events:
            prompt, output = divmod(event.index, self.outputs_per_prompt)
            if prompt not in self._echoes and output > 0:
                held.setdefault(prompt, []).append(event)
                continue
            await self._echo_before(event)
            yield event
            for waiting in held.pop(prompt, ()):
                yield waiting

    async def _choice(self, output: TokenEvent) -> Json:
        echo = await self._echo_before(output)
        if self._body.is_only_scored:
            output = NOTHING
        return {"text": echo.text + output.text, "logprobs": await self._logprobs(echo, output)}

    async def _pieces(self, event: TokenEvent) -> list[Json]:
        if not (event.texts or event.tail) or self._body.is_only_scored:
            return []
        start = len(self._echoes.get(event.index // self.outputs_per_prompt, NO_ECHO).text) + event.text_offset
        return [{"text": event.text, "logprobs": await self._logprobs(NO_ECHO, event, start)}]

    async def _opening(self, index: int) -> list[Json]:
        if not self._body.echo:
            return []
        echo = self._echoes[index // self.outputs_per_prompt]
        return [{"text": echo.text, "logprobs": await self._logprobs(echo, NOTHING)}]

    def _reason(self, finished: FinishedOutput, index: int) -> str:
        return "length" if self._body.is_only_scored else super()._reason(finished, index)

    def _counted(self, completion_tokens: int) -> int:
        return 0 if self._body.is_only_scored else completion_tokens

    async def _logprobs(self, echo: Echo, output: TokenEvent, start: int = 0) -> Json | None:
        """Return the log-probabilities of the prompt's tokens and of those after it. `start`: offset of the text."""
        if not output.logprobs and not (echo.token_ids and self._body.logprobs is not None):
            return None
        ids = (*echo.token_ids, *output.token_ids)
        found = (*[None] * bool(echo.token_ids), *echo.logprobs, *output.logprobs)
        offsets = [  # text that belongs to no token is last
            *list(accumulate(echo.lengths, initial=0))[:-1],
            *list(accumulate(map(len, output.texts), initial=start + len(echo.text)))[:-1],
        ]
        begins = self._leading(output)
        leading = {self._leading_of(echo.token_ids), len(echo.token_ids) + begins if begins >= 0 else -1}

        def top_logprobs(of: Logprob | None) -> Json | None:
            if of is None:
                return None
            return {self._spelt(top.token_id, False)[0]: max(top.logprob, IMPOSSIBLE) for top in of.top}

        return {
            "tokens": await list_of(len(ids), lambda i: self._spelt(ids[i], i in leading)[0]),
            "token_logprobs": await list_of(
                len(found), lambda i: None if (of := found[i]) is None else max(of.logprob, IMPOSSIBLE)
            ),
            "top_logprobs": await list_of(len(found), lambda i: top_logprobs(found[i])),
            "text_offset": await list_of(len(offsets), offsets.__getitem__),
        }
