"""Practice before the first request: what steps of several shapes cost, so that the first ones are planned well."""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine.engine import Engine
from engine.stats import Clock
from engine.types import FinishReason, Request, SamplingParams, SpeculationMode, SpeculationParams


@dataclass(frozen=True, slots=True)
class Shape:
    """So many sequences, each with a prompt and drafts of these sizes, for so many steps."""

    batch: int
    num_draft: int
    prompt: int
    steps: int = 4


# The most telling first: a large model has time for few of them.
SHAPES = (
    Shape(1, 0, 16),
    Shape(1, 4, 16),
    Shape(8, 0, 16),
    Shape(8, 4, 16),
    Shape(1, 4, 512),
    Shape(1, 1, 16),
    Shape(32, 0, 16),
    Shape(32, 2, 16),
    Shape(1, 0, 512),
    Shape(4, 8, 128),
    Shape(1, 8, 16),
    Shape(16, 1, 64),
    Shape(4, 0, 512),
)


def calibrate(engine: Engine, seconds: float, clock: Clock = time.perf_counter) -> None:
    """Run shapes until the time is over; a shape that has begun is finished. For an idle engine."""
    assert not engine.has_work, "calibration is for an idle engine"
    start = clock()
    for shape in SHAPES:
        if clock() - start >= seconds:
            break
        _run(engine, shape)
    engine.end_practice()


def _run(engine: Engine, shape: Shape) -> None:
    """Prompts, so many steps, and the end: whether drafts are kept does not decide how long it takes."""
    prompt = min(shape.prompt, engine.max_model_len - 2)
    most = min(shape.steps * (1 + shape.num_draft), engine.max_model_len - prompt)  # room for drafts in every step
    mode = SpeculationMode.FIXED if shape.num_draft else SpeculationMode.OFF
    speculation = SpeculationParams(mode=mode, num_draft_tokens=shape.num_draft)
    sampling = SamplingParams(max_tokens=most, ignore_eos=True)
    # Each of another tenant, so that none finds what the one before has fed.
    names = [f"calibrate-{i}" for i in range(min(shape.batch, engine.config.max_batch_size))]
    for i, name in enumerate(names):
        prompt_ids = tuple((7 * j + i) % engine.vocab_size for j in range(prompt))
        request = Request(
            request_id=name, token_ids=prompt_ids, sampling=sampling, speculation=speculation, cache_salt=name
        )
        engine.add(request)
    reading = set(names)
    while reading and engine.has_work:
        reading -= {event.request_id for event in engine.step().events}
    for _ in range(shape.steps):
        if engine.has_work:
            engine.step()
    engine.finish_all(FinishReason.CANCELLED)
