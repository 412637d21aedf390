"""A FakeEngine that keeps the engine's contract without a model, and a served model around it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.errors import DuplicateRequest, InvalidRequest, ModelError, Unsupported
from pilotfish.engine.params import SpeculationSettings
from pilotfish.engine.request.intake import EngineFacts, Limits
from pilotfish.engine.request.validation import emitted_violations, unknown_adapter, violations
from pilotfish.engine.stats import EngineLoad, Forward, StepOutput, StepStats
from pilotfish.engine.text.codec import Codec
from pilotfish.engine.types import (
    Adapter,
    DraftStats,
    FinishedOutput,
    FinishReason,
    GrammarState,
    Logprob,
    Request,
    TokenEvent,
    TopLogprob,
)
from pilotfish.server.model import ServedModel
from tests.engine.text.test_codec import CODEC, VOCAB_SIZE

EOS = 0
TEXT = "the quick brown fox says €5 and jumps over the lazy dog again and again. "
SHIFT = 4  # output i begins this many tokens later in the text than output i - 1


def logprob_of(token: int, top: int) -> Logprob:
    """What the fake says of a token, wherever it stands; the likeliest ones are always the first ids."""
    return Logprob(-token / 100, tuple(TopLogprob(i, -i / 1000) for i in range(top)))


@dataclass
class Live:
    """One output on its way."""

    request: Request
    index: int
    tokens: list[int] = field(default_factory=list)
    grammar: GrammarState | None = None


class FakeAdapters(dict[str, Adapter]):
    """Loads any folder that has a file `fingerprint`, whose text is the adapter's."""

    def load(self, name: str, folder: Path, expected: str = "") -> Adapter:
        try:
            fingerprint = (folder / "fingerprint").read_text()
        except OSError as error:
            raise ModelError(f"adapter {name!r}: {error}") from error
        if expected not in ("", fingerprint):
            raise ModelError(f"adapter {name!r} has changed")
        self[name] = Adapter(name, len(self) + 1, fingerprint)
        return self[name]

    def unload(self, name: str) -> None:
        del self[name]


