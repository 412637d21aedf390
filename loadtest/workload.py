"""The requests of the load tests: prompts of many lengths, cut from available source code, and their options."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random

from client.options import GenerateOptions

# Modules of the standard library: text that the embedded pair can continue, available wherever Python is.
_SOURCES = (json.decoder, json.encoder, textwrap)
MEDIAN_PROMPT, SPREAD = 160, 0.7  # characters, and the standard deviation of their logarithm
LONG_PROMPT = 1600  # characters; with the longest output at most the 1,024 tokens that the embedded pair supports
MAX_TOKENS = (16, 64)  # minimum and maximum output length of a request
SHARED = 900  # characters of a prefix that many prompts share
NUM_SHARED = 4  # number of such prefixes


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    prompt: str
    options: GenerateOptions = field(default_factory=GenerateOptions)
    deadline: float | None = None  # seconds
    patience: float | None = None  # seconds after which the caller cancels


Workload = Callable[[Random], Ask]


@cache
def corpus() -> str:
    """Return the text from which prompts are cut."""
    return "\n".join(Path(str(source.__file__)).read_text("utf-8") for source in _SOURCES)


def _cut(random: Random, characters: int) -> str:
    """Return a piece of the text of this length that starts at the beginning of a line."""
    text = corpus()
    start = text.rindex("\n", 0, random.randrange(1000, len(text) - characters)) + 1
    return text[start : start + characters]


def _options(random: Random) -> GenerateOptions:
    """Choose an output length, so that the work of a request does not depend on what the model generates."""
    return {"max_tokens": random.randint(*MAX_TOKENS), "ignore_eos": True}


def steady(random: Random) -> Ask:
    """Prompts with log-normal lengths."""
    characters = min(LONG_PROMPT, max(8, round(random.lognormvariate(0, SPREAD) * MEDIAN_PROMPT)))
    return Ask(_cut(random, characters), _options(random))


def long_prompts(random: Random) -> Ask:
    """One in four prompts is long."""
    return Ask(_cut(random, LONG_PROMPT), _options(random)) if random.random() < 0.25 else steady(random)


def mixed_priorities(random: Random) -> Ask:
    """Three levels of priority."""
    ask = steady(random)
    return Ask(ask.prompt, {**ask.options, "priority": random.choice((-5, 0, 5))})


def cancels(random: Random) -> Ask:
    """One in three callers cancels early."""
    ask = steady(random)
    return Ask(ask.prompt, ask.options, patience=random.uniform(0, 0.5) if random.random() < 1 / 3 else None)


def shared_prefixes(random: Random) -> Ask:
    """All prompts begin with one of a few long prefixes."""
    prefix = _cut(Random(random.randrange(NUM_SHARED)), SHARED)
    return Ask(prefix + steady(random).prompt[:200], _options(random))


def long_outputs(random: Random) -> Ask:
    """Outputs that are four times as long: fewer requests keep the server busy, so the driver is no bottleneck."""
    most = 4 * random.randint(*MAX_TOKENS)
    return Ask(steady(random).prompt, {"max_tokens": most, "ignore_eos": True})


def sampled(random: Random) -> Ask:
    """Sampling with temperature and a seed."""
    ask = steady(random)
    return Ask(ask.prompt, {**ask.options, "temperature": 0.8, "seed": random.randrange(2**32)})


WORKLOADS: dict[str, Workload] = {
    workload.__name__: workload
    for workload in (steady, long_prompts, long_outputs, mixed_priorities, cancels, shared_prefixes, sampled)
}
