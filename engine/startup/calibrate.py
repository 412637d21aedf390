"""Calibration of an idle engine: measures the cost of steps of several shapes, and how many drafts are kept."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
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


class Calibration:
    """The shapes that are still to be run, and the time that is left for them; no request notices any of it.

    Shapes with drafts are run with each proposer that `auto` may choose, or else with the default proposer: what it
    costs, and how often it is right, is measured of each.

    Prompts are parts of `text`. Without a text, prompts are meaningless tokens, and then the measured acceptance of
    drafts means nothing either.
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
        """Run one shape; if `is_wanted` after a step, break it off and begin it again the next time."""
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
        """Whether the shape fits beside all that the prefix caches keep for requests."""
        engine, scheduler = self._engine, self._engine.scheduler
        batch = min(shape.batch, engine.config.max_batch_size)
        output = _longest_output(engine, [shape.prompt] * batch, shape.num_draft, shape.steps)
        tokens = min(shape.prompt + output, engine.max_model_len)
        return all(pool.has_empty(batch, tokens) for pool in (scheduler.target_pool, *scheduler.draft_pools.values()))


def calibrate(engine: Engine, seconds: float, clock: Clock = time.perf_counter, text: Seq[int] = ()) -> None:
    """Run shapes until the time is over; a shape that has begun is finished. The engine must be idle."""
    calibration = Calibration(engine, seconds, clock, lambda: text)
    while not calibration.is_over:
        calibration.go_on()


def drafters_of(engine: Engine) -> tuple[str | None, ...]:
    """The proposers that requests meet unless they name one: each that `auto` may choose; or None, the default."""
    if engine.default_proposer != AUTO:
        return (None,)
    return tuple(name for name in engine.proposer_names if name not in _NOT_CHOSEN)


def run(
    engine: Engine, prompts: Seq[int], num_draft: int, steps: int, sampling: SamplingParams = _GREEDY,
    text: Seq[int] = (), proposer: str | None = None, is_wanted: Callable[[], bool] = lambda: False,
) -> bool:  # fmt: skip
    """Feed prompts of these sizes, as many and as long as fit, run `steps` steps, and cancel the rest.

    The number of steps is fixed, so that the time does not depend on how many drafts are accepted. Returns False if
    `is_wanted` ended it after an earlier step.
    """
    prompts = [min(prompt, engine.max_model_len - 2) for prompt in prompts[: engine.config.max_batch_size]]
    mode = SpeculationMode.FIXED if num_draft else SpeculationMode.OFF
    speculation = SpeculationParams(mode=mode, num_draft_tokens=num_draft, proposer=proposer)
    # Each request has its own cache salt, so that it finds no prefix cached by another request or an earlier run.
    names, salt = [f"calibrate-{i}" for i in range(len(prompts))], token_hex(8)
    output = _longest_output(engine, prompts, num_draft, steps)
    for i, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
        sampled = replace(sampling, max_tokens=min(output, engine.max_model_len - prompt), ignore_eos=True)
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
    reading = 2 * passes  # steps, approximately: the first prompts decode while the last ones are still being fed
    return (reading + steps) * (1 + num_draft)


def _prompt(engine: Engine, number: int, length: int, text: Seq[int]) -> tuple[int, ...]:
    """Take `length` tokens of the text from an offset that differs per prompt; after its end, go on at its start."""
    if not text:
        return tuple((7 * j + number) % engine.vocab_size for j in range(length))
    return tuple(text[(97 * number + j) % len(text)] for j in range(length))


TEXT = '''
def read_records(path, separator=","):
    """Read a file of records, one a line, and return them as a list of dictionaries.

    The first line names the fields. Lines that are empty are skipped. A line with more or fewer values than there
    are fields raises a ValueError that says which line it is.
    """
    with open(path, encoding="utf-8") as file:
        lines = [line.rstrip("\\n") for line in file]
    names = lines[0].split(separator)
    records = []
    for number, line in enumerate(lines[1:], 2):
        if not line:
            continue
        values = line.split(separator)
        if len(values) != len(names):
            raise ValueError(f"line {number} has {len(values)} values, expected {len(names)}")
        records.append(dict(zip(names, values)))
    return records


class Counter:
    """Counts how often each key was seen."""

    def __init__(self, keys=()):
        self._counts = {}
        for key in keys:
            self.add(key)

    def add(self, key, times=1):
        """Count a key once, or as many times as given."""
        if times < 0:
            raise ValueError("times must not be negative")
        self._counts[key] = self._counts.get(key, 0) + times

    def most_common(self, number=None):
        """Return the keys that were seen most often, with their counts, the most frequent first."""
        items = sorted(self._counts.items(), key=lambda item: item[1], reverse=True)
        if number is None:
            return items
        return items[:number]

    def total(self):
        """Return how many keys were counted in all."""
        return sum(self._counts.values())


The harbour lies on the north side of the bay, where the river has carried sand and stones for many centuries. In the
morning the boats go out with the tide, and in the evening they come back with what they have caught. Most of it is
sold on the same day. Whoever wants to see the market should come early, because the best places are taken by seven
o'clock and most of the fish is gone by nine. The old town hall is a short walk from the market. It was built in the
year after the great fire, and its tower can be seen from far away. From the top of the tower one sees the whole town,
the harbour and the islands beyond it.


def test_counter_counts():
    counter = Counter("abracadabra")
    assert counter.total() == 11
    assert counter.most_common(1) == [("a", 5)]


def test_counter_refuses_negative_times():
    counter = Counter()
    with raises(ValueError):
        counter.add("a", times=-1)
    assert counter.total() == 0
'''
