"""Turns a config into a ready engine, so that no request pays for a first compilation, recording or measurement."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.device_loop.results import Progress, untold
from engine.engine import Engine
from engine.params import SamplingParams
from engine.startup.build import build_engine, pick_device
from engine.startup.calibrate import calibrate, drafters_of, run
from engine.startup.calibration_text import TEXT
from engine.text.codec import Codec

if TYPE_CHECKING:  # for types only: benchmarks/harness/bare.py passes its own class where pydantic is missing
    from engine.config import EngineConfig

log = logging.getLogger(__name__)

# Tokens: attention runs over one split of the keys, over two splits, and over splits of two sizes.
_SHORT, _MIDDLE, _LONG = 16, 300, 5000
_STEPS = 2
_REPETITION = (
    0.125  # share of the calibration time where an earlier process saved its results: the machine may be slower now
)
_GREEDY = SamplingParams()
_CUT = SamplingParams(temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, seed=0)
_WHOLE = SamplingParams(temperature=1.0, seed=0)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Prompts of these sizes, fed and decoded together, with `num_draft` drafts each."""

    prompts: Seq[int]
    num_draft: int = 0
    sampling: SamplingParams = _GREEDY


def rehearsals(engine: Engine) -> Iterator[Rehearsal]:
    """Plain passes of every kind that kernels are compiled for.

    The engine runs plain passes for prompts beside rounds, and for sequences that cannot decode on the device.
    """
    config, longest = engine.config, engine.max_model_len - _STEPS * (1 + engine.config.num_draft_tokens)
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
    config: EngineConfig, progress: Progress = untold, *, calibrates: bool = True, is_successor: bool = False,
    rests: bool = False,
) -> Engine:  # fmt: skip
    """Build an engine and make it ready; with `calibrates`, calibrate it for `warm_up_seconds`.

    A successor calibrates nothing: it takes what an earlier engine of this server learned. On CUDA it compiles its
    passes all the same. `rests`: the caller calls `Engine.rest` while the engine is idle, which then records the rounds
    that it can serve without; an engine that calibrates measures them, and has them all recorded before.

    Raises:
        ModelError: for the reasons given at `build_engine`.
    """
    engine = build_engine(config, progress)
    is_compiled = pick_device(config.device).type == "cuda"
    uses_saved = config.warm_up_seconds > 0
    if is_compiled or not is_successor:
        seconds = config.warm_up_seconds if calibrates and not is_successor else 0.0
        make_ready(
            engine, seconds, progress, is_compiled=is_compiled, uses_saved_calibration=uses_saved,
            records_later=rests and not seconds,
        )  # fmt: skip
    elif uses_saved:
        engine.recall()
    return engine


def make_ready(
    engine: Engine, seconds: float = 0.0, progress: Progress = untold, *, is_compiled: bool = False,
    uses_saved_calibration: bool = False, records_later: bool = False,
) -> None:  # fmt: skip
    """Compile, record, run one request, and calibrate for `seconds`, or for a part of them if it is a repetition.

    Args:
        engine: an idle engine.
        seconds: the time for calibration; 0 for none.
        progress: receives the name of each stage.
        is_compiled: passes are compiled for each kind of shape, as on CUDA.
        uses_saved_calibration: load what an earlier process learned, and save what this one learns for a later process.
        records_later: record only rounds in which all others can run, and leave the others to `Engine.rest`.
    """
    if is_compiled:
        _rehearse(engine, progress)
        engine.rounds.record(progress, later=records_later)
    progress("warming up")
    with engine.rehearsing():  # a first run takes longer, so its time must not enter the cost model
        engine.warm_up()
        _run(engine, Rehearsal([_SHORT], engine.config.num_draft_tokens))
    if uses_saved_calibration and engine.recall():
        seconds *= _REPETITION
    if seconds:
        calibrate(engine, seconds, text=_text(engine))
    engine.scheduler.forget_callers()
    if uses_saved_calibration:
        engine.keep_learned()


def _text(engine: Engine) -> Seq[int]:
    """The calibration text in the target's tokens; empty without a tokenizer."""
    codec = Codec.load(engine.config.target, engine.config.revision)
    return () if codec is None else [t for t in codec.encode(TEXT) if t < engine.vocab_size]


def _rehearse(engine: Engine, progress: Progress) -> None:
    start, every = time.perf_counter(), list(rehearsals(engine))
    with engine.rehearsing():
        for i, one in enumerate(every, 1):
            progress(f"compiling for plain passes: {i} of {len(every)}")
            _run(engine, one)
    log.info("plain passes of %d kinds are compiled, in %.1f s", len(every), time.perf_counter() - start)


def _run(engine: Engine, one: Rehearsal) -> None:
    """Run a rehearsal with each proposer that requests may meet."""
    for name in drafters_of(engine) if one.num_draft else (None,):
        run(engine, one.prompts, one.num_draft, _STEPS, one.sampling, proposer=name)
