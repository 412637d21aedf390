"""Calibration of an idle engine: measures step times of several shapes, and acceptance."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from secrets import token_hex

from pilotfish.engine.engine import Engine
from pilotfish.engine.params import SamplingParams, SpeculationMode, SpeculationParams
from pilotfish.engine.stats import Clock
from pilotfish.engine.types import AUTO, FinishReason, Request


@dataclass(frozen=True, slots=True)
class CalibrationShape:
    """A batch size, the drafts and prompt tokens per sequence, and the number of steps."""

    batch: int
    num_draft: int
    prompt: int
    steps: int = 4


# The most informative shapes come first, because a large model has time for only a few of them.
SHAPES = tuple(
    CalibrationShape(*sizes)
    for sizes in (
        (1, 0, 16), (1, 4, 16), (1, 8, 128, 12), (8, 0, 16), (8, 4, 16), (1, 4, 512), (1, 1, 16), (32, 0, 16),
        (32, 2, 16), (1, 0, 512), (4, 8, 128), (1, 8, 16), (16, 1, 64), (4, 0, 512),
    )
)  # fmt: skip

_GREEDY = SamplingParams()
_NOT_CHOSEN = ("none", "ngram", AUTO)  # names that are not part of `auto`


class Calibration:
    """The remaining shapes, and the remaining time; requests are not affected.

    Shapes with drafts are run with each proposer that `auto` may choose, or else with the default proposer, to measure
    cost and acceptance of each.

    Prompts are parts of `text`. Without a text, prompts are arbitrary tokens, and the measured acceptance is
    meaningless.
    """

    def __init__(
        self, engine: Engine, seconds: float, clock: Clock = time.perf_counter, text: Callable[[], Seq[int]] = tuple
    ) -> None:
        self._engine, self._left, self._clock, self._text = engine, seconds, clock, text
        everyone = drafters_of(engine)
        self._todo = deque((shape, name) for shape in SHAPES for name in (everyone if shape.num_draft else (None,)))

    @property
    def is_over(self) -> bool:
        """Whether all shapes have been run, or the time is used up."""
        return self._left <= 0 or not self._todo

    def go_on(self, is_wanted: Callable[[], bool] = lambda: False) -> None:
        """Run one shape; if `is_wanted` after a step, abandon it and start it again the next time."""
        engine, start = self._engine, self._clock()
        assert not engine.has_work, "calibration is for an idle engine"
        if not self.is_over:
            shape, name = self._todo[0]
            prompts = [shape.prompt] * shape.batch
            with engine.practising():
                is_done = not self._has_room(shape) or run(
                    engine, prompts, shape.num_draft, shape.steps, text=self._text(), proposer=name, is_wanted=is_wanted
                )
            if is_done:
                self._todo.popleft()
            self._left -= self._clock() - start

    def _has_room(self, shape: CalibrationShape) -> bool:
        """Whether the shape fits without evicting from the prefix caches."""
        engine, scheduler = self._engine, self._engine.scheduler
        batch = min(shape.batch, engine.config.max_batch_size)
        output = _longest_output(engine, [shape.prompt] * batch, shape.num_draft, shape.steps)
        tokens = min(shape.prompt + output, engine.facts.limits.max_model_len)
        return all(pool.has_empty(batch, tokens) for pool in (scheduler.target_pool, *scheduler.draft_pools.values()))


def calibrate(engine: Engine, seconds: float, clock: Clock = time.perf_counter, text: Seq[int] = ()) -> None:
    """Run shapes until the time is over, finishing the last. The engine must be idle."""
    calibration = Calibration(engine, seconds, clock, lambda: text)
    while not calibration.is_over:
        calibration.go_on()


def drafters_of(engine: Engine) -> tuple[str | None, ...]:
    """The proposers of requests without an explicit one: those that `auto` may choose; or None, the default."""
    if engine.facts.default_proposer != AUTO:
        return (None,)
    return tuple(name for name in engine.facts.proposer_names if name not in _NOT_CHOSEN)


def run(
    engine: Engine, prompts: Seq[int], num_draft: int, steps: int, sampling: SamplingParams = _GREEDY,
    text: Seq[int] = (), proposer: str | None = None, is_wanted: Callable[[], bool] = lambda: False,
) -> bool:  # fmt: skip
    """Feed prompts of these sizes, as far as they fit, run `steps` steps, and cancel the rest.

    The number of steps is fixed, so that the time does not depend on acceptance. Returns False if `is_wanted` ended it
    earlier.
    """
    prompts = [min(prompt, engine.facts.limits.max_model_len - 2) for prompt in prompts[: engine.config.max_batch_size]]
    mode = SpeculationMode.FIXED if num_draft else SpeculationMode.OFF
    speculation = SpeculationParams(mode=mode, num_draft_tokens=num_draft, proposer=proposer)
    # Each request has its own cache salt, so that it does not use prefixes of other requests or earlier runs.
    names, salt = [f"calibrate-{i}" for i in range(len(prompts))], token_hex(8)
    output = _longest_output(engine, prompts, num_draft, steps)
    for i, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
        sampled = replace(sampling, max_tokens=min(output, engine.facts.limits.max_model_len - prompt), ignore_eos=True)
        request = Request(
            request_id=name, token_ids=_prompt(engine, i, prompt, text),
            sampling=sampled, speculation=speculation, cache_salt=name + salt,
        )  # fmt: skip
        engine.add(request)
    unread, is_cut = set(names), False
    while engine.has_work and (unread or steps) and not is_cut:
        steps -= not unread
        unread -= {event.request_id for event in engine.step().events}
        is_cut = is_wanted()
    engine.finish_all(FinishReason.CANCELLED)
    return not is_cut


def _longest_output(engine: Engine, prompts: Seq[int], num_draft: int, steps: int) -> int:
    """Tokens of each output, so that there is room for drafts in every step."""
    passes = -(-sum(prompts) // engine.config.max_batch_tokens)
    reading = 2 * passes  # steps, approximately: the first prompts decode while the last are being fed
    return (reading + steps) * (1 + num_draft)


def _prompt(engine: Engine, number: int, length: int, text: Seq[int]) -> tuple[int, ...]:
    """Take `length` tokens of the text from an offset that differs per prompt, cyclically."""
    if not text:
        return tuple((7 * j + number) % engine.facts.limits.vocab_size for j in range(length))
    return tuple(text[(97 * number + j) % len(text)] for j in range(length))
