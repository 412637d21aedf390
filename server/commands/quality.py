"""`pilotfish quality`: compares the served model with float32 of the same checkpoint. Contains no tensor code.

Texts are compared one after another, from different sources by turns, until all are compared or the time is over.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pilotfish.engine.errors import ModelError
from pilotfish.server.commands.arguments import at_least
from pilotfish.server.commands.progress import Progress, Stopped, TimeBudget
from pilotfish.server.config import ServerConfig

if TYPE_CHECKING:
    from pilotfish.engine.config import EngineConfig
    from pilotfish.engine.startup.quality import Quality

ERRORS = (ModelError, OSError, ValueError)  # a ValidationError is a ValueError, too
_TOPICS = 40  # of Python's manual


_ABOUT = (
    """Compare the served model with float32 of its checkpoint. Accepts the options, variables and file of `serve`."""
)

OPTIONS: dict[str, dict[str, Any]] = {
    "seconds": {"type": at_least(1), "default": 45, "help": "time for loading and comparing (default: %(default)s)"},
    "text": {
        "type": Path,
        "action": "append",
        "default": [],
        "metavar": "FILE",
        "help": "text to compare on; repeatable (default: English prose and code of Python's installation)",
    },
    "tokens": {"type": at_least(2), "default": 2048, "help": "maximum number of tokens (default: %(default)s)"},
    "length": {"type": at_least(2), "default": 512, "help": "maximum tokens per text (default: %(default)s)"},
    "reference": {"metavar": "MODEL", "help": "the original of a checkpoint that was saved with quantised weights"},
    "json": {"action": "store_true", "help": "print JSON"},
}


def run(arguments: Sequence[str], progress: Progress) -> tuple[str, bool]:
    """Measure and return the table. Raises ValueError if there is no text."""
    asked, options = ServerConfig.load_with("quality", _ABOUT, OPTIONS, arguments)
    budget, config = TimeBudget(asked.seconds), options.engine()
    progress(f"loading {config.target}")

    from pilotfish.engine.startup.quality import measure
    from pilotfish.engine.text.codec import Codec

    codec = Codec.load(config.target, config.revision)
    if codec is None:
        raise ValueError(f"{config.target!r} has no tokenizer, which this command requires")
    texts = [path.read_text("utf-8") for path in asked.text] or default_texts()
    pieces = _cut([codec.encode(text) for text in texts], asked.length, asked.tokens)
    total = sum(map(len, pieces))
    found: list[Quality] = []

    def shown() -> str:
        return _shown(found[-1], total, config, as_json=asked.json)

    try:
        for result in measure(config, _in_time(pieces, budget, progress), asked.reference, progress):
            found.append(result)
            progress.update(result.tokens, f"KL {result.kl:.5f} nats")
    except Stopped as stop:
        if found:
            stop.report, stop.kept = shown(), "the table has the texts so far"
        raise
    return shown(), True


def _in_time(pieces: Sequence[list[int]], budget: TimeBudget, progress: Progress) -> Iterator[list[int]]:
    """Yield the texts that can be compared in time, at least one."""
    progress.begin("comparing tokens", sum(map(len, pieces)), seconds=budget.seconds - budget.elapsed)
    for piece in pieces:
        if not budget.fits(len(piece)):
            return
        with budget.spending(len(piece)):
            yield piece


def _shown(found: Quality, total: int, config: EngineConfig, *, as_json: bool) -> str:
    if not as_json:
        more = "" if found.tokens == total else f"\n{found.tokens} of {total} tokens; a larger --seconds allows more"
        return as_text(found) + more
    reference, served = found.perplexities
    perplexities = {"reference_perplexity": reference, "served_perplexity": served}
    model = {"model": str(config.target), "weights": config.weights, "planned_tokens": total}
    return json.dumps(model | asdict(found) | perplexities, indent=2)


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
