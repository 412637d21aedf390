"""Drafts with a chosen acceptance: a real draft model runs, so that its cost counts, and its drafts are replaced.

The continuation of each prompt is known in advance. At each position the draft is either that token or certainly a
different one, as a hash of prompt and position decides. So the drafts are the same at any K, in any batch and in every
round.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.synthetic import agreement
from pilotfish.engine.config import EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.engine.machine.threads import use_threads
from pilotfish.engine.model.runner import vocab_size
from pilotfish.engine.proposers import Proposer
from pilotfish.engine.proposers.sources import draft_sources
from pilotfish.engine.startup.build import assemble, load, pick_device
from pilotfish.engine.startup.calibrate import calibrate
from pilotfish.engine.stats import Forward
from pilotfish.engine.step import Work
from pilotfish.engine.types import Sequence

NAME = "model"  # name of the replayed draft, which replaces a draft model


class Script:
    """The recorded continuations of prompts, and the rate of correct drafts."""

    def __init__(self, rate: float = 0.0) -> None:
        self.rate = rate
        self._known: dict[tuple[int, ...], Seq[int]] = {}
        self._right: dict[tuple[tuple[int, ...], float], NDArray[np.bool_]] = {}

    def record(self, prompt: tuple[int, ...], continuation: Seq[int]) -> None:
        """Record a continuation of a prompt; the longest one is kept."""
        if len(continuation) > len(self._known.get(prompt, ())):
            self._known[prompt] = continuation
            self._right = {key: right for key, right in self._right.items() if key[0] != prompt}

    def drafts(self, sequence: Sequence, count: int, vocab_size: int) -> tuple[int, ...]:
        """Return the next `count` drafts, right or wrong by the rate; past the recorded text, all are wrong."""
        prompt, first = sequence.request.token_ids, sequence.num_generated
        known, right = self._known.get(prompt, ()), self._is_right(prompt)
        drafts = []
        for i in range(first, first + count):
            token = known[i] if i < len(known) else 0
            drafts.append(token if i < len(known) and right[i] else (token + 1) % vocab_size)
        return tuple(drafts)

    def _is_right(self, prompt: tuple[int, ...]) -> NDArray[np.bool_]:
        key = prompt, self.rate
        if key not in self._right:
            seed = zlib.crc32(np.array(prompt, np.int64).tobytes())
            self._right[key] = agreement(len(self._known.get(prompt, ())), self.rate, seed)
        return self._right[key]


class ReplayProposer(Proposer):
    """A proposer that does the work of another proposer and returns the drafts of a script."""

    uses_draft_kv = True
    shares_draft_kv = True

    def __init__(self, inner: Proposer, script: Script, vocab_size: int) -> None:
        self._inner, self._script, self._vocab_size = inner, script, vocab_size

    def propose(self, works: Seq[Work], forwards: list[Forward]) -> list[Work]:
        """Return as many drafts as the inner proposer. Only requests without draft distributions can be replayed."""
        made = self._inner.propose(works, forwards)
        assert not any(work.draft_probs is not None for work in made), "replay is for the coupled rule"
        return [w.with_drafts(self._script.drafts(w.sequence, len(w.drafts), self._vocab_size)) for w in made]


class ReplayModels:
    """A target and a draft that are loaded once for any number of engines, which share only the weights and the script.

    Raises:
        ModelError: A checkpoint cannot be served.
    """

    def __init__(self, config: EngineConfig, script: Script) -> None:
        device, source = pick_device(config.device), draft_sources(config)["model"]
        use_threads(config.threads)
        self.script = script
        self._config = config.model_copy(update={"proposer": NAME})
        self._target = load(config, config.target, config.revision, config.weights, device)
        self._draft = load(config, source.name, source.revision, config.draft_weights or config.weights, device)

    def engine(self, batch: int, max_model_len: int) -> Engine:
        """Return an engine for `batch` sequences of this length that is warmed up and calibrated."""
        sizes = {"max_batch_size": batch, "max_model_len": max_model_len}
        config = self._config.model_copy(update=sizes)
        script, width = self.script, vocab_size(self._target)
        engine = assemble(
            config, self._target, self._draft, wrappers={NAME: lambda inner: ReplayProposer(inner, script, width)}
        )
        with engine.rehearsing():  # as in a server: one-time costs must not enter the cost model
            engine.warm_up()
        calibrate(engine, config.warm_up_seconds)
        return engine
