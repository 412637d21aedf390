"""Every option again, while engines die: a request goes on with another one as if nothing had happened.

Plain decoding, alone and undisturbed, is the law here too: tokens, text, finish reason, stop position, usage, seed and
log-probabilities are the same, wherever the engine is lost, however often, and when another server continues.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from pilotfish.engine.llm import LLM, CompletionOutput
from pilotfish.engine.params import SamplingParams, SpeculationParams
from pilotfish.engine.types import FinishReason, ReceivedOutput, Resume, TokenEvent
from pilotfish.server.streams.stream import OutputStream, merged
from tests.covering import some
from tests.exactness.test_options import ALONE, MAX_TOKENS, REQUESTS
from tests.sameness import PROMPTS, Pair, asking, assert_same, codec, random_of, random_pair

FORMS = ("none", "model", "auto", "right", "wrong")


class Reader:
    """One request's outputs as a caller sees them, whatever engines they come from."""

    def __init__(self, llm: LLM, prompt: str, params: SamplingParams, speculation: SpeculationParams) -> None:
        params = replace(params, seed=9 if params.seed is None else params.seed)
        self.request = llm._request(prompt, params, speculation, None)
        self.stream = OutputStream(self.request, codec(), count().__next__)
        self.stream.start()
        self.chunks: list[list[TokenEvent]] = [[] for _ in self.stream.outputs]

    def feed(self, llm: LLM) -> None:
        """Give an engine what it has to go on with."""
        for event in llm.engine.add(self.stream.continued()):
            self.take(event, llm)
        for output in self.stream.outputs:
            if output.is_stopped and not output.has_ended:
                self._stop(output.index, llm)

    def take(self, event: TokenEvent, llm: LLM) -> None:
        if self.stream.push(event):
            self._stop(event.index, llm)
        self._read(event.index)

    def _stop(self, index: int, llm: LLM) -> None:
        keep = self.stream.outputs[index].num_tokens
        for event in llm.engine.finish(self.request.request_id, FinishReason.STOP, index=index, keep=keep):
            self.stream.push(event)
        self._read(index)

    def _read(self, index: int) -> None:
        if self.stream.outputs[index].has_unread:
            self.chunks[index].append(self.stream.outputs[index].take())

    def moved(self) -> None:
        """Go to another server, with what was received, in place of its own memory."""
        received = tuple(
            ReceivedOutput(token_ids=tuple(output.token_ids), has_ended=output.has_ended)
            for output in self.stream.outputs
        )
        self.resume(received)

    def resume(self, received: tuple[ReceivedOutput, ...]) -> None:
        request = replace(self.request, resume=Resume(outputs=received))
        self.stream = OutputStream(request, codec(), count().__next__, end_token_ids=self._ends)
        self.stream.start()
        for _ in self.stream.replay():
            pass

    @property
    def _ends(self) -> set[int]:
        params = self.request.sampling
        return {*params.stop_token_ids, *(() if params.ignore_eos else (0,))}

    def completions(self) -> list[CompletionOutput]:
        return [self._completion(merged(chunks)) for chunks in self.chunks]

    def _completion(self, chunk: TokenEvent) -> CompletionOutput:
        params, ended = self.request.sampling, chunk.finished
        assert ended.completion_tokens == self.stream.outputs[chunk.index].num_tokens
        return CompletionOutput(
            index=chunk.index,
            text=chunk.text,
            token_ids=chunk.token_ids,
            from_draft=chunk.from_draft,
            logprobs=None if params.logprobs is None else chunk.logprobs,
            prompt_logprobs=None if params.prompt_logprobs is None or chunk.index else chunk.prompt_logprobs,
            finish_reason=ended.reason,
            matched_stop=ended.stop_string or ended.stop_token_id,
            prompt_tokens=ended.prompt_tokens,
            cached_prompt_tokens=ended.cached_prompt_tokens,
            seed=ended.seed,
            speculation=ended.speculation,
            stats=ended.stats,
            spec_gain=ended.spec_gain,
            error=ended.error,
        )


def run(llm: LLM, readers: list[Reader], dies: range | frozenset[int], *, moves: bool) -> None:
    """Serve all readers to their ends; the engine dies before the steps `dies`, counted from 1."""
    for reader in readers:
        reader.feed(llm)
    for step in count(1):
        if step in dies:
            llm.engine.finish_all(FinishReason.ERROR)
            llm.engine.check_invariants()
            for reader in readers:
                if not reader.stream.ended:
                    if moves:
                        reader.moved()
                    reader.feed(llm)
        if not llm.engine.has_work:
            break
        by_id = {reader.request.request_id: reader for reader in readers}
        for event in llm.engine.step().events:
            by_id[event.request_id].take(event, llm)
    llm.engine.check_invariants()


def same(reader: Reader, pair: Pair, prompt: str) -> None:
    for ours, law in zip(reader.completions(), pair.plain(prompt, reader.request.sampling), strict=True):
        assert_same(ours, law)


@pytest.mark.parametrize(("option", "proposer"), [(option, FORMS[-i % len(FORMS)]) for i, option in enumerate(ALONE)])
def test_each_option_goes_on(option: str, proposer: str) -> None:
    """With another engine, and on another server; the engine dies before every third step, the first one too."""
    sampling = replace(ALONE[option], max_tokens=ALONE[option].max_tokens or MAX_TOKENS)
    i, llm = FORMS.index(proposer), random_of(proposer).llm(proposer)
    for moves in (False, True):
        reader = Reader(llm, PROMPTS[i % 4], sampling, asking(proposer, 4))
        run(llm, [reader], range(1 + i % 3, 100, 3), moves=moves)
        same(reader, random_of(proposer), PROMPTS[i % 4])


@pytest.mark.parametrize("proposer", some(["auto", "suffix", "eagle3", "dflash", "uno"], ["auto"]))
def test_a_batch_goes_on_wherever_the_engine_dies(proposer: str) -> None:
    """At every step, of prompts in chunks and of sequences that were preempted, too."""
    llm = random_of(proposer).llm(proposer, pages=40, max_batch_tokens=24, prefix_cache=False)
    for first in range(1, 20, 4):
        readers = [Reader(llm, prompt, params, asking(proposer, 4)) for prompt, params in REQUESTS]
        run(llm, readers, frozenset({first, first + 3}), moves=bool(first % 8 == 1))
        for reader, (prompt, _) in zip(readers, REQUESTS, strict=True):
            same(reader, random_of(proposer), prompt)


def test_an_output_that_was_complete_ends_at_once() -> None:
    """Its tokens had arrived, and its end had not."""
    for option in ("max_tokens", "stop_token_ids", "stop", "n", "json_schema", "choice"):
        sampling = replace(ALONE[option], max_tokens=ALONE[option].max_tokens or MAX_TOKENS)
        llm = random_pair().llm("model")
        reader = Reader(llm, PROMPTS[0], sampling, asking("model", 4))
        law = random_pair().plain(PROMPTS[0], reader.request.sampling)
        received = tuple(ReceivedOutput(token_ids=done.token_ids) for done in law)
        reader.resume(received)
        reader.feed(llm)
        assert not llm.engine.has_work, option
        for ours, theirs in zip(reader.completions(), law, strict=True):
            assert (ours.token_ids, ours.finish_reason) == ((), theirs.finish_reason), option
            assert ours.matched_stop == theirs.matched_stop
