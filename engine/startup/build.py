"""From a config to an engine: loads the models, sizes the arenas, wires the parts. Nothing here runs in a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from engine import attention
from engine.choices import Weights
from engine.control.adaptive import AdaptiveK
from engine.control.controller import DelayedFeedback
from engine.control.prefill_budget import PrefillBudget
from engine.device_loop.round import RoundOps
from engine.engine import Engine
from engine.errors import ModelError
from engine.kernels import has_triton
from engine.kv.arena import KVArena, KVLayout
from engine.kv.pages import PagePool
from engine.machine.mapped import ReadProgress, told
from engine.machine.rank import RankInfo
from engine.machine.threads import cores, leave_to_pool, use_threads
from engine.model.checkpoint import read_config, weights_size
from engine.model.fixed_shape import TILE, FixedShapeRunner
from engine.model.fusion.fuse import fuse
from engine.model.fusion.fuse_cuda import fuse_for_cuda, round_ahead
from engine.model.fusion.stack import stack
from engine.model.linear.fp8 import to_fp8
from engine.model.linear.packed import keeps_rows_apart, pack, runs_in_c
from engine.model.linear.w4 import to_w4
from engine.model.quantize import load_quantised
from engine.model.rope import longrope_border
from engine.model.runner import ModelRunner, Runner, Tap, end_tokens, known_positions, kv_layout, load_model
from engine.parallel.group import Ranks
from engine.parallel.shards import ShardedRunner, check_shares, follow, share_of
from engine.proposers import Proposer, Proposers
from engine.proposers.vocab import VocabMap
from engine.request.intake import Limits
from engine.scheduler import Scheduler
from engine.startup.batch_invariance import hold_bits
from engine.startup.drafters import Drafters, match_vocabularies
from engine.startup.loop import rounds_for, wants_rounds
from engine.startup.memory import GIB, kv_gib
from engine.startup.precision import held_as
from engine.startup.self_test import probe

if TYPE_CHECKING:  # only its values are read: a GPU machine without pydantic passes benchmarks/harness/bare.py
    from engine.config import EngineConfig

log = logging.getLogger(__name__)

PAGE_SIZE = 32  # tokens; the prefix cache knows whole pages


def build_engine(config: EngineConfig, progress: Callable[[str], None] = lambda _: None) -> Engine:
    """Load what `config` names and make it ready to step; `progress` is told each stage.

    With `tensor_parallel_size` above 1 this returns to rank 0 alone. In the other processes it does what rank 0 says
    for as long as that lives, and then ends the process.

    Raises:
        ModelError: a checkpoint that cannot be served, or a pair that does not fit together.
    """
    if config.tensor_parallel_size > 1 and not RankInfo.here().leads:
        load_share(config, progress)()
        raise SystemExit(0)
    device = pick_device(config.device)
    _check_bits_are_promised(config, device)
    target, ranks = _load_target(config, device, progress)
    draft = None
    if config.draft is not None:
        progress(f"loading draft {config.draft}")
        weights = config.draft_weights or config.weights
        draft = load(config, config.draft, config.draft_revision, weights, device, progress=progress)
    vocab = None if draft is None else match_vocabularies(config, target, draft)
    progress("allocating K/V")
    return assemble(config, target, draft, vocab=vocab, ranks=ranks)


def load_share(config: EngineConfig, progress: Callable[[str], None] = lambda _: None) -> Callable[[], None]:
    """In a rank other than 0: load its share. What is returned runs what rank 0 runs, until that has ended.

    Raises:
        ModelError: as `build_engine`.
        RankLost: rank 0 ended before it had loaded.
    """
    device = pick_device(config.device)
    target, ranks = _load_target(config, device, progress)
    assert ranks is not None, "a share of a whole target"
    ranks.least(kv_gib(config, device, target.config))
    num_pages, page_size = ranks.hear()
    make_arena = partial(KVArena, num_pages=num_pages, page_size=page_size, device=target.device)
    progress(f"rank {ranks.place.rank} follows")
    return partial(follow, ranks, _runner(config, target, make_arena))


def _load_target(
    config: EngineConfig, device: torch.device, progress: Callable[[str], None]
) -> tuple[PreTrainedModel, Ranks | None]:
    """The target, or this process's share of it and the group that has the others."""
    shares, ranks = config.tensor_parallel_size, None
    place = RankInfo.here() if shares > 1 else RankInfo()
    use_threads(config.threads or max(1, cores() // place.local_size))
    if shares > 1:
        place.check(shares)
        check_shares(config.target, read_config(config.target, config.revision), shares)
        progress(f"meeting {shares - 1} other ranks")
        ranks = Ranks.join(place, device)
    progress(f"loading target {config.target}")
    return load(config, config.target, config.revision, config.weights, device, shares, progress), ranks


def load(
    config: EngineConfig,
    name: str,
    revision: str | None,
    weights: Weights,
    device: torch.device,
    shares: int = 1,
    progress: Callable[[str], None] = lambda _: None,
) -> PreTrainedModel:
    """One model, its weights as asked, or rounded as the checkpoint has them; or a share. `progress` hears of bytes.

    Raises:
        ModelError: it cannot be loaded, or rounded ones are wanted where they cannot run.
    """
    with told(ReadProgress(f"loading {name}", partial(weights_size, name, revision), progress)):
        return _load(config, name, revision, weights, device, shares)


def _load(
    config: EngineConfig, name: str, revision: str | None, weights: Weights, device: torch.device, shares: int
) -> PreTrainedModel:
    held = held_as(config, name, revision, weights, device)
    log.info("%r is held in %s", name, held)
    if shares > 1:
        if held.weights != "native":
            raise ModelError(
                f"tensor_parallel_size is {shares}; {name!r} has {held.weights} weights, which cannot be cut"
            )
        if config.fuse:
            log.info("%r stays unfused: a share of it has transformers' hooks on its matrices", name)
        return load_model(name, revision, held.dtype, device, shares)
    if device.type == "cpu" and (held.weights == "int8" or held.weights == "int4"):  # only so do types tell these apart
        model = load_quantised(name, revision, held.dtype, held.weights)
    else:
        model = load_model(name, revision, held.dtype, device)
    if config.fuse and device.type == "cpu" and config.loop != "rounds":  # whose batches C cannot read
        fuse(model)
        pack(model)
        stack(model)
    ours = config.fuse and device.type == "cuda" and has_triton()
    if ours:
        fuse_for_cuda(model)
    if held.weights == "fp8":
        to_fp8(model)
        if ours:
            round_ahead(model)
    if held.weights == "int4" and device.type == "cuda":
        to_w4(model)
    return model


def assemble(
    config: EngineConfig,
    target: PreTrainedModel,
    draft: PreTrainedModel | None = None,
    extra_proposers: Mapping[str, Proposer] = MappingProxyType({}),
    vocab: VocabMap | None = None,
    wrappers: Mapping[str, Callable[[Proposer], Proposer]] = MappingProxyType({}),
    ops: RoundOps | None = None,
    ranks: Ranks | None = None,
) -> Engine:
    """An engine of models that are loaded already (with our attention: `runner.load_model`).

    `extra_proposers` come to those that the config brings, or replace them by name. `vocab` is for a draft of
    another vocabulary. `wrappers` put proposers, by name, into others that watch them or change what they say.
    `ops` are what rounds are made of, where that is not as usual. `ranks` has the other shares of the target.
    """
    _check_bits_are_promised(config, target.device)
    drafters = Drafters.load(config, target, draft, vocab)
    limit = max_model_len(config, [model.config for model in (target, *drafters.models.values())])
    layout = layout_of(config, target)
    page_size = min(config.page_size or (PAGE_SIZE if config.prefix_cache else limit), limit)
    memory = kv_gib(config, target.device, target.config)
    memory = memory if ranks is None else ranks.least(memory)
    num_pages = pages_within(memory, config.max_batch_size, [layout, *drafters.layouts.values()], page_size, limit)
    spare = page_size if wants_rounds(config, target.device) else 0  # what rounds write for nobody
    make_arena = partial(KVArena, num_pages=num_pages, page_size=page_size, device=target.device, spare_rows=spare)
    # int8 and packed floats keep their rows apart by themselves; torch's matmuls need passes of one shape.
    needs_tiles = config.reproducible and not keeps_rows_apart(target)
    make_runner = partial(_tiled_runner, tap=drafters.tap) if needs_tiles else _runner
    if ranks is not None:
        ranks.say([num_pages, page_size])
    runner = make_runner(config, target, make_arena)
    runner = runner if ranks is None else ShardedRunner(runner, ranks)
    # Under the coupled rule a draft's bits reach no output: only the target is slowed down for them.
    row_wise = keeps_rows_apart(target)
    runners = drafters.runners(make_arena, partial(_attention, config, row_wise=row_wise))
    attend = next((own.attend for own in runners.values()), None)  # what fits a draft model fits a head
    attend = attend or attention.choose(config.attention, target.device, row_wise=row_wise)
    prefill = PrefillBudget(config.max_step_ms / 1000, config.max_batch_tokens)
    by_name = drafters.proposers(runners, make_arena, attend, prefill) | dict(extra_proposers)
    by_name |= {name: wrap(by_name[name]) for name, wrap in wrappers.items()}
    if config.proposer is not None and config.proposer not in by_name:
        raise ModelError(f"proposer is {config.proposer!r}; with what is loaded there is {', '.join(by_name)}")
    proposers = Proposers(by_name, runner.vocab_size)
    scheduler = _scheduler(config, proposers, prefill, num_pages, page_size, run=-(-limit // page_size))
    borders = [longrope_border(model.config) for model in (target, draft or target)]
    limits = Limits(runner.vocab_size, min(limit, num_pages * page_size), end_tokens(target), *borders)
    on_device = (
        frozenset(("model", "auto")) - {*extra_proposers, *wrappers} if draft is not None and vocab is None else ()
    )
    mine, dtype = runners.get("model") if on_device else None, str(target.dtype).removeprefix("torch.")
    rounds = rounds_for(config, runner, mine, limits.max_model_len, frozenset(on_device), ops)
    if all(map(runs_in_c, (target, *drafters.models.values()))):
        leave_to_pool()
    return Engine(config, limits, runner, proposers, scheduler, rounds=rounds, dtype=dtype)


def _scheduler(
    config: EngineConfig, proposers: Proposers, prefill: PrefillBudget, num_pages: int, page_size: int, run: int
) -> Scheduler:
    """One pool of pages for the target and, if a proposer has K/V, one for the draft; `run`: pages of one sequence."""
    pools = [PagePool(num_pages, page_size, run=run, prefix_cache=config.prefix_cache) for _ in range(2)]
    return Scheduler(
        pools[0],
        pools[1] if proposers.draft_kv_users else None,
        config.max_batch_size,
        config.max_batch_tokens,
        proposers.draft_kv_users,
        proposers.draft_kv_sharers,
        AdaptiveK(proposers.draft_kv_users, proposers.finders),
        DelayedFeedback(AdaptiveK(proposers.draft_kv_users)),
        prefill,
    )


def pick_device(name: str) -> torch.device:
    """`auto` -> cuda where there is one, else cpu; ModelError where cuda is asked for in vain."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("device is cuda, and torch sees no CUDA device here")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def layout_of(config: EngineConfig, target: PreTrainedModel) -> KVLayout:
    """The K/V of a target, or of this process's share of it."""
    layout = kv_layout(target.config, target.dtype)
    shares = config.tensor_parallel_size
    return layout if shares == 1 else share_of(layout, target.config, shares)


def max_model_len(config: EngineConfig, models: list[PreTrainedConfig]) -> int:
    """The least of what is asked and what the models' positions allow."""
    known = [known_positions(model) for model in models]
    if config.max_model_len is not None and config.max_model_len > min(known):
        raise ModelError(f"max_model_len is {config.max_model_len}; the models know positions up to {min(known)}")
    return config.max_model_len or min(known)


def pages_within(memory: float, most: int, layouts: list[KVLayout], page_size: int, max_model_len: int) -> int:
    """Pages per arena: what `memory` GiB hold, but no more than `most` longest sequences could use."""
    page_bytes = page_size * sum(layout.bytes_per_token for layout in layouts)
    affordable = int(memory * GIB) // page_bytes
    if affordable < 1:
        raise ModelError(
            f"kv_memory is {memory} GiB; one page of {page_size} tokens takes {page_bytes} bytes: "
            "give more, or a smaller max_model_len or page_size"
        )
    return min(affordable, most * -(-max_model_len // page_size))


def _check_bits_are_promised(config: EngineConfig, device: torch.device) -> None:
    if config.reproducible and device.type not in ("cpu", "cuda"):
        raise ModelError(f"reproducible is for cpu and cuda: on {device.type} no order of sums is known to be fixed")
    if config.reproducible and device.type == "cuda" and not has_triton():
        raise ModelError("reproducible on cuda needs Triton: the order of sums of other attention hangs on lengths")


def _runner(config: EngineConfig, model: PreTrainedModel, make_arena: Callable[..., KVArena]) -> Runner:
    layout = layout_of(config, model)
    attend = _attention(config, model, layout, row_wise=keeps_rows_apart(model))
    return ModelRunner(model, make_arena(layout), attend)


def _attention(config: EngineConfig, model: PreTrainedModel, layout: KVLayout, *, row_wise: bool) -> attention.Attend:
    """What is asked for, or is fastest, and does with this model what it should."""
    try_out = partial(probe, model, layout)
    return attention.fitting(config.attention, model.device, try_out, row_wise=row_wise)


def _tiled_runner(
    _: EngineConfig, model: PreTrainedModel, make_arena: Callable[..., KVArena], tap: Tap | None
) -> Runner:
    layout = kv_layout(model.config, model.dtype)
    attend = attention.fitting("fixed", model.device, partial(probe, model, layout))
    hold_bits(model, layout)
    arena = make_arena(layout, spare_rows=TILE)
    return FixedShapeRunner(ModelRunner(model, arena, attend), scratch=arena.num_pages, tap=tap)