class FakeEngine:
    """Repeats `text` for ever: request by request the same tokens, `burst` of them per step, all but one accepted.

    A prompt token that is in `poison` ends the outputs `poisoned` of its request with an error; a grammar has its way.
    """

    page_size, spec_gain = 16, 1.25
    calibration_text: tuple[int, ...] | None = ()

    def __init__(self, *, batch: int = 4, burst: int = 3, text: str = TEXT, step_seconds: float = 0.0) -> None:
        self.config = EngineConfig(target="fake", max_batch_size=batch)
        self.vocab_size, self.max_model_len, self.eos_token_ids = VOCAB_SIZE, 4096, frozenset({EOS})
        self.proposer_names, self.default_proposer = ("none", "ngram"), "ngram"
        self.total_pages, self.loop, self.dtype = batch, "plain", "float32"
        self.adapters = FakeAdapters()
        self.script = CODEC.encode(text)
        self.poison: set[int] = set()
        self.poisoned = {0}
        self.fault: Exception | None = None  # raised by the next step
        self.gate = threading.Event()  # a step waits for it
        self.gate.set()
        self.steps = 0
        self.threads: set[int] = set()
        self.requests: list[Request] = []
        self._batch, self._burst, self._step_seconds = batch, burst, step_seconds
        self._live: dict[str, dict[int, Live]] = {}
        self._in_step = False

    @property
    def facts(self) -> EngineFacts:
        return EngineFacts(
            limits=Limits(self.vocab_size, self.max_model_len, self.eos_token_ids),
            proposer_names=self.proposer_names,
            default_proposer=self.default_proposer,
            page_size=self.page_size,
            total_pages=self.total_pages,
            loop=self.loop,
            dtype=self.dtype,
            device="cpu",
        )

    @property
    def load(self) -> EngineLoad:
        running = sum(map(len, self._live.values()))
        free = self.total_pages - running
        return EngineLoad(running, 0, free, free, self.spec_gain)

    def idle_tick(self, is_wanted: object = None) -> bool:
        assert not self._live
        return False

    def recover(self) -> None:
        self._live.clear()
        self.fault = None

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def has_room(self) -> bool:
        return self.load.num_running < self._batch

    def check(self, request: Request) -> None:
        found = list(violations(request, self.config, self.vocab_size, self.max_model_len))
        longest = request.max_len(self.max_model_len, self.config.max_output_tokens)
        found += emitted_violations(request, self.vocab_size, longest)
        found += unknown_adapter(request.adapter, self.adapters)
        if found:
            raise InvalidRequest(found)
        if request.speculation.proposer not in (None, *self.proposer_names):
            raise Unsupported(f"speculation.proposer is {request.speculation.proposer!r}")

    def speculation_of(self, request: Request) -> SpeculationSettings:
        return SpeculationSettings(
            mode=request.speculation.mode or self.config.speculation,
            num_draft_tokens=self._burst - 1,
            proposer="ngram",
            verification=self.config.verification,
        )

    def add(self, request: Request) -> tuple[TokenEvent, ...]:
        self._between_steps()
        others = {live.request.caller for outputs in self._live.values() for live in outputs.values()} - {
            request.caller
        }
        assert self.has_room or others, "the driver hands over only what has room, or what may displace others"
        if request.request_id in self._live:
            raise DuplicateRequest(request.request_id)
        if request.adapter is not None:
            self.adapters[request.adapter]  # it is loaded
        self.requests.append(request)
        self._live[request.request_id] = {i: self._opened(request, i) for i in request.unfinished}
        events = []
        for output in [o for o in self._live[request.request_id].values() if o.tokens]:
            reason, stop = self._reason(output, len(output.tokens), output.tokens[-1])
            if reason is not None:
                ended = self._end(output, reason, stop=stop)
                events.append(TokenEvent(request_id=request.request_id, index=output.index, finished=ended))
        return tuple(events)

    def _opened(self, request: Request, index: int) -> Live:
        tokens = list(request.received[index].token_ids) if request.received else []
        grammar = None if request.grammar is None else request.grammar.start()
        if grammar is not None and tokens:
            grammar.advance(tokens)
        return Live(request, index, tokens, grammar)

    def finish(self, request_id, reason, *, index=None, keep=None) -> tuple[TokenEvent, ...]:
        self._between_steps()
        outputs = [o for o in self._live.get(request_id, {}).values() if index in (None, o.index)]
        return tuple(
            TokenEvent(request_id=request_id, index=output.index, finished=self._end(output, reason, keep))
            for output in outputs
        )

    def step(self) -> StepOutput:
        self._in_step = True
        try:
            self.threads.add(threading.get_ident())
            assert self.gate.wait(30)
            time.sleep(self._step_seconds)
            self.steps += 1
            if self.fault is not None:
                raise self.fault
            return self._step()
        finally:
            self._in_step = False

    def expected(self, num_tokens: int, index: int = 0) -> tuple[int, ...]:
        """The first tokens of every request's output of this index."""
        start, stop = index * SHIFT, index * SHIFT + num_tokens
        return (self.script * (stop // len(self.script) + 1))[start:stop]

    def _step(self) -> StepOutput:
        live = self.load.num_running
        events = tuple(self._advance(output) for outputs in list(self._live.values()) for output in [*outputs.values()])
        stats = StepStats(
            forwards=(Forward("verify", live, live * self._burst),),
            spec_gain=self.spec_gain,
            phase_seconds={"forward": 0.001},
            decode_seconds=(0.001,),
            rounds=live,
            drafted=(self._burst - 1) * live,
            accepted_per_position=(live,) * (self._burst - 1),
            sequences_per_num_draft=(*(self._burst - 1) * (0,), live),
            generated_tokens=sum(len(event.token_ids) for event in events),
            prefix_lookups=5 * live,
            prefix_hits=2 * live,
            running=live,
            kv_usage=min(1.0, live / self.total_pages),
        )
        return StepOutput(events, stats, self.load)

    def _advance(self, output: Live) -> TokenEvent:
        request, index, sampling = output.request, output.index, output.request.sampling
        if self.poison & set(request.token_ids) and index in self.poisoned:
            ended = self._end(output, FinishReason.ERROR, error="poisoned")
            return TokenEvent(request_id=request.request_id, index=index, finished=ended)
        fresh, reason, stop = self._fresh(output)
        first = not output.tokens
        output.tokens += fresh
        top = sampling.prompt_logprobs
        prompt = (None, *(logprob_of(t, top) for t in request.token_ids[1:])) if first and top is not None else ()
        return TokenEvent(
            request_id=request.request_id,
            index=index,
            token_ids=tuple(fresh),
            from_draft=tuple(i < len(fresh) - 1 for i in range(len(fresh))),
            logprobs=() if sampling.logprobs is None else tuple(logprob_of(t, sampling.logprobs) for t in fresh),
            prompt_logprobs=prompt if index == 0 else (),
            finished=None if reason is None else self._end(output, reason, stop=stop),
        )

    def _fresh(self, output: Live) -> tuple[list[int], FinishReason | None, int | None]:
        """A burst of tokens, cut where the output ends: why, and by which token."""
        done, fresh = len(output.tokens), []
        for scripted in self.expected(done + self._burst, output.index)[done:]:
            token = scripted if output.grammar is None else _guided(output.grammar, scripted)
            fresh.append(token)
            reason, stop = self._reason(output, done + len(fresh), token)
            if reason is not None:
                return fresh, reason, stop
        return fresh, None, None

    def _reason(self, output: Live, num_tokens: int, newest: int) -> tuple[FinishReason | None, int | None]:
        """Why the output ends after so many tokens, if it does, and by which token."""
        sampling = output.request.sampling
        if newest in sampling.stop_token_ids or (output.grammar is not None and newest == EOS):
            return FinishReason.STOP, newest
        longest = output.request.max_len(self.max_model_len) - len(output.request.token_ids)
        return (FinishReason.LENGTH if num_tokens == longest else None), None

    def _end(self, output: Live, reason, keep=None, stop=None, error=None) -> FinishedOutput:
        request = output.request
        outputs = self._live[request.request_id]
        del outputs[output.index]
        if not outputs:
            del self._live[request.request_id]
        return FinishedOutput(
            reason=reason,
            prompt_tokens=len(request.token_ids),
            completion_tokens=len(output.tokens) if keep is None else keep,
            seed=(7 if request.sampling.seed is None else request.sampling.seed) + output.index,
            speculation=self.speculation_of(request),
            stats=DraftStats(2, 8, 4, (2, 2)),
            spec_gain=1.5,
            stop_token_id=stop,
            cached_prompt_tokens=1 if len(request.token_ids) > 1 else 0,
            error=error,
        )

    def _between_steps(self) -> None:
        assert not self._in_step, "the engine was changed during a step"


def _guided(state: GrammarState, scripted: int) -> int:
    """The scripted token if the grammar lets it come, else the first that may; end of text only where it must."""
    import torch

    mask = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    state.fill(mask)
    allowed = mask.nonzero().flatten().tolist()
    token = scripted if scripted in allowed else (allowed[-1])
    if token != EOS:
        assert state.advance([token]) == 1
    return token


def served(engine: FakeEngine, codec: Codec | None = CODEC, **fields) -> ServedModel:
    """The fake as the server sees it."""
    return ServedModel("fake", None, "cpu", engine, codec, **{"fingerprint": "fa4e"} | fields)
