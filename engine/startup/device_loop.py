"""Chooses the loop: rounds on the device where they can run, else plain steps, with the reason in the log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from engine.attention import paged
from engine.device_loop.graph_cache import allows_rounds
from engine.device_loop.graphs import Graphs
from engine.device_loop.layout import DeviceModel
from engine.device_loop.loop import RoundLoop
from engine.device_loop.round import RoundOps
from engine.errors import ModelError
from engine.kernels import faults, has_triton, reference
from engine.model.checkpoint import longrope_border, positions
from engine.model.decoder.decoder import is_batch_invariant
from engine.model.runner import ModelRunner, Runner
from engine.startup.memory import graph_budget

if TYPE_CHECKING:  # for types only: benchmarks/harness/bare.py passes its own class where pydantic is missing
    from engine.config import EngineConfig

log = logging.getLogger(__name__)


def wants_rounds(config: EngineConfig, device: torch.device) -> bool:
    """Whether to use rounds if they can run. On a CPU they save no waiting, so they run only when asked for."""
    return allows_rounds(config) and (config.loop == "rounds" or device.type == "cuda")


def rounds_for(
    config: EngineConfig, target: Runner, draft: ModelRunner | None, longest: int, drafts_for: frozenset[str],
    ops: RoundOps | None = None,
) -> RoundLoop | None:  # fmt: skip
    """Build rounds of `target` and `draft` and try them once; None where they are not wanted or cannot run.

    Raises:
        ModelError: rounds were asked for and cannot run.
    """
    if config.tensor_parallel_size > 1:
        log.info("loop: plain (rounds do not support tensor parallelism)")
        return None
    if config.loop == "plain" or (isinstance(target, ModelRunner) and not wants_rounds(config, target.device)):
        log.info("loop: plain (%s)", "configured" if config.loop == "plain" else "the default on a CPU")
        return None
    try:
        return _rounds(config, target, draft, longest, drafts_for, ops)
    except ModelError as error:
        if config.loop == "rounds":
            raise
        log.info("loop: plain (%s)", error)
        return None


def _rounds(
    config: EngineConfig, target: Runner, draft: ModelRunner | None, longest: int, drafts_for: frozenset[str],
    ops: RoundOps | None,
) -> RoundLoop:  # fmt: skip
    """Build rounds; a ModelError gives the reason why they cannot run."""
    if not isinstance(target, ModelRunner):
        raise ModelError("loop=rounds requires ragged batches; this model runs one sequence at a time")
    why_not, device = _why_not(config, target, draft), target.device
    if why_not is not None:
        raise ModelError(f"loop=rounds is not supported: {why_not}")
    rounds = RoundLoop(
        _fed(target), None if draft is None else _fed(draft), ops or ops_on(device), num_slots=config.max_batch_size,
        longest=longest, most_drafts=config.num_draft_tokens if draft is not None else 0, vocab=target.vocab_size,
        drafts_for=drafts_for, chunk=config.max_batch_tokens,
        recorder=Graphs(graph_budget(config, target.model.config, device)) if device.type == "cuda" else None,
    )  # fmt: skip
    try:
        rounds.try_out()
    except _refusals() as error:
        raise ModelError(f"loop=rounds failed its first round: {error}") from error
    log.info("loop: rounds on %s; proposers: %s", device.type, ", ".join(sorted(drafts_for)) or "none")
    return rounds


def ops_on(device: torch.device) -> RoundOps:
    """The operations of a round: kernels, or on a CPU, where rounds are only for tests, the same in plain torch."""
    if device.type == "cpu":
        return RoundOps(paged.attend_plainly, reference.commit)
    from engine.kernels import sampling  # imports Triton

    return RoundOps(paged.attend, sampling.commit)


def _refusals() -> tuple[type[Exception], ...]:
    """The errors of transformers, torch and Triton that mean that a model cannot run in a round."""
    return (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError, *faults())


def _why_not(config: EngineConfig, target: ModelRunner, draft: ModelRunner | None) -> str | None:
    is_gpu = target.device.type != "cpu"
    if is_gpu and not has_triton():
        return "Triton is not installed"
    if is_gpu and config.attention not in ("auto", "triton"):
        return f"attention is {config.attention}; rounds require triton"
    if config.reproducible:
        return "reproducible is set"
    if longrope_border(target.model.config) is not None:
        return "the model has two rotary tables (longrope)"
    if is_batch_invariant(target.model):
        return "the weights are packed for CPU kernels"
    if not all(paged.reads(*runner.arena.k, *runner.arena.v) for runner in (target, draft) if runner is not None):
        return "the width of int8 keys and values is not a multiple of 4"
    if any(runner.states is not None for runner in (target, draft) if runner is not None):
        return "the model has recurrent layers"
    if any(runner.arena.layout.heads is None for runner in (target, draft) if runner is not None):
        return "layers differ in their number of K/V heads"
    return None


def _fed(runner: ModelRunner) -> DeviceModel:
    return DeviceModel(runner.model, runner.arena, positions(runner.model.config).limit)
