"""Answers of `/v1/completions`: texts, of one prompt or of several, with or without the prompt. Knows no engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from engine.text.codec import OutputText
from engine.types import FinishedOutput, Logprob, TokenEvent
from server.http.calls import Events, Json, list_of
from server.http.openai.answers import IMPOSSIBLE, AnswerFormat, usage_so_far
from server.http.openai.bodies import CompletionBody
from server.http.pieces import TOKENS_PER_TURN
from server.http.requests import ParsedBody
from server.model import ServedModel
from server.streams.stream import OutputStream


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that comes before its outputs; `lengths[i]` is how much of the text came with token i."""

    text: str = ""
    token_ids: Sequence[int] = ()
    lengths: Sequence[int] = ()
    logprobs: Sequence[Logprob] = ()  # of all tokens but the first


NO_ECHO = Echo()
NOTHING = TokenEvent(request_id="")


class TextAnswers(AnswerFormat[Echo]):
    """Answers of `/v1/completions`, with `n` outputs of each prompt."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, read: ParsedBody[Any], streams: Sequence[OutputStream], model: ServedModel) -> None:
        super().__init__(read, streams, model)
        body: CompletionBody = read.body
        self._body, self._codec, self.outputs_per_prompt = body, model.codec, body.n or 1
        self._prompts = list(zip(read.prompts, (stream.request.token_ids for stream in streams), strict=True))
        self._has_metrics = self._has_metrics and len(self._prompts) == 1
        self._echoes: dict[int, Echo] = {}  # by prompt

    async def _read(self, outputs: Sequence[TokenEvent]) -> list[Echo]:
        found = list[Echo]()
        for output in outputs:
            prompt, index = divmod(output.index, self.outputs_per_prompt)
            found.append(found[-1] if index else await self._echo(prompt, output))
        return found

    async def _echo(self, prompt: int, first: TokenEvent) -> Echo:
        """Return a prompt as its outputs echo it; `first` is the first event of its output 0."""
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
        """Yield the chunks of each event; the prompt comes before the first text of each of its outputs."""
        async for chunks in super().events(self._with_echoes(events) if self._body.echo else events):
            yield chunks

    async def _with_echoes(self, events: Events) -> Events:
        """Yield the events, those of a prompt only when its log-probabilities have come, with those of output 0."""
        held: dict[int, list[TokenEvent]] = {}
        async for event in events:
            prompt, output = divmod(event.index, self.outputs_per_prompt)
            if prompt not in self._echoes and output > 0:
                held.setdefault(prompt, []).append(event)
                continue
            if prompt not in self._echoes:
                self._echoes[prompt] = await self._echo(prompt, event)
            yield event
            for waiting in held.pop(prompt, ()):
                yield waiting

    def _choice(self, output: TokenEvent, read: Echo) -> Json:
        if self._body.is_only_scored:
            output = NOTHING
        return {"text": read.text + output.text, "logprobs": self._logprobs(read, output)}

    async def _pieces(self, event: TokenEvent) -> list[Json]:
        if not (event.texts or event.tail) or self._body.is_only_scored:
            return []
        start = len(self._echoes.get(event.index // self.outputs_per_prompt, NO_ECHO).text) + event.text_offset
        return [{"text": event.text, "logprobs": self._logprobs(NO_ECHO, event, start)}]

    def _opening(self, index: int) -> list[Json]:
        if not self._body.echo:
            return []
        echo = self._echoes[index // self.outputs_per_prompt]
        return [{"text": echo.text, "logprobs": self._logprobs(echo, NOTHING)}]

    def _closing(self) -> Json:
        return {"text": "", "logprobs": None}

    def _reason(self, finished: FinishedOutput, index: int) -> str:
        return "length" if self._body.is_only_scored else super()._reason(finished, index)

    def _counted(self, completion_tokens: int) -> int:
        return 0 if self._body.is_only_scored else completion_tokens

    def _usage(self, ends: Sequence[Sequence[FinishedOutput]]) -> Json:
        usage = super()._usage(ends)
        return usage | usage_so_far(usage["prompt_tokens"], self._counted(usage["completion_tokens"]))

    def _logprobs(self, echo: Echo, output: TokenEvent, start: int = 0) -> Json | None:
        """Return the log-probabilities of a prompt's tokens and of those after it. `start`: where the text begins."""
        if not output.logprobs and not (echo.token_ids and self._body.logprobs is not None):
            return None
        names, ids = self._names, (echo.token_ids, output.token_ids)
        found = ([None] * bool(echo.token_ids), echo.logprobs, output.logprobs)
        num_tokens, num_found = sum(map(len, ids)), sum(map(len, found))
        offsets = [  # text that belongs to no token comes last
            *list(accumulate(echo.lengths, initial=0))[:-1],
            *list(accumulate(map(len, output.texts), initial=start + len(echo.text)))[:-1],
        ]

        begins = self._leading(output)
        leading = {names.leading(echo.token_ids), len(echo.token_ids) + begins if begins >= 0 else -1}

        def tokens(i: int, j: int) -> list[str]:
            return [names.spelt(token, k in leading)[0] for k, token in enumerate(_cut(ids, i, j), i)]

        def token_logprobs(i: int, j: int) -> list[float | None]:
            return [None if of is None else max(of.logprob, IMPOSSIBLE) for of in _cut(found, i, j)]

        def top_logprobs(i: int, j: int) -> list[Json | None]:
            tops = (None if of is None else of.top for of in _cut(found, i, j))
            return [
                None if top is None else {names[of.token_id]: max(of.logprob, IMPOSSIBLE) for of in top} for top in tops
            ]

        return {
            "tokens": list_of(num_tokens, tokens),
            "token_logprobs": list_of(num_found, token_logprobs),
            "top_logprobs": list_of(num_found, top_logprobs),
            "text_offset": list_of(len(offsets), lambda i, j: offsets[i:j]),
        }


def _cut(sequences: Sequence[Sequence[Any]], start: int, stop: int) -> list[Any]:
    """Return a half-open range of the entries of all sequences, as if they were one."""
    found = list[Any]()
    for sequence in sequences:
        found += sequence[max(start, 0) : max(stop, 0)]
        start, stop = start - len(sequence), stop - len(sequence)
    return found
