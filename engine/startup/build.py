"""Builds an engine from a config: loads the models, sizes the arenas, connects the parts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import torch

from pilotfish.engine.choices import Weights
from pilotfish.engine.control.adaptive import AdaptiveK
from pilotfish.engine.control.prefill_budget import PrefillBudget
from pilotfish.engine.device_loop.round import RoundOps
from pilotfish.engine.engine import Engine
from pilotfish.engine.errors import ModelError
from pilotfish.engine.kernels import has_triton, reference
from pilotfish.engine.kv.arena import KVArena, KVLayout
from pilotfish.engine.kv.pages import PagePool
from pilotfish.engine.machine.mapped import ReadProgress, reporting_to
from pilotfish.engine.machine.rank import RankInfo
from pilotfish.engine.machine.threads import cores, leave_to_pool, use_threads
from pilotfish.engine.model.adapters.store import Adapters
from pilotfish.engine.model.checkpoint import longrope_border, positions, read_config, weights_size
from pilotfish.engine.model.decoder.decoder import DecoderModel, runs_in_c
from pilotfish.engine.model.decoder.load import load_decoder
from pilotfish.engine.model.decoder.ops import LayerOps
from pilotfish.engine.model.decoder.share import Share
from pilotfish.engine.model.decoder.stack import Tap
from pilotfish.engine.model.runner import Runner, end_tokens
from pilotfish.engine.parallel import Ranks, ShardedRunner, worker_loop
from pilotfish.engine.proposers import Proposer, Proposers
from pilotfish.engine.proposers.heads import load_heads
from pilotfish.engine.proposers.heads.base import Head, HeadContext
from pilotfish.engine.proposers.sources import DraftSource, draft_sources
from pilotfish.engine.proposers.vocab import VocabMap
from pilotfish.engine.request.intake import Limits
from pilotfish.engine.scheduler import Scheduler
from pilotfish.engine.startup.batch_invariance import ensure_batch_invariance
from pilotfish.engine.startup.device_loop import rounds_for, wants_rounds
from pilotfish.engine.startup.drafters import draft_models, match_vocabularies, model_proposers
from pilotfish.engine.startup.implementation import Implementation
from pilotfish.engine.startup.memory import GIB, TARGET, StatePlan, kv_gib
from pilotfish.engine.startup.precision import held_as
from pilotfish.engine.startup.runners import LoadedModel, check_allowed

if TYPE_CHECKING:  # for types only: benchmarks/harness/bare.py passes its own class where pydantic is missing
    from transformers import PreTrainedConfig

    from pilotfish.engine.config import EngineConfig
    from pilotfish.engine.model.decoder.decoder import Model

log = logging.getLogger(__name__)

PAGE_SIZE = 32  # tokens; the prefix cache keeps only whole pages


def build_engine(config: EngineConfig, progress: Callable[[str], None] = lambda _: None) -> Engine:
    """Load the models of `config` and build an engine that is ready to step; `progress` receives each stage.

    With `tensor_parallel_size` above 1 this function returns only in rank 0. In the other processes it runs the worker
    loop until rank 0 ends, and then ends the process.

    Raises:
        ModelError: a checkpoint cannot be served, or target and draft are incompatible.
    """
    if config.tensor_parallel_size > 1 and not RankInfo.here().leads:
        load_shard(config, progress)()
        raise SystemExit(0)
    device, sources = pick_device(config.device), draft_sources(config)
    _check_reproducible(config, device)
    target, ranks = _load_target(config, device, progress)
    draft = vocab = None
    if (source := sources.get("model")) is not None:
        progress(f"loading draft {source.entry}")
        weights = config.draft_weights or config.weights
        whole = config.model_copy(update={"tensor_parallel_size": 1})
        draft = load(whole, source.name, source.revision, weights, device, progress=progress)
        vocab = match_vocabularies(config, source, target, draft)
    progress("allocating K/V")
    return assemble(config, target, draft, sources, vocab=vocab, ranks=ranks)


def load_shard(config: EngineConfig, progress: Callable[[str], None] = lambda _: None) -> Callable[[], None]:
    """Load the shard of a rank other than 0, and return its worker loop, which runs the passes of rank 0 until it ends.

    Raises:
        ModelError: as in `build_engine`.
        RankLost: rank 0 ended while loading.
    """
    device = pick_device(config.device)
    target, ranks = _load_target(config, device, progress)
    assert ranks is not None, "a shard without a process group"
    # In the order of `assemble`, because all ranks take part in the passes of a test.
    loaded = LoadedModel.of(config, target, fixed=config.reproducible)
    if config.reproducible:
        ensure_batch_invariance(target, loaded.layout)
    ranks.minimum(kv_gib(config, device, target.config))
    num_pages, page_size = ranks.receive(list[int])
    arena = KVArena(loaded.layout, num_pages, page_size, target.device)
    progress(f"rank {ranks.place.rank} is ready")
    return partial(worker_loop, ranks, loaded.runner(arena))


def _load_target(
    config: EngineConfig, device: torch.device, progress: Callable[[str], None]
) -> tuple[Model, Ranks | None]:
    """Load the target, or this process's shard of it, and join the process group."""
    shares, ranks, share = config.tensor_parallel_size, None, None
    place = RankInfo.here() if shares > 1 else RankInfo()
    use_threads(config.threads or max(1, cores() // place.local_size))
    if shares > 1:
        place.check(shares)
        Implementation.of(config, read_config(config.target, config.revision), device)  # refuses most
        progress(f"waiting for {shares - 1} other ranks")
        ranks = Ranks.join(place, device)
        share = Share(place.rank, shares, ranks.total)
    progress(f"loading target {config.target}")
    return load(config, config.target, config.revision, config.weights, device, share, progress), ranks


def load(
    config: EngineConfig,
    name: str,
    revision: str | None,
    weights: Weights,
    device: torch.device,
    share: Share | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Model:
    """Load one model or a shard of it; `progress` receives the number of bytes read.

    Weights that are rounded in the checkpoint are unchanged; others are rounded as configured.

    Raises:
        ModelError: the model cannot be loaded, or its rounded weights cannot run on this device.
    """
    with reporting_to(ReadProgress(f"loading {name}", partial(weights_size, name, revision), progress)):
        return _load(config, name, revision, weights, device, share)


def _load(
    config: EngineConfig, name: str, revision: str | None, weights: Weights, device: torch.device, share: Share | None
) -> Model:
    described = read_config(name, revision)
    held = held_as(config, name, revision, weights, device, described=described)
    log.info("%r: %s", name, held)
    log.info("%r: rounding: %s", name, held.rounding(device))
    implementation = Implementation.of(config, described, device)
    log.info("%r: runs in %s", name, implementation)
    if implementation.architecture is None:
        from pilotfish.engine.model.fallback import load_model

        return load_model(name, revision, held.dtype, device)
    in_rounds = device.type == "cpu" and config.loop == "rounds"  # not supported by our C
    made = load_decoder(
        name, revision, described, implementation.architecture, held.dtype, held.weights, held.quantisation,
        keeps_codes=held.keeps_codes or held.quantisation is None, device=device,
        packs=not in_rounds and held.weights != "fp8", share=share,
    )  # fmt: skip
    if device.type == "cuda" or in_rounds:
        made.use(LayerOps.kernels() if device.type == "cuda" else LayerOps.of(reference))
    return made


def assemble(
    config: EngineConfig,
    target: Model,
    draft: Model | None = None,
    sources: Mapping[str, DraftSource] = MappingProxyType({}),
    extra_proposers: Mapping[str, Proposer] = MappingProxyType({}),
    vocab: VocabMap | None = None,
    wrappers: Mapping[str, Callable[[Proposer], Proposer]] = MappingProxyType({}),
    ops: RoundOps | None = None,
    ranks: Ranks | None = None,
    tap: Tap | None = None,
) -> Engine:
    """Build an engine from loaded models.

    Args:
        config: the options of the engine.
        target: the target model.
        draft: the draft model.
        sources: further draft sources (`draft_sources`).
        extra_proposers: proposers, by name, added to those of the config or replacing them.
        vocab: the token map for a draft of another vocabulary.
        wrappers: by proposer name, functions that wrap a proposer.
        ops: replaces the usual operations of rounds.
        ranks: the process group of a sharded target.
        tap: reads hidden states for a proposer of the caller; loaded heads have their own.
    """
    _check_reproducible(config, target.device)
    check_allowed(config, target, sources)
    heads = load_heads(sources, config, cast("DecoderModel", target))  # guaranteed by `check_allowed`
    # Before the self-test, which covers it.
    tap = Tap(target, {place for head in heads.values() for place in head.places}) if heads else tap
    loaded = LoadedModel.of(config, target, fixed=config.reproducible)
    models = draft_models(config, sources, target, draft, vocab)
    # After copying a draft of the target's own layers: under the coupled rule its bits do not change outputs, so it
    # needs neither slower tiles nor adapters.
    if config.reproducible:
        ensure_batch_invariance(target, loaded.layout)
    adapters = _adapters(config, target, ranks)
    own = {name: adapters.load_unlisted(name, head.adapter) for name, head in heads.items() if head.adapter is not None}
    memory = _allocate(config, {TARGET: loaded, **models}, heads, ranks)
    runner: Runner = loaded.runner(memory.arenas[TARGET], adapters, memory.states.arena(TARGET, target.device))
    runner = runner if ranks is None else ShardedRunner(runner, ranks)
    runners = {
        name: model.runner(memory.arenas[name], states=memory.states.arena(name, target.device))
        for name, model in models.items()
    }
    prefill = PrefillBudget(config.max_step_ms / 1000, config.max_batch_tokens)
    by_name = model_proposers(runners, prefill, vocab)
    for name, head in heads.items():
        assert tap is not None and loaded.attend is not None, "`check_allowed` refuses heads of other models"  # noqa: PT018
        context = HeadContext(name, runner, tap, memory.arenas.get(name), loaded.attend, prefill, own.get(name))
        by_name[name] = head.proposer(context)
    by_name |= extra_proposers
    by_name |= {name: wrap(by_name[name]) for name, wrap in wrappers.items()}
    trained = (*models, *heads)
    proposers = Proposers(by_name, runner.vocab_size, (*trained, "suffix") if trained else ())
    if config.proposer is not None and config.proposer not in proposers.names:
        raise ModelError(f"proposer is {config.proposer!r}; available: {', '.join(proposers.names)}")
    longest, borders = memory.longest, [longrope_border(model.config) for model in (target, draft or target)]
    limits = Limits(runner.vocab_size, longest, end_tokens(target), *borders)
    mine = runners.get("model") if vocab is None and "model" not in {*extra_proposers, *wrappers} else None
    rounds = rounds_for(config, runner, mine, longest, proposers.any_of, ops)
    if all(runs_in_c(model) for model in (target, *(one.model for one in models.values()))):
        leave_to_pool()
    scheduler = _scheduler(config, proposers, prefill, memory)
    dtype, device = str(target.dtype).removeprefix("torch."), target.device
    return Engine(config, limits, runner, proposers, scheduler, time.perf_counter, rounds, dtype, device, adapters)


def _adapters(config: EngineConfig, target: Model, ranks: Ranks | None) -> Adapters:
    """Load the configured adapters, and prepare for more; only for an unsharded decoder."""
    changed = target if isinstance(target, DecoderModel) and ranks is None else None
    adapters = Adapters(changed, row_wise=target.device.type == "cpu" or config.reproducible)
    for name, folder in config.adapter.items():
        adapters.load(name, Path(folder))
    return adapters


@dataclass(frozen=True, slots=True)
class _Memory:
    """The arenas of an engine, and their sizes."""

    limit: int  # maximum tokens of a sequence by models and config
    page_size: int
    num_pages: int  # of each arena
    states: StatePlan
    arenas: Mapping[str, KVArena]  # of the target (`TARGET`), and of proposers with K/V by name

    @property
    def longest(self) -> int:
        """Maximum tokens of a sequence in an arena."""
        return min(self.limit, self.num_pages * self.page_size)


def _allocate(
    config: EngineConfig, models: Mapping[str, LoadedModel], heads: Mapping[str, Head], ranks: Ranks | None
) -> _Memory:
    """Divide the memory for K/V and states among the target (`TARGET`) and draft sources."""
    target = models[TARGET].model
    layouts = {name: model.layout for name, model in models.items()}
    layouts |= {n: head.layout.stored_as(config.kv_cache_dtype) for n, head in heads.items() if head.layout is not None}
    limit = max_model_len(config, [model.model.config for model in models.values()])
    page_size = min(config.page_size or (PAGE_SIZE if config.prefix_cache else limit), limit)
    memory = kv_gib(config, target.device, target.config)
    memory = memory if ranks is None else ranks.minimum(memory)
    states = StatePlan.of(config, {name: model.model for name, model in models.items()}, memory)
    num_pages = pages_within(memory - states.gib, config.max_batch_size, [*layouts.values()], page_size, limit)
    if ranks is not None:
        ranks.broadcast([num_pages, page_size])
    spare = page_size if wants_rounds(config, target.device) else 0  # for writes of rounds without a sequence
    arenas = {name: KVArena(layout, num_pages, page_size, target.device, spare) for name, layout in layouts.items()}
    return _Memory(limit, page_size, num_pages, states, arenas)


def _scheduler(config: EngineConfig, proposers: Proposers, prefill: PrefillBudget, memory: _Memory) -> Scheduler:
    """Build a scheduler, with a page pool for each arena: the target's, and those of proposers with K/V."""
    run, traits = -(-memory.limit // memory.page_size), proposers.traits
    make_pool = partial(PagePool, memory.num_pages, memory.page_size, run=run, prefix_cache=config.prefix_cache)
    makers = {name: trait._replace(find=None) for name, trait in traits.items()}  # rounds do not use lookups
    return Scheduler(
        make_pool(states=memory.states.pool(TARGET)),
        config.max_batch_size,
        config.max_batch_tokens,
        {name: make_pool(states=memory.states.pool(name)) for name in proposers.draft_kv_users},
        proposers.draft_kv_sharers,
        AdaptiveK(traits),
        AdaptiveK(makers),
        prefill,
        config.max_batch_size * config.num_draft_tokens,
        proposers.find_drafts,
    )


def pick_device(name: str) -> torch.device:
    """`auto` -> cuda if available, else cpu. Raises ModelError if cuda is configured but not available."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("device is cuda, but torch finds no CUDA device")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def max_model_len(config: EngineConfig, models: list[PreTrainedConfig]) -> int:
    """The configured length or the models' limit. Raises ModelError if the configured length exceeds the limit."""
    known = [positions(model).limit for model in models]
    if config.max_model_len is not None and config.max_model_len > min(known):
        raise ModelError(f"max_model_len is {config.max_model_len}; the models support at most {min(known)} positions")
    return config.max_model_len or min(known)


def pages_within(memory: float, most: int, layouts: list[KVLayout], page_size: int, max_model_len: int) -> int:
    """Pages per arena: those that fit into `memory` GiB, at most enough for `most` sequences of full length."""
    page_bytes = page_size * sum(layout.bytes_per_token for layout in layouts)
    affordable = int(memory * GIB) // max(1, page_bytes)  # a model without attention has no K/V
    if affordable < 1:
        raise ModelError(
            f"kv_memory is {memory} GiB; one page of {page_size} tokens takes {page_bytes} bytes: "
            "increase it, or reduce max_model_len or page_size"
        )
    return min(affordable, most * -(-max_model_len // page_size))


def _check_reproducible(config: EngineConfig, device: torch.device) -> None:
    if config.reproducible and device.type not in ("cpu", "cuda"):
        raise ModelError(f"reproducible is not supported on {device.type}; supported: cpu, cuda")
    if config.reproducible and device.type == "cuda" and not has_triton():
        raise ModelError("reproducible on cuda requires Triton: other attention kernels are not batch-invariant")
