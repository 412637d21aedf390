"""Offline use: one call takes prompts and returns completions.

>>> from pilotfish.engine import LLM, SamplingParams
>>> llm = LLM("models/target", draft="models/draft")
>>> [done] = llm.generate("def add(a, b):", SamplingParams(max_tokens=32))
>>> print(done.text)
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import count
from numbers import Integral
from os import PathLike
from typing import Any, cast

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.engine.errors import InvalidRequest
from pilotfish.engine.params import Guided, SamplingParams, SpeculationParams, SpeculationSettings
from pilotfish.engine.startup import warm
from pilotfish.engine.text.codec import Codec, OutputText, structure_problem
from pilotfish.engine.text.guided import GrammarCompiler
from pilotfish.engine.text.stops import StopStrings
from pilotfish.engine.types import DraftStats, FinishedOutput, FinishReason, Grammar, Logprob, Request, TokenEvent

Prompt = str | Seq[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One output of a prompt. `text` is None if the checkpoint has no tokenizer."""

    index: int  # which of the prompt's `n` outputs
    text: str | None
    token_ids: tuple[int, ...]
    from_draft: tuple[bool, ...]  # which of `token_ids` were accepted drafts
    logprobs: tuple[Logprob, ...] | None = None  # one per token, if requested
    prompt_logprobs: tuple[Logprob | None, ...] | None = None  # one per prompt token, None for the first
    finish_reason: FinishReason
    matched_stop: str | int | None  # the stop string, or the id of the token, that ended it
    prompt_tokens: int
    cached_prompt_tokens: int  # prompt tokens found in the prefix cache
    accepted_prediction_tokens: int = 0  # tokens of the prediction that occur in the output
    speculation: SpeculationSettings  # the effective settings
    seed: int  # reproduces the tokens (with the rejection rule: if K and the batch are equal, too)
    stats: DraftStats
    spec_gain: float  # estimated speed-up: tokens per second relative to plain decoding
    error: str | None = None  # with finish_reason "error": the error of this prompt; other prompts are not affected


class LLM:
    """A model for use inside a program; `pilotfish serve` is the same engine with a network interface."""

    _ids = count(1)

    def __init__(
        self,
        target: str | PathLike[str],
        draft: str | PathLike[str] | Seq[str | PathLike[str]] | None = None,
        **config: Any,
    ) -> None:
        """Load a target and its draft sources; `config`: further options of `EngineConfig`."""
        settings = EngineConfig(**config | {"target": target, "draft": draft})
        self.engine: Engine = warm.load(settings, calibrates=False)
        self.codec = Codec.load(settings.target, settings.revision)
        self._compiler = _compiler(self.engine, self.codec)

    @classmethod
    def of(cls, engine: Engine, codec: Codec | None = None) -> LLM:
        """Make an LLM from a loaded engine."""
        llm = cls.__new__(cls)
        llm.engine, llm.codec = engine, codec
        llm._compiler = _compiler(engine, codec)  # noqa: SLF001 - its own
        return llm

    def generate(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None, *,
        speculation: SpeculationParams | None = None, cache_salt: str | None = None, prediction: Prompt = (),
        adapter: str | None = None,
    ) -> list[CompletionOutput]:  # fmt: skip
        """Complete all prompts in one ragged batch; returns `n` completions per prompt, in order.

        A prompt is a string or token ids; `params`: one for all prompts, or one for each. `prediction`: the expected
        output, drafted where outputs follow it. `adapter`: name of a loaded adapter (option `adapter`).

        Raises:
            InvalidRequest: a prompt or its parameters are invalid; nothing was run.
            ValueError: the number of `params` is neither one nor the number of prompts.
        """
        asked = SpeculationParams() if speculation is None else speculation
        shared = SamplingParams() if params is None else params
        predicted = self._encode(prediction, bare=True) if prediction else ()
        pairs = _paired(_as_list(prompts), shared)
        requests = [self._request(p, s, asked, cache_salt, predicted, adapter) for p, s in pairs]
        for request in requests:
            self.engine.check(request)
        outputs = {(r.request_id, i): _Output(r, i, self._text(r)) for r in requests for i in range(r.sampling.n)}
        try:
            for request in requests:
                self.engine.add(request)
            while self.engine.has_work:
                for event in self.engine.step().events:
                    outputs[event.request_id, event.index].take(event, self.engine)
        finally:
            self.engine.finish_all(FinishReason.ABORTED)
        return [output.completion() for output in outputs.values()]

    def _request(
        self, prompt: Prompt, params: SamplingParams, speculation: SpeculationParams, cache_salt: str | None,
        prediction: tuple[int, ...] = (), adapter: str | None = None,
    ) -> Request:  # fmt: skip
        if self.codec is None and params.stop:
            raise InvalidRequest.of("stopping.stop", "is text; this checkpoint has no tokenizer")
        return Request(
            request_id=f"offline-{next(self._ids)}",
            token_ids=self._encode(prompt),
            sampling=params,
            grammar=None if params.guided is None else self._compile(params.guided),
            speculation=speculation,
            cache_salt=cache_salt,
            prediction=prediction,
            adapter=adapter,
        )

    def _compile(self, guided: Guided) -> Grammar:
        if self._compiler is None:
            raise InvalidRequest.of("guided", "needs a tokenizer and an end token; this checkpoint lacks one")
        return self._compiler.compile(guided)

    def _text(self, request: Request) -> OutputText | None:
        asked = request.sampling
        return None if self.codec is None else OutputText(self.codec, StopStrings(asked.stop), asked.min_tokens)

    def _encode(self, prompt: Prompt, *, bare: bool = False) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            if not all(isinstance(token, Integral) for token in prompt):
                raise InvalidRequest.of("token_ids", "has an entry that is not an integer")
            return tuple(int(token) for token in prompt)
        if self.codec is None:
            raise InvalidRequest.of("prompt", "is text, and this checkpoint has no tokenizer; pass token ids")
        return self.codec.encode(prompt, bare=bare)


