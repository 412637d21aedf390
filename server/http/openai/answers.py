"""Messages of the protocol in OpenAI's formats: whole answers and the chunks of a stream. Knows no engine."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import ClassVar, Generic, TypeVar

from engine.text.codec import Codec
from pilotfish.v1 import generation_pb2 as pb
from server.admission.admission import Call
from server.http.calls import Answers, Json, LongList, Messages, list_of
from server.http.openai.bodies import OpenAiBody


def usage_of(prompts: Iterable[Sequence[pb.Finished]], reasoning_tokens: int) -> Json:
    """Return the usage of all outputs, given the ends of the outputs of each prompt. A prompt counts once.

    Its cached tokens are the minimum over its outputs, because later outputs may find the prompt cached by the first.
    """
    by_prompt = [[end.usage for end in ends] for ends in prompts]
    every = [usage for usages in by_prompt for usage in usages]
    details = {
        "reasoning_tokens": reasoning_tokens,
        "accepted_prediction_tokens": sum(usage.accepted_prediction_tokens for usage in every),
        "rejected_prediction_tokens": sum(usage.rejected_prediction_tokens for usage in every),
    }
    cached = sum(min(usage.cached_prompt_tokens for usage in usages) for usages in by_prompt)
    counted = usage_so_far(
        sum(usages[0].prompt_tokens for usages in by_prompt), sum(usage.completion_tokens for usage in every)
    )
    return counted | {"prompt_tokens_details": {"cached_tokens": cached}, "completion_tokens_details": details}


def usage_so_far(prompt_tokens: int, completion_tokens: int) -> Json:
    """Return the usage as far as it is known before the end."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def speculation_of(finished: pb.Finished) -> Json:
    """Return what drafting did for one output, named as in the protocol."""
    stats = finished.speculation_stats
    return {
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "accepted_per_position": list(stats.accepted_per_position),
        "acceptance_length": stats.acceptance_length,
        "gain_ratio": stats.gain_ratio,
    }


def metrics_of(finished: pb.Finished) -> Json:
    """Return the same for the only output of an answer, in the form that vLLM sends and that AIPerf reads.

    Entry j of the histogram counts the rounds that kept exactly j drafts. Without a round there is nothing to tell.
    """
    stats = finished.speculation_stats
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
FINISH_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}  # all other reasons: "abort"


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

    def __init__(self, body: OpenAiBody, message: pb.GenerateRequest, call: Call) -> None:
        super().__init__(body, message, call)
        model, skips_special = call.driver.model, call.wanted.sending.skip_special_tokens
        special = model.codec.special_tokens if skips_special and model.codec is not None else frozenset()
        silent = special if body.ignore_eos else special | model.engine.eos_token_ids
        self._names = TokenNames(model.codec, silent)
        self._include_usage, self._has_running_usage = body.stream_options.include_usage, body.has_running_usage
        self._has_stats = body.return_speculation_stats
        self._has_metrics = self._has_stats and body.n in (None, 1)  # beside the only output
        self._begun: set[int] = set()  # outputs whose text has begun
        self._created = int(time.time())

    async def answer(self, responses: Sequence[pb.GenerateResponse]) -> Json:
        """Return the whole answer. Long lists in it are made when they are encoded, and choices one by one."""
        outputs = [output for response in responses for output in response.outputs]
        read = await self._read(responses)

        def made(start: int, stop: int) -> list[Json]:
            return [
                self._choice(outputs[i], read[i]) | self._ended(outputs[i].finished, i) | {"index": i}
                for i in range(start, stop)
            ]

        choices = list_of(len(outputs), made, 1)
        ends = [[output.finished for output in response.outputs] for response in responses]
        told = self._envelope(self.whole, choices) | {"usage": self._usage(ends)}
        return told | self._metrics(outputs[0].finished)

    async def events(self, messages: Messages) -> AsyncIterator[list[Json]]:
        """Yield the chunks of each message; last, if requested, the usage of all outputs."""
        ends: dict[int, list[pb.Finished]] = {}
        begun: set[int] = set()
        prompt_tokens = completion_tokens = 0
        async for message in messages:
            part = message.delta if message.HasField("delta") else message.finished
            choices = [] if part.index in begun else self._opening(part.index)
            begun.add(part.index)
            choices += await self._pieces(message)
            if message.HasField("finished"):
                ends.setdefault(part.index // self.outputs_per_prompt, []).append(message.finished)
                choices.append(self._closing() | self._ended(message.finished, part.index))
            prompt_tokens += len(message.prompt_token_ids.ids)
            completion_tokens += len(message.delta.token_ids)
            so_far = usage_so_far(prompt_tokens, self._counted(completion_tokens))
            usage = so_far if self._has_running_usage else None
            events = [
                self._event({"finish_reason": None} | choice | {"index": part.index}, usage) for choice in choices
            ]
            if message.HasField("finished") and not self._include_usage:
                events[-1] |= self._metrics(message.finished)
            yield events
        if self._include_usage:
            every = [ends[prompt] for prompt in sorted(ends)]
            told = self._envelope(self.chunk, []) | {"usage": self._usage(every)}
            yield [told | self._metrics(every[0][0])]

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

    def _ended(self, finished: pb.Finished, index: int) -> Json:
        """Return how an output ended, and the seed that reproduces it (not a field of OpenAI; clients ignore it)."""
        ended = {"finish_reason": self._reason(finished, index), "seed": finished.seed}
        return ended | ({"speculation_stats": speculation_of(finished)} if self._has_stats else {})

    def _reason(self, finished: pb.Finished, index: int) -> str:
        return FINISH_REASONS.get(finished.finish_reason, "abort")

    def _metrics(self, finished: pb.Finished) -> Json:
        return metrics_of(finished) if self._has_metrics else {}

    def _usage(self, ends: Sequence[Sequence[pb.Finished]]) -> Json:
        return usage_of(ends, self._reasoning_tokens())

    def _counted(self, completion_tokens: int) -> int:
        """How many of the generated tokens the caller gets."""
        return completion_tokens

    def _reasoning_tokens(self) -> int:
        return 0

    def _leading(self, output: pb.Output | pb.TokenDelta) -> int:
        """Return which of these tokens the text of an output begins with; -1: it began before, or has not begun."""
        if isinstance(output, pb.TokenDelta) and (output.index in self._begun or output.text_offset):
            return -1
        leading = self._names.leading(output.token_ids)
        if leading >= 0:
            self._begun.add(output.index)
        return leading

    @abstractmethod
    async def _read(self, responses: Sequence[pb.GenerateResponse]) -> Sequence[ReadT]:
        """Return what is read of each output."""

    @abstractmethod
    def _choice(self, output: pb.Output, read: ReadT) -> Json: ...

    @abstractmethod
    async def _pieces(self, message: pb.GenerateStreamResponse) -> list[Json]: ...

    @abstractmethod
    def _opening(self, index: int) -> list[Json]: ...

    @abstractmethod
    def _closing(self) -> Json: ...
