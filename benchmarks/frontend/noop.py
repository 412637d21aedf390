"""An engine without a model: it has the interface that the driver uses and returns prepared tokens."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from engine.config import EngineConfig
from engine.engine import Engine, StepOutput
from engine.errors import InvalidRequest
from engine.model.adapters.store import Adapters
from engine.params import SpeculationMode, SpeculationSettings, Verification
from engine.request.validation import violations
from engine.stats import Forward, StepStats
from engine.text.codec import Codec
from engine.types import DraftStats, FinishedOutput, FinishReason, Request, TokenEvent
from models import embedded_target
from server.model import ServedModel

NAME = "no-op"
MAX_LEN = 1 << 22  # tokens


@dataclass
class _NoopOutput:
    request: Request
    done: int = 0  # tokens


class NoopEngine:
    """Each step gives every request `burst` tokens of one text, all but one as drafts; at most one step per `pause`."""

    num_waiting = 0
    page_size = 16
    spec_gain = 1.0
    max_model_len = MAX_LEN
    eos_token_ids: frozenset[int] = frozenset()
    proposer_names, default_proposer = ("none",), "none"
    adapters = Adapters(None)

    def __init__(self, config: EngineConfig, codec: Codec, text: str, burst: int, pause: float) -> None:
        self.config, self.vocab_size = config, codec.tokenizer.get_vocab_size()
        self.total_pages = config.max_batch_size
        self._burst, self._pause, self._next = burst, pause, 0.0
        self._live: dict[str, _NoopOutput] = {}
        script = codec.encode(text)
        self._bursts = [(script * 2)[i : i + burst] for i in range(len(script))]
        self._flags = (True,) * (burst - 1) + (False,)

    @property
    def num_running(self) -> int:
        """Return the number of live requests."""
        return len(self._live)

    @property
    def free_pages(self) -> int:
        """Return the number of free pages; each request takes one."""
        return self.total_pages - len(self._live)

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def has_room(self) -> bool:
        """Return whether another request may be added."""
        return len(self._live) < self.total_pages

    def check(self, request: Request) -> None:
        """Raise the errors that the real engine would raise."""
        found = list(violations(request, self.config, self.vocab_size, self.max_model_len))
        if found:
            raise InvalidRequest(found)

    def add(self, request: Request) -> tuple[TokenEvent, ...]:
        """Add a request that was checked; none is continued here."""
        self._live[request.request_id] = _NoopOutput(request)
        return ()

    def speculation_of(self, request: Request) -> SpeculationSettings:
        """Return some settings, for the first message of a stream."""
        return SpeculationSettings(
            mode=SpeculationMode.AUTO, num_draft_tokens=0, proposer="none", verification=Verification.COUPLED
        )

    def finish(self, request_id: str, reason: FinishReason, **_: Any) -> tuple[TokenEvent, ...]:
        """End a request before it is complete."""
        live = self._live.pop(request_id, None)
        return () if live is None else (TokenEvent(request_id=request_id, finished=self._finished(live, reason)),)

    def step(self) -> StepOutput:
        """Wait until the pause is over, then produce tokens for all requests."""
        wait = self._next - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        self._next = max(self._next, time.monotonic() - self._pause) + self._pause
        live = list(self._live.values())
        events = tuple(map(self._advance, live))
        stats = StepStats(
            forwards=(Forward("verify", len(live), len(live) * self._burst),),
            phase_seconds={"forward": self._pause},
            rounds=len(live) if self._burst > 1 else 0,
            drafted=(self._burst - 1) * len(live),
            accepted_per_position=(len(live),) * (self._burst - 1),
            generated_tokens=len(live) * self._burst,
            running=len(live),
        )
        return StepOutput(events, stats)

    def _advance(self, live: _NoopOutput) -> TokenEvent:
        request, most = live.request, live.request.sampling.max_tokens or 128
        count = min(self._burst, most - live.done)
        tokens = self._bursts[live.done % len(self._bursts)][:count]
        live.done += count
        finished = None
        if live.done == most:
            del self._live[request.request_id]
            finished = self._finished(live, FinishReason.LENGTH)
        return TokenEvent(
            request_id=request.request_id, token_ids=tokens, from_draft=self._flags[:count], finished=finished
        )

    def _finished(self, live: _NoopOutput, reason: FinishReason) -> FinishedOutput:
        config = self.config
        return FinishedOutput(
            reason=reason,
            prompt_tokens=len(live.request.token_ids),
            completion_tokens=live.done,
            seed=0,
            speculation=SpeculationSettings(
                mode=config.speculation, num_draft_tokens=0, proposer="none", verification=config.verification
            ),
            stats=DraftStats(),
        )


def served(config: EngineConfig, text: str, settings: Mapping[str, float]) -> ServedModel:
    """Return the engine and the embedded tokenizer in the form in which the server expects a model."""
    codec = Codec.load(embedded_target())
    assert codec is not None, "the embedded target has a tokenizer"
    engine = NoopEngine(config, codec, text, int(settings["burst"]), settings["pause"])
    return ServedModel(NAME, None, "none", cast("Engine", engine), codec)