@dataclass(slots=True)
class _Output:
    """One completion while it is generated."""

    request: Request
    index: int
    text: OutputText | None
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: tuple[Logprob | None, ...] = ()
    stop: str | None = None
    finished: FinishedOutput | None = None

    def take(self, event: TokenEvent, engine: Engine) -> None:
        """Add the tokens of a step; a stop string ends the output immediately."""
        assert self.finished is None, "an event after the last"
        kept, self.finished = len(event.token_ids), event.finished
        if self.text is not None:
            hidden = event.finished is not None and event.finished.stop_token_id is not None
            texts, self.stop = self.text.push(event.token_ids[: kept - hidden]), self.text.stop
            self.pieces += texts
            kept = kept if self.stop is None else len(texts)
        self.token_ids += event.token_ids[:kept]
        self.from_draft += event.from_draft[:kept]
        self.logprobs += event.logprobs[:kept]
        self.prompt_logprobs = self.prompt_logprobs or event.prompt_logprobs
        if self.stop is not None and self.finished is None:
            keep = len(self.token_ids)
            (ended,) = engine.finish(event.request_id, FinishReason.STOP, index=self.index, keep=keep)
            self.finished = ended.finished
        if self.finished is not None and self.text is not None:
            self.pieces.append(self.text.flush())

    def completion(self) -> CompletionOutput:
        """The result; the output must be finished."""
        ended, asked = self.finished, self.request.sampling
        assert ended is not None, "the engine is idle, but a request has not ended"
        return CompletionOutput(
            index=self.index,
            text=None if self.text is None else "".join(self.pieces),
            token_ids=tuple(self.token_ids),
            from_draft=tuple(self.from_draft),
            logprobs=None if asked.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=None if asked.prompt_logprobs is None or self.index else self.prompt_logprobs,
            finish_reason=FinishReason.STOP if self.stop is not None else ended.reason,
            matched_stop=self.stop if self.stop is not None else ended.stop_token_id,
            prompt_tokens=ended.prompt_tokens,
            cached_prompt_tokens=ended.cached_prompt_tokens,
            accepted_prediction_tokens=ended.accepted_prediction_tokens,
            seed=ended.seed,
            speculation=ended.speculation,
            stats=ended.stats,
            spec_gain=ended.spec_gain,
            error=None if self.stop is not None else ended.error,  # beyond the output of plain decoding
        )


def _compiler(engine: Engine, codec: Codec | None) -> GrammarCompiler | None:
    sizes = engine.facts.limits.vocab_size, tuple(engine.facts.limits.eos_token_ids)
    return None if codec is None or structure_problem(codec, *sizes) else GrammarCompiler(codec, *sizes, engine.config)


def _as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """One prompt or many -> a list: "a" -> ["a"]; [1, 2] -> [[1, 2]]; ["a", [1, 2]] -> the same list."""
    if isinstance(prompts, str):
        return [prompts]
    many = list(prompts)
    if many and isinstance(many[0], Integral):
        return [cast("Seq[int]", many)]
    if any(isinstance(prompt, Integral) for prompt in many):
        raise InvalidRequest.of("prompts", "mixes token ids with prompts; put each prompt of token ids into a list")
    return cast("list[Prompt]", many)


def _paired(
    prompts: list[Prompt], params: SamplingParams | Seq[SamplingParams]
) -> Iterable[tuple[Prompt, SamplingParams]]:
    if isinstance(params, SamplingParams):
        return [(prompt, params) for prompt in prompts]
    if len(params) != len(prompts):
        raise ValueError(f"there are {len(prompts)} prompts and {len(params)} params; expected one, or one per prompt")
    return list(zip(prompts, params, strict=True))
