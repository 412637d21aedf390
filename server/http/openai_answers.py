"""Messages of the protocol in OpenAI's formats: whole answers and the chunks of a stream. Knows no engine."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable
from itertools import accumulate
from typing import Any, ClassVar

from engine.text.codec import Codec
from pilotfish.v1 import generation_pb2 as pb
from server.admission.answers import MAX_AT_ONCE
from server.http.long_json import LongList, list_of

Json = dict[str, Any]

IMPOSSIBLE = -9999.0  # for minus infinity, which a model's own mask may give and JSON does not have
MAX_NAMES = 4096  # of tokens, kept for an answer
_FINISH_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}  # all other reasons: "abort"


class TokenNames(dict[int, str]):
    """Tokens as text, or by their ids if they are no text by themselves; so different tokens have different names."""

    def __init__(self, codec: Codec | None) -> None:
        super().__init__()
        self._codec = codec

    def __missing__(self, token: int) -> str:
        """Decode a token that this answer did not have before."""
        if len(self) >= MAX_NAMES:
            self.clear()
        text = "" if self._codec is None else self._codec.tokenizer.decode([token], skip_special_tokens=False)
        self[token] = name = text if text and "\ufffd" not in text else f"token_id:{token}"
        return name


class AnswerFormat(ABC):
    """Base of completions and chat completions. One instance per call."""

    prefix: ClassVar[str]
    whole: ClassVar[str]  # `object` of an answer
    chunk: ClassVar[str]  # `object` of an event

    def __init__(self, model: str, codec: Codec | None, *, include_usage: bool = False) -> None:
        self._model, self._names, self._include_usage = model, TokenNames(codec), include_usage
        self._created = int(time.time())
        self._request_id = ""

    def answer(self, response: pb.GenerateResponse) -> Json:
        """Return the whole answer. Many log-probabilities are in long lists, which are made when they are encoded."""
        self._request_id = response.request_id
        outputs = response.outputs

        def made(start: int, stop: int) -> list[Json]:
            return [
                self._choice(output) | {"index": output.index} | _ended(output.finished)
                for output in outputs[start:stop]
            ]

        is_long = sum(len(output.logprobs) for output in outputs) > MAX_AT_ONCE
        choices = list_of(len(outputs), made, 1 if is_long else len(outputs))
        return self._envelope(self.whole, choices) | {"usage": _usage(output.finished for output in response.outputs)}

    async def events(self, messages: AsyncIterator[pb.GenerateStreamResponse]) -> AsyncIterator[list[Json]]:
        """Yield the chunks of each message; last, if requested, the usage of all outputs."""
        ends: list[pb.Finished] = []
        begun: set[int] = set()
        async for message in messages:
            self._request_id = self._request_id or message.request_id
            part = message.delta if message.HasField("delta") else message.finished
            opening = () if part.index in begun else self._opening()
            begun.add(part.index)
            if message.HasField("finished"):
                ends.append(message.finished)
                choice = self._closing() | _ended(message.finished)
            else:
                choice = self._piece(message.delta) | {"finish_reason": None}
            choices = [*(piece | {"finish_reason": None} for piece in opening), choice]
            yield [self._event(piece | {"index": part.index}) for piece in choices]
        if self._include_usage:
            yield [self._envelope(self.chunk, []) | {"usage": _usage(ends)}]

    def _event(self, choice: Json) -> Json:
        event = self._envelope(self.chunk, [choice])
        return event | {"usage": None} if self._include_usage else event

    def _envelope(self, kind: str, choices: list[Json] | LongList) -> Json:
        return {
            "id": f"{self.prefix}-{self._request_id}",
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    @abstractmethod
    def _choice(self, output: pb.Output) -> Json: ...

    @abstractmethod
    def _piece(self, delta: pb.TokenDelta) -> Json: ...

    @abstractmethod
    def _opening(self) -> Iterable[Json]: ...

    @abstractmethod
    def _closing(self) -> Json: ...


class TextAnswers(AnswerFormat):
    """Answers of `/v1/completions`."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def _choice(self, output: pb.Output) -> Json:
        return {"text": output.text, "logprobs": self._logprobs(output)}

    _piece = _choice  # type: ignore[assignment]  # a delta has the fields of an output

    def _opening(self) -> Iterable[Json]:
        return ()

    def _closing(self) -> Json:
        return {"text": "", "logprobs": None}

    def _logprobs(self, output: pb.Output | pb.TokenDelta) -> Json | None:
        if not output.logprobs:
            return None
        names, ids, found = self._names, output.token_ids, output.logprobs
        start = output.text_offset if isinstance(output, pb.TokenDelta) else 0
        offsets = list(accumulate(output.text_lengths, initial=start))[:-1]
        return {
            "tokens": _per_token(len(ids), lambda i, j: [names[token] for token in ids[i:j]]),
            "token_logprobs": _per_token(len(found), lambda i, j: [max(of.logprob, IMPOSSIBLE) for of in found[i:j]]),
            "top_logprobs": _per_token(
                len(found),
                lambda i, j: [{names[c.token_id]: max(c.logprob, IMPOSSIBLE) for c in of.top} for of in found[i:j]],
            ),
            "text_offset": _per_token(len(offsets), lambda i, j: offsets[i:j]),
        }


class ChatAnswers(AnswerFormat):
    """Answers of `/v1/chat/completions`."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _choice(self, output: pb.Output) -> Json:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(output)}

    def _piece(self, delta: pb.TokenDelta) -> Json:
        return {"delta": {"content": delta.text}, "logprobs": self._logprobs(delta)}

    def _opening(self) -> Iterable[Json]:
        return ({"delta": {"role": "assistant", "content": ""}, "logprobs": None},)

    def _closing(self) -> Json:
        return {"delta": {}, "logprobs": None}

    def _logprobs(self, output: pb.Output | pb.TokenDelta) -> Json | None:
        if not output.logprobs:
            return None

        def made(start: int, stop: int) -> list[Json]:
            entries = []
            for token, of in zip(output.token_ids[start:stop], output.logprobs[start:stop], strict=True):
                top = [self._entry(candidate.token_id, candidate.logprob) for candidate in of.top]
                entries.append(self._entry(token, of.logprob) | {"top_logprobs": top})
            return entries

        return {"content": _per_token(len(output.logprobs), made), "refusal": None}

    def _entry(self, token: int, logprob: float) -> Json:
        name = self._names[token]
        known = not name.startswith("token_id:")
        return {"token": name, "logprob": max(logprob, IMPOSSIBLE), "bytes": list(name.encode()) if known else None}


def _per_token(length: int, make: Callable[[int, int], list[Any]]) -> list[Any] | LongList:
    return list_of(length, make, MAX_AT_ONCE)


def _ended(finished: pb.Finished) -> Json:
    """Return the finish reason, and the seed that reproduces the output (not a field of OpenAI; clients ignore it)."""
    return {"finish_reason": _FINISH_REASONS.get(finished.finish_reason, "abort"), "seed": finished.seed}


def _usage(ends: Iterable[pb.Finished]) -> Json:
    """Return the usage of all outputs. The prompt counts once.

    Its cached tokens are the minimum over the outputs, because later outputs may find the prompt cached by the first.
    """
    usages = [end.usage for end in ends]
    prompt, completion = usages[0].prompt_tokens, sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": min(usage.cached_prompt_tokens for usage in usages)},
    }
