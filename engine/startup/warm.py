"""Builds a ready engine from a config. Work that only speeds up later requests may be deferred to idle time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

from pilotfish.engine.device_loop.results import Progress, no_progress
from pilotfish.engine.engine import Engine
from pilotfish.engine.machine.mapped import release_freed
from pilotfish.engine.params import SamplingParams
from pilotfish.engine.startup.build import build_engine, pick_device
from pilotfish.engine.startup.calibrate import Calibration, drafters_of, run
from pilotfish.engine.text.codec import CALIBRATION_TEXT, Codec

if TYPE_CHECKING:  # for types only: benchmarks/harness/bare.py passes its own class where pydantic is missing
    from pilotfish.engine.config import EngineConfig

log = logging.getLogger(__name__)

# Tokens: attention runs over one split of the keys, over two splits, and over splits of two sizes.
_SHORT, _MIDDLE, _LONG = 16, 300, 5000
_STEPS = 2
# Share of the calibration time if an earlier process saved its results; the machine may be slower now.
_REPETITION = 0.125
_GREEDY = SamplingParams()
_CUT = SamplingParams(temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, seed=0)
_WHOLE = SamplingParams(temperature=1.0, seed=0)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Prompts of these sizes, processed together, with `num_draft` drafts each."""

    prompts: Seq[int]
    num_draft: int = 0
    sampling: SamplingParams = _GREEDY


def rehearsals(engine: Engine) -> Iterator[Rehearsal]:
    """Plain passes of every kind for which kernels are compiled.

    The engine runs plain passes for prompts beside rounds, and for sequences that rounds do not support.
    """
    config, longest = engine.config, engine.facts.limits.max_model_len - _STEPS * (1 + engine.config.num_draft_tokens)
    chunk, drafts = config.max_batch_tokens, config.num_draft_tokens
    for sampling in (_GREEDY, _WHOLE, _CUT):
        yield Rehearsal([_SHORT], drafts, sampling)
    yield Rehearsal([chunk])  # a prompt that fills a pass
    yield Rehearsal([_SHORT, 2 * chunk], drafts)  # one decodes beside the chunks of another
    for count in sorted({1, min(8, config.max_batch_size), config.max_batch_size}):
        for length in (_SHORT, _MIDDLE):
            if length < longest:
                yield Rehearsal([length] * count)
                yield Rehearsal([length] * count, drafts)
    if longest > _LONG:
        yield Rehearsal([_LONG])
        yield Rehearsal([_LONG, *[_SHORT] * (config.max_batch_size - 1)])


def load(
    config: EngineConfig, progress: Progress = no_progress, *, calibrates: bool = True, is_successor: bool = False,
    defers: bool = False,
) -> Engine:  # fmt: skip
    """Build an engine and make it ready; with `calibrates`, calibrate it for `warm_up_seconds`.

    A successor reuses values learned by an earlier engine of this server; on CUDA it still compiles its passes.

    `defers`: the caller calls `Engine.idle_tick` while the engine is idle, which then runs work that requests do not
    depend on: on a CPU the calibration, of a successor only if nothing was saved; on CUDA the recording of rounds. An
    engine that calibrates on CUDA first records all rounds.

    Raises:
        ModelError: as in `build_engine`.
    """
    engine = build_engine(config, progress)
    is_compiled = pick_device(config.device).type == "cuda"
    measures = calibrates and not (is_successor and (is_compiled or not defers))
    make_ready(
        engine, config.warm_up_seconds if measures else 0.0, progress, is_compiled=is_compiled,
        uses_saved_calibration=config.warm_up_seconds > 0, is_successor=is_successor, defers=defers,
    )  # fmt: skip
    return engine


def make_ready(
    engine: Engine, seconds: float = 0.0, progress: Progress = no_progress, *, is_compiled: bool = False,
    uses_saved_calibration: bool = False, is_successor: bool = False, defers: bool = False,
) -> None:  # fmt: skip
    """Compile, record, run one request, and calibrate for `seconds`, or for a part of them if results were saved.

    Args:
        engine: an idle engine.
        seconds: the time for calibration; 0 for none.
        progress: receives the name of each stage.
        is_compiled: passes are compiled for each kind of shape, as on CUDA.
        uses_saved_calibration: load the values learned by an earlier process, and save those of this one.
        is_successor: an earlier engine has run; if nothing has to be compiled, no request is run.
        defers: defer work to `Engine.idle_tick`, as in `load`.
    """
    if is_compiled:
        _rehearse(engine, progress)
        engine.rounds.record(progress, later=defers and not seconds)
    if is_compiled or not is_successor:
        progress("warming up")
        with engine.rehearsing(), engine.practising():  # the first run takes longer, so its time must not be learned
            _run(engine, Rehearsal([_SHORT], engine.config.num_draft_tokens))
    if uses_saved_calibration and engine.recall():
        seconds *= 0.0 if is_successor else _REPETITION
    calibration = Calibration(engine, seconds, text=cache(partial(_text, engine)))
    if defers and not is_compiled:
        engine.calibrate = _in_parts(engine, calibration, saves=uses_saved_calibration, recalls=is_successor)
        return
    while not calibration.is_over:
        calibration.go_on()
    if uses_saved_calibration:
        engine.keep_learned()


def _in_parts(
    engine: Engine, calibration: Calibration, *, saves: bool, recalls: bool
) -> Callable[[Callable[[], bool]], bool]:
    """`calibration` in parts for `Engine.idle_tick`. At its end the learned values are saved.

    `recalls`: first load values that another engine has saved since this one was loaded; then there is nothing to do.
    """

    def go_on(is_wanted: Callable[[], bool]) -> bool:
        nonlocal calibration, recalls
        if calibration.is_over:
            return False
        if recalls and engine.recall():
            calibration = Calibration(engine, 0.0)
            return False
        recalls = False
        calibration.go_on(is_wanted)
        if calibration.is_over:
            log.info("calibration finished")
            if saves:
                engine.keep_learned()
        return not calibration.is_over

    return go_on


def _text(engine: Engine) -> Seq[int]:
    """The calibration text in the target's tokens; empty without a tokenizer."""
    if engine.calibration_text is not None:
        return engine.calibration_text
    found = Codec.load(engine.config.target, engine.config.revision, kept=False)
    tokens = () if found is None else [t for t in found.encode(CALIBRATION_TEXT) if t < engine.facts.limits.vocab_size]
    del found
    release_freed()  # the tokenizer may take more memory than a model
    return tokens


def _rehearse(engine: Engine, progress: Progress) -> None:
    start, every = time.perf_counter(), list(rehearsals(engine))
    with engine.rehearsing(), engine.practising():
        for i, one in enumerate(every, 1):
            progress(f"compiling for plain passes: {i} of {len(every)}")
            _run(engine, one)
    log.info("compiled plain passes of %d kinds in %.1f s", len(every), time.perf_counter() - start)


def _run(engine: Engine, one: Rehearsal) -> None:
    """Run a rehearsal with each proposer that requests may use, or without drafts."""
    names = drafters_of(engine) if one.num_draft else ()
    for name in names or (None,):
        run(engine, one.prompts, one.num_draft if names else 0, _STEPS, one.sampling, proposer=name)
