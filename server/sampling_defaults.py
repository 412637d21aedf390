"""Sampling parameters that a checkpoint recommends: `generation_config.json`, or the metadata of a GGUF file.

They are the defaults of OpenAI's and Anthropic's routes. Independent of requests and protocol.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pilotfish.engine.config import Bounds, EngineConfig
from pilotfish.engine.errors import shown
from pilotfish.engine.model.bounded import find_file
from pilotfish.engine.model.gguf.container import open_gguf
from pilotfish.engine.params import SamplingParams
from pilotfish.engine.request.validation import violations
from pilotfish.engine.types import Request

_FILE = "generation_config.json"
# Parameters by their keys in the file, and in the metadata of GGUF files (llama.cpp's converter copies them).
_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_GGUF_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_WHOLE = ("top_k", "max_tokens")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Parameters of `SamplingParams` by name.

    Args:
        values: the defaults.
        source: the file that they are from.
        problems: why entries of the file are not used.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    source: str = ""
    problems: tuple[str, ...] = ()

    @classmethod
    def load(cls, config: EngineConfig) -> SamplingDefaults:
        """Read those of the target. An entry that cannot be used becomes a problem, not an error."""
        gguf = open_gguf(config.target, config.revision)
        if gguf is not None:
            given = {key: gguf.metadata.get(key) for key in _GGUF_KEYS}
            given |= {key: gguf.get(key, str) for key, value in given.items() if isinstance(value, slice)}  # a text
            return cls._of(gguf.path.name, given, _GGUF_KEYS, config)
        path = find_file(config.target, _FILE, config.revision)
        if path is None:
            return cls()
        try:
            found = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            return cls(source=_FILE, problems=(f"cannot be read: {error}",))
        if not isinstance(found, dict):
            return cls(source=_FILE, problems=("is not a JSON object",))
        return cls._of(_FILE, found, _KEYS, config)

    @classmethod
    def _of(
        cls, source: str, given: Mapping[str, Any], keys: Mapping[str, str], bounds: Bounds
    ) -> SamplingDefaults:  # fmt: skip
        values, problems = dict[str, float](), list[str]()
        for key, name in keys.items():
            if (value := given.get(key)) is None:
                continue
            problem = _problem(name, value, bounds)
            if problem is None:
                values[name] = max(value, 0)  # top_k -1 means the same as 0
            else:
                problems.append(f"{key} {problem}")
        return cls(values, source, tuple(problems))


NO_DEFAULTS = SamplingDefaults()


def _problem(name: str, value: Any, bounds: Bounds) -> str | None:
    """Return why a value cannot be a default; None if it can."""
    if isinstance(value, bool) or not isinstance(value, int if name in _WHOLE else int | float):
        return f"is {shown(value)}; expected {'an integer' if name in _WHOLE else 'a number'}"
    if name == "top_k" and value == -1:
        return None
    named: dict[str, Any] = {name: value, "fit_context": True}
    sampling = SamplingParams(**named)
    found = violations(Request(token_ids=(0,), sampling=sampling), bounds, 1, 2)
    return next((violation.problem for violation in found), None)
