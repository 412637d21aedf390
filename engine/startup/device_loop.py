"""Chooses the loop: rounds on the device if possible, else plain steps, with the reason in the log."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import torch

from pilotfish.engine.attention import paged
from pilotfish.engine.device_loop.graph_cache import allows_rounds
from pilotfish.engine.device_loop.graphs import Graphs
from pilotfish.engine.device_loop.layout import DeviceModel
from pilotfish.engine.device_loop.loop import RoundLoop
from pilotfish.engine.device_loop.round import RoundOps
from pilotfish.engine.errors import ModelError
from pilotfish.engine.kernels import faults, has_triton, reference
from pilotfish.engine.model.checkpoint import longrope_border, positions
from pilotfish.engine.model.decoder.decoder import is_batch_invariant
from pilotfish.engine.model.runner import ModelRunner, Runner
from pilotfish.engine.startup.memory import graph_budget
from pilotfish.engine.types import AUTO

if TYPE_CHECKING:  # for types only: benchmarks/harness/bare.py passes its own class where pydantic is missing
    from pilotfish.engine.config import EngineConfig

log = logging.getLogger(__name__)


def wants_rounds(config: EngineConfig, device: torch.device) -> bool:
    """Whether to use rounds if possible. On a CPU they have no advantage, so they run only if configured."""
    return allows_rounds(config) and (config.loop == "rounds" or device.type == "cuda")


def rounds_for(
    config: EngineConfig, target: Runner, draft: Runner | None, longest: int, any_of: Seq[str],
    ops: RoundOps | None = None,
) -> RoundLoop | None:  # fmt: skip
    """Build rounds of `target` and `draft` and try them once; None if they are not wanted or cannot run.

    Rounds draft only with the draft model; `any_of`: the proposers of `auto`.

    Raises:
        ModelError: rounds are configured and cannot run.
    """
    draft = draft if isinstance(draft, ModelRunner) else None
    if config.tensor_parallel_size > 1:
        why_not: str | None = "rounds do not support tensor parallelism"
    elif config.loop == "plain":
        why_not = "configured"
    elif not isinstance(target, ModelRunner):
        why_not = "this model runs one sequence at a time"
    elif not wants_rounds(config, target.device):
        why_not = "the default on a CPU"
    elif (why_not := _why_not(config, target, draft)) is None:
        device = target.device
        # They support `auto` if it has no other model or head.
        own = {"model", AUTO} if any_of == ("model", "suffix") else {"model"}
        rounds = RoundLoop(
            _fed(target), None if draft is None else _fed(draft), ops or ops_on(device),
            num_slots=config.max_batch_size, longest=longest, vocab=target.vocab_size, chunk=config.max_batch_tokens,
            most_drafts=0 if draft is None else config.num_draft_tokens,
            drafts_for=frozenset() if draft is None else frozenset(own),
            recorder=Graphs(graph_budget(config, target.model.config, device)) if device.type == "cuda" else None,
        )  # fmt: skip
        kinds = (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError)
        refusals: tuple[type[Exception], ...] = (*kinds, *faults())  # of transformers, torch and Triton
        try:
            rounds.try_out()
        except refusals as error:
            why_not = f"the first round failed: {error}"
        else:
            log.info("loop: rounds on %s; drafts of a model: %s", device.type, draft is not None)
            return rounds
    if config.loop == "rounds":
        raise ModelError(f"loop=rounds is not supported: {why_not}")
    log.info("loop: plain (%s)", why_not)
    return None


def ops_on(device: torch.device) -> RoundOps:
    """The operations of a round: kernels, or plain torch on a CPU, where rounds are only for tests."""
    if device.type == "cpu":
        return RoundOps(paged.attend_plainly, reference.commit)
    from pilotfish.engine.kernels import sampling  # imports Triton

    return RoundOps(paged.attend, sampling.commit)


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
