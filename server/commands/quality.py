"""`pilotfish quality`: compares the served model with float32 of the same checkpoint. Contains no tensor code."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pilotfish.engine.errors import ModelError
from pilotfish.server.commands.arguments import at_least
from pilotfish.server.config import ServerConfig

if TYPE_CHECKING:
    from pilotfish.engine.startup.quality import Quality

ERRORS = (ModelError, OSError, ValueError)  # a ValidationError is a ValueError, too
_TOPICS = 40  # of Python's manual


_ABOUT = """Compare the served model with float32 of its checkpoint. Accepts the options, variables and file of `serve`.

Also: --text FILE (repeatable), --tokens (in total), --length (tokens per text), --reference MODEL (the original of a
checkpoint that was saved with quantised weights), and --json (print JSON).
"""


def run(arguments: Sequence[str], progress: Callable[[str], None]) -> tuple[str, bool]:
    """Measure and return the table; `progress` receives progress messages. Raises ValueError if there is no text."""
    from pilotfish.engine.startup.quality import measure
    from pilotfish.engine.text.codec import Codec

    own: dict[str, dict[str, Any]] = {
        "text": {"type": Path, "action": "append", "default": []},
        "tokens": {"type": at_least(2), "default": 2048},
        "length": {"type": at_least(2), "default": 512},
        "reference": {},
        "json": {"action": "store_true"},
    }
    asked, options = ServerConfig.load_with("quality", _ABOUT, own, arguments)
    config = options.engine()
    codec = Codec.load(config.target, config.revision)
    if codec is None:
        raise ValueError(f"{config.target!r} has no tokenizer, which this command requires")
    texts = [path.read_text("utf-8") for path in asked.text] or default_texts()
    pieces = _cut([codec.encode(text) for text in texts], asked.length, asked.tokens)
    found = measure(config, pieces, asked.reference, progress)
    if asked.json:
        reference, served = found.perplexities
        perplexities = {"reference_perplexity": reference, "served_perplexity": served}
        model = {"model": str(config.target), "weights": config.weights}
        return json.dumps(model | asdict(found) | perplexities, indent=2), True
    return as_text(found), True


def _cut(texts: Sequence[Sequence[int]], length: int, tokens: int) -> list[list[int]]:
    """Cut texts into pieces of at most `length` tokens, `tokens` in total, beginning with the first of every text."""
    whole = [list(text) for text in texts]
    starts = range(0, max(map(len, whole), default=0), length)
    left, taken = tokens, list[list[int]]()
    for piece in (text[start : start + length] for start in starts for text in whole):
        if len(piece) > 1 and left > 1:
            taken.append(piece[:left])
            left -= len(taken[-1])
    if not taken:
        raise ValueError("the texts have fewer than 2 tokens")
    return taken


def default_texts() -> list[str]:
    """English prose and code from Python's own installation: its manual and two modules of its library."""
    import heapq
    import textwrap
    from pydoc_data.topics import topics

    return [*map(inspect.getsource, (heapq, textwrap)), *(str(topics[name]) for name in sorted(topics)[:_TOPICS])]


def as_text(found: Quality) -> str:
    """Format the results as aligned lines."""
    reference, served = found.perplexities
    loss = f"{found.served_nll:.4f} nats per token; float32 {found.reference_nll:.4f}"
    lines = [
        ("tokens", f"{found.tokens}"),
        ("KL to float32", f"{found.kl:.5f} nats (99% of tokens at most {found.kl_99:.5f})"),
        ("same most likely token", f"{100 * found.same_top:.2f} %"),
        ("log-probability of the text's token", f"differs by {found.log_probability_difference:.4f} nats on average"),
        ("loss", f"{loss} ({found.served_nll - found.reference_nll:+.4f})"),
        ("perplexity", f"{served:.3f}; float32 {reference:.3f}"),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)
