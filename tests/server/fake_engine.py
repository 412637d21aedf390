"""A FakeEngine that keeps the engine's contract without a model, and a served model around it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from engine.config import EngineConfig
from engine.engine import StepOutput
from engine.errors import DuplicateRequest, Unsupported
from engine.stats import Forward, StepStats
from engine.text import Codec
from engine.types import Finished, FinishReason, Request, Speculation, SpeculationStats, TokenEvent
from server.model import ServedModel
from tests.engine.test_text import CODEC, VOCAB_SIZE

EOS = 0
TEXT = "the quick brown fox says €5 and jumps over the lazy dog again and again. "


class FakeEngine:
    """Repeats `text` for ever: request by request the same tokens, `burst` of them per step, all but one accepted.

    A prompt token that is in `poison` ends its request with an error, alone.
    """

    def __init__(self, *, batch: int = 4, burst: int = 3, text: str = TEXT, step_seconds: float = 0.0) -> None:
        self.config = EngineConfig(target="fake", max_batch_size=batch)
        self.vocab_size, self.max_model_len = VOCAB_SIZE, 4096
        self.eos_token_ids = frozenset({EOS})
        self.proposer_names, self.default_proposer = ("none", "ngram"), "ngram"
        self.total_pages = batch
        self.script = CODEC.encode(text)
        self.poison: set[int] = set()
        self.fault: Exception | None = None  # raised by the next step
        self.gate = threading.Event()  # a step waits for it
        self.gate.set()
        self.steps = 0
        self.threads: set[int] = set()
        self._batch, self._burst, self._step_seconds = batch, burst, step_seconds
        self._live: dict[str, tuple[Request, list[int]]] = {}
        self._in_step = False

    num_waiting = 0

    @property
    def num_running(self) -> int:
        return len(self._live)

    @property
    def free_pages(self) -> int:
        return self.total_pages - len(self._live)

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def has_room(self) -> bool:
        return len(self._live) < self._batch

    def check(self, request: Request) -> None:
        request.check(self.vocab_size, self.max_model_len)
        if request.speculation.proposer not in (None, *self.proposer_names):
            raise Unsupported(f"speculation.proposer is {request.speculation.proposer!r}")

    def add(self, request: Request) -> None:
        self._between_steps()
        assert self.has_room, "the driver hands over only what has room"
        self.check(request)
        if request.request_id in self._live:
            raise DuplicateRequest(request.request_id)
        self._live[request.request_id] = (request, [])

    def finish(self, request_id, reason, *, keep=None, error=None) -> TokenEvent | None:
        self._between_steps()
        if request_id not in self._live:
            return None
        request, tokens = self._live.pop(request_id)
        count = len(tokens) if keep is None else keep
        return TokenEvent(request_id=request_id, finished=self._finished(request, reason, count, error=error))

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

    def expected(self, num_tokens: int) -> tuple[int, ...]:
        """The first tokens of every output."""
        script = self.script
        return (script * (num_tokens // len(script) + 1))[:num_tokens]

    def _step(self) -> StepOutput:
        live = len(self._live)
        events = tuple(self._advance(*entry) for entry in list(self._live.values()))
        drafted = (self._burst - 1) * live
        stats = StepStats(
            forwards=(Forward("verify", live, live * self._burst),),
            phase_seconds={"forward": 0.001},
            rounds=live,
            drafted=drafted,
            accepted_per_position=(live,) * (self._burst - 1),
            generated_tokens=sum(len(event.token_ids) for event in events),
            running=live,
            kv_usage=live / self.total_pages,
        )
        return StepOutput(events, stats)

    def _advance(self, request: Request, tokens: list[int]) -> TokenEvent:
        if self.poison & set(request.token_ids):
            return self._end(request, (), FinishReason.ERROR, error="poisoned")
        limit = request.sampling.max_tokens or 128
        fresh: list[int] = []
        for token in self.expected(len(tokens) + self._burst)[len(tokens) :]:
            fresh.append(token)
            stops = token in request.sampling.stop_token_ids
            if stops or len(tokens) + len(fresh) == limit:
                tokens += fresh
                return self._end(
                    request, fresh, FinishReason.STOP if stops else FinishReason.LENGTH, stop=token if stops else None
                )
        tokens += fresh
        return self._event(request, fresh)

    def _end(self, request, fresh: Sequence[int], reason, stop=None, error=None) -> TokenEvent:
        _, tokens = self._live.pop(request.request_id)
        return self._event(request, fresh, self._finished(request, reason, len(tokens), stop, error))

    @staticmethod
    def _event(request: Request, fresh: Sequence[int], finished: Finished | None = None) -> TokenEvent:
        drafts = tuple(i < len(fresh) - 1 for i in range(len(fresh)))
        return TokenEvent(request_id=request.request_id, token_ids=tuple(fresh), from_draft=drafts, finished=finished)

    def _finished(self, request, reason, count, stop=None, error=None) -> Finished:
        return Finished(
            reason=reason,
            prompt_tokens=len(request.token_ids),
            completion_tokens=count,
            seed=7 if request.sampling.seed is None else request.sampling.seed,
            speculation=Speculation(
                mode=self.config.speculation,
                num_draft_tokens=self._burst - 1,
                proposer="ngram",
                verification=self.config.verification,
            ),
            stats=SpeculationStats(2, 8, 4, (2, 2)),
            stop_token_id=stop,
            error=error,
        )

    def _between_steps(self) -> None:
        assert not self._in_step, "the engine was changed during a step"


def served(engine: FakeEngine, codec: Codec | None = CODEC) -> ServedModel:
    """The fake as the server sees it."""
    return ServedModel("fake", None, "cpu", engine, codec)
