"""The workload: prompts of many lengths, cut from the source code of Python's standard library."""

from __future__ import annotations

import json
import textwrap
from functools import cache
from pathlib import Path
from random import Random

from pilotfish.client.options import GenerateOptions

_SOURCES = (json.decoder, json.encoder, textwrap)
_MEDIAN, _SPREAD = 160, 0.7  # characters, and the standard deviation of their logarithm
LONGEST_PROMPT = 1600  # characters; with the longest output at most the 1,024 tokens that the embedded pair supports
MAX_TOKENS = (16, 64)  # minimum and maximum output length of a request
LONG = 4  # factor of output lengths with which fewer requests fill the server, so that the client is no bottleneck


@cache
def corpus() -> str:
    """Return the text from which prompts are cut."""
    return "\n".join(Path(str(source.__file__)).read_text("utf-8") for source in _SOURCES)


def request(random: Random, times: int = 1) -> tuple[str, GenerateOptions]:
    """Draw a prompt of log-normal length that starts at a line, and an output length, multiplied by `times`.

    End tokens are ignored, so that the work of a request does not depend on the output.
    """
    characters = min(LONGEST_PROMPT, max(8, round(random.lognormvariate(0, _SPREAD) * _MEDIAN)))
    text = corpus()
    start = text.rindex("\n", 0, random.randrange(1000, len(text) - characters)) + 1
    return text[start : start + characters], {"max_tokens": times * random.randint(*MAX_TOKENS), "ignore_eos": True}
