"""Calibration before the first request: measures the cost of steps of several shapes, and how many drafts are kept."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from secrets import token_hex

from engine.engine import Engine
from engine.params import SamplingParams, SpeculationMode, SpeculationParams
from engine.stats import Clock
from engine.types import AUTO, FinishReason, Request


@dataclass(frozen=True, slots=True)
class CalibrationShape:
    """A batch of sequences, the drafts and prompt tokens of each, and the number of steps to run."""

    batch: int
    num_draft: int
    prompt: int
    steps: int = 4


# The most informative shapes come first, because a large model has time for only a few of them.
SHAPES = (
    CalibrationShape(1, 0, 16),
    CalibrationShape(1, 4, 16),
    CalibrationShape(1, 8, 128, 12),
    CalibrationShape(8, 0, 16),
    CalibrationShape(8, 4, 16),
    CalibrationShape(1, 4, 512),
    CalibrationShape(1, 1, 16),
    CalibrationShape(32, 0, 16),
    CalibrationShape(32, 2, 16),
    CalibrationShape(1, 0, 512),
    CalibrationShape(4, 8, 128),
    CalibrationShape(1, 8, 16),
    CalibrationShape(16, 1, 64),
    CalibrationShape(4, 0, 512),
)


_GREEDY = SamplingParams()
_NOT_CHOSEN = ("none", "ngram", AUTO)  # names that `auto` does not stand for


def calibrate(engine: Engine, seconds: float, clock: Clock = time.perf_counter, text: Seq[int] = ()) -> None:
    """Run shapes until the time is over; a shape that has begun is finished. The engine must be idle.

    Shapes with drafts are run with each proposer that `auto` may choose, or else with the default proposer: what it
    costs, and how often it is right, is known of each before the first request.

    Prompts are parts of `text`. Without a text, prompts are meaningless tokens, and then the measured acceptance of
    drafts means nothing either.
    """
    assert not engine.has_work, "calibration is for an idle engine"
    start, everyone = clock(), drafters_of(engine)
    for shape in SHAPES:
        for name in everyone if shape.num_draft else (None,):
            if clock() - start >= seconds:
                break
            prompts = [shape.prompt] * shape.batch
            run(engine, prompts, shape.num_draft, shape.steps, text=text, proposer=name)
    engine.end_calibration()


def drafters_of(engine: Engine) -> tuple[str | None, ...]:
    """The proposers that requests meet unless they name one: each that `auto` may choose; or None, the default."""
    if engine.default_proposer != AUTO:
        return (None,)
    return tuple(name for name in engine.proposer_names if name not in _NOT_CHOSEN)


def run(
    engine: Engine, prompts: Seq[int], num_draft: int, steps: int, sampling: SamplingParams = _GREEDY,
    text: Seq[int] = (), proposer: str | None = None,
) -> None:  # fmt: skip
    """Feed prompts of these sizes, as many and as long as fit, run `steps` steps, and cancel the rest.

    The number of steps is fixed, so that the time does not depend on how many drafts are accepted.
    """
    prompts = [min(prompt, engine.max_model_len - 2) for prompt in prompts[: engine.config.max_batch_size]]
    mode = SpeculationMode.FIXED if num_draft else SpeculationMode.OFF
    speculation = SpeculationParams(mode=mode, num_draft_tokens=num_draft, proposer=proposer)
    # Each request has its own cache salt, so that it finds no prefix cached by another request or an earlier run.
    names, salt = [f"calibrate-{i}" for i in range(len(prompts))], token_hex(8)
    passes = -(-sum(prompts) // engine.config.max_batch_tokens)
    reading = 2 * passes  # steps, approximately: the first prompts decode while the last ones are still being fed
    for i, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
        most = min((reading + steps) * (1 + num_draft), engine.max_model_len - prompt)  # room for drafts in every step
        sampled = replace(sampling, max_tokens=most, ignore_eos=True)
        request = Request(
            request_id=name, token_ids=_prompt(engine, i, prompt, text),
            sampling=sampled, speculation=speculation, cache_salt=name + salt,
        )  # fmt: skip
        engine.add(request)
    unread = set(names)
    while unread and engine.has_work:
        unread -= {event.request_id for event in engine.step().events}
    for _ in range(steps):
        if engine.has_work:
            engine.step()
    engine.finish_all(FinishReason.CANCELLED)


def _prompt(engine: Engine, number: int, length: int, text: Seq[int]) -> tuple[int, ...]:
    """Take `length` tokens of the text from an offset that differs per prompt; after its end, go on at its start."""
    if not text:
        return tuple((7 * j + number) % engine.vocab_size for j in range(length))
    return tuple(text[(97 * number + j) % len(text)] for j in range(length))
