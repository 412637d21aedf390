"""Events in OpenAI's formats: whole answers and the chunks of a stream. Knows no engine."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, ClassVar, Generic, TypeVar

from engine.text.codec import Codec
from engine.types import FinishedOutput, FinishReason, TokenEvent
from server.http.calls import Answers, Events, Json, LongList, list_of
from server.http.openai.bodies import OpenAiBody
from server.http.requests import ParsedBody
from server.model import ServedModel
from server.streams.stream import OutputStream


def usage_of(prompts: Iterable[Sequence[FinishedOutput]], num_predicted: int, reasoning_tokens: int) -> Json:
    """Return the usage of all outputs, given the ends of the outputs of each prompt. A prompt counts once.

    `num_predicted`: tokens of the prediction.

    Its cached tokens are the minimum over its outputs, because later outputs may find the prompt cached by the first.
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
    """Return the usage as far as it is known before the end."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def speculation_of(finished: FinishedOutput) -> Json:
    """Return what drafting did for one output, named as over gRPC."""
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
    """Return the same for the only output of an answer, in the form that vLLM sends and that AIPerf reads.

    Entry j of the histogram counts the rounds that kept exactly j drafts. Without a round there are none.
    """
    stats = finished.stats
    if not stats.rounds:
        return {}
    kept = [stats.rounds, *stats.accepted_per_position]  # entry j counts the rounds that kept at least j drafts
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


ReadT = TypeVar("ReadT")  # what is read of an output before its choice is made

IMPOSSIBLE = -9999.0  # for minus infinity, which a model's own mask may give and JSON does not have
MAX_NAMES = 4096  # of tokens, kept for an answer
FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}  # all other reasons: "abort"


class TokenNames:
    """Tokens as text, or by their ids if they are no text by themselves; and as the bytes of the text.

    `silent` tokens have no text in these answers.
    """

    def __init__(self, codec: Codec | None, silent: Collection[int] = ()) -> None:
        self._silent = silent
        self.spelt = lru_cache(MAX_NAMES)(partial(_spelt, codec, silent))

    def __getitem__(self, token: int) -> str:
        return self.spelt(token, False)[0]

    def leading(self, tokens: Iterable[int]) -> int:
        """Return which of the first tokens of an output its text begins with; -1 if none has a text."""
        return next((i for i, token in enumerate(tokens) if token not in self._silent), -1)


def _spelt(codec: Codec | None, silent: Collection[int], token: int, leads: bool) -> tuple[str, list[int] | None]:
    """Return a token's text and its bytes; `leads`: the text of an output begins with it."""
    data = None if codec is None else codec.spelling.bytes_of(token, leads=leads)
    if data is None:
        return f"token_id:{token}", None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = ""
    return text or f"token_id:{token}", None if token in silent else list(data)


class AnswerFormat(Answers, Generic[ReadT]):
    """Base of completions and chat completions.

    Outputs are numbered through all prompts: those of a prompt follow each other.
    """

    prefix: ClassVar[str]
    whole: ClassVar[str]  # `object` of an answer
    chunk: ClassVar[str]  # `object` of an event
    outputs_per_prompt = 1 << 32  # of a format with one prompt

    def __init__(self, read: ParsedBody[Any], streams: Sequence[OutputStream], model: ServedModel) -> None:
        super().__init__(read, streams, model)
        body: OpenAiBody = read.body
        request = streams[0].request
        self._num_predicted = len(request.prediction)
        self._prompt_tokens = sum(len(stream.request.token_ids) for stream in streams)
        skips_special = request.output.skip_special_tokens
        special = model.codec.special_tokens if skips_special and model.codec is not None else frozenset()
        silent = special if body.ignore_eos else special | model.engine.facts.limits.eos_token_ids
        self._names = TokenNames(model.codec, silent)
        self._include_usage, self._has_running_usage = body.stream_options.include_usage, body.has_running_usage
        self._has_stats = body.return_speculation_stats
        self._has_metrics = self._has_stats and body.n in (None, 1)  # beside the only output
        self._begun: set[int] = set()  # outputs whose text has begun
        self._created = int(time.time())

    async def answer(self, outputs: Sequence[TokenEvent]) -> Json:
        """Return the whole answer. Long lists in it are made when they are encoded, and choices one by one."""
        read = await self._read(outputs)
        ends = [output.finished for output in outputs if output.finished is not None]

        def made(start: int, stop: int) -> list[Json]:
            return [
                self._choice(outputs[i], read[i]) | self._ended(ends[i], i) | {"index": i} for i in range(start, stop)
            ]

        choices = list_of(len(outputs), made, 1)
        by_prompt: dict[int, list[FinishedOutput]] = {}
        for output, end in zip(outputs, ends, strict=True):
            by_prompt.setdefault(output.index // self.outputs_per_prompt, []).append(end)
        whole = self._envelope(self.whole, choices) | {"usage": self._usage([*by_prompt.values()])}
        return whole | self._metrics(ends[0])

    async def events(self, events: Events) -> AsyncIterator[list[Json]]:
        """Yield the chunks of each event; last, if requested, the usage of all outputs."""
        ends: dict[int, list[FinishedOutput]] = {}
        begun: set[int] = set()
        completion_tokens = 0
        async for event in events:
            choices = [] if event.index in begun else self._opening(event.index)
            begun.add(event.index)
            choices += await self._pieces(event)
            if event.finished is not None:
                ends.setdefault(event.index // self.outputs_per_prompt, []).append(event.finished)
                choices.append(self._closing() | self._ended(event.finished, event.index))
            completion_tokens += len(event.token_ids)
            so_far = usage_so_far(self._prompt_tokens, self._counted(completion_tokens))
            usage = so_far if self._has_running_usage else None
            chunks = [
                self._event({"finish_reason": None} | choice | {"index": event.index}, usage) for choice in choices
            ]
            if event.finished is not None and not self._include_usage:
                chunks[-1] |= self._metrics(event.finished)
            yield chunks
        if self._include_usage:
            every = [ends[prompt] for prompt in sorted(ends)]
            whole = self._envelope(self.chunk, []) | {"usage": self._usage(every)}
            yield [whole | self._metrics(every[0][0])]

    def _event(self, choice: Json, usage: Json | None) -> Json:
        event = self._envelope(self.chunk, [choice])
        return event | {"usage": usage} if self._include_usage else event

    def _envelope(self, kind: str, choices: list[Json] | LongList) -> Json:
        return {
            "id": f"{self.prefix}-{self._request_id}",
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _ended(self, finished: FinishedOutput, index: int) -> Json:
        """Return how an output ended, and the seed that reproduces it (not a field of OpenAI; clients ignore it)."""
        ended = {"finish_reason": self._reason(finished, index), "seed": finished.seed}
        return ended | ({"speculation_stats": speculation_of(finished)} if self._has_stats else {})

    def _reason(self, finished: FinishedOutput, index: int) -> str:
        return FINISH_REASONS.get(finished.reason, "abort")

    def _metrics(self, finished: FinishedOutput) -> Json:
        return metrics_of(finished) if self._has_metrics else {}

    def _usage(self, ends: Sequence[Sequence[FinishedOutput]]) -> Json:
        return usage_of(ends, self._num_predicted, self._reasoning_tokens())

    def _counted(self, completion_tokens: int) -> int:
        """How many of the generated tokens the caller gets."""
        return completion_tokens

    def _reasoning_tokens(self) -> int:
        return 0

    def _leading(self, event: TokenEvent) -> int:
        """Return which of these tokens the text of an output begins with; -1: it began before, or has not begun."""
        if event.index in self._begun or event.text_offset:
            return -1
        leading = self._names.leading(event.token_ids)
        if leading >= 0:
            self._begun.add(event.index)
        return leading

    @abstractmethod
    async def _read(self, outputs: Sequence[TokenEvent]) -> Sequence[ReadT]:
        """Return what is read of each output."""

    @abstractmethod
    def _choice(self, output: TokenEvent, read: ReadT) -> Json: ...

    @abstractmethod
    async def _pieces(self, event: TokenEvent) -> list[Json]: ...

    @abstractmethod
    def _opening(self, index: int) -> list[Json]: ...

    @abstractmethod
    def _closing(self) -> Json: ...
