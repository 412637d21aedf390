"""Turns a config into an engine: loads the models, sizes the arenas, connects the parts. No step runs this code."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import torch

from engine import attention
from engine.attention import native
from engine.attention.registry import AttentionName
from engine.attention.spec import AttentionSpec
from engine.choices import Weights
from engine.control.adaptive import AdaptiveK
from engine.control.prefill_budget import PrefillBudget
from engine.device_loop.round import RoundOps
from engine.engine import Engine
from engine.errors import ModelError
from engine.kernels import has_triton, reference
from engine.kv.arena import KVArena, KVLayout
from engine.kv.batch import Feed, RaggedBatch
from engine.kv.pages import PagePool
from engine.machine.mapped import ReadProgress, told
from engine.machine.rank import RankInfo
from engine.machine.threads import cores, leave_to_pool, use_threads
from engine.model.adapters.store import Adapters
from engine.model.checkpoint import longrope_border, read_config, shape_of, weights_size
from engine.model.decoder.decoder import DecoderModel, is_batch_invariant, runs_in_c
from engine.model.decoder.load import load_decoder
from engine.model.decoder.ops import LayerOps
from engine.model.decoder.share import Share
from engine.model.fixed_shape import TILE, FixedShapeRunner
from engine.model.runner import ModelRunner, Runner, end_tokens, known_positions, layout_of_model
from engine.model.tap import Tap
from engine.parallel import Ranks, ShardedRunner, worker_loop
from engine.proposers import Proposer, Proposers
from engine.proposers.heads.load import load_heads
from engine.proposers.vocab import VocabMap
from engine.request.intake import Limits
from engine.scheduler import Scheduler
from engine.startup.drafters import Drafters, match_vocabularies
from engine.startup.implementation import Implementation
from engine.startup.loop import rounds_for, wants_rounds
from engine.startup.memory import GIB, kv_gib
from engine.startup.precision import held_as
from engine.startup.runners import Ways, alone, check_allowed
from engine.startup.states import TARGET, StatePlan
from engine.types import AUTO

if TYPE_CHECKING:  # for types only: benchmarks/harness/bare.py passes its own class where pydantic is missing
    from transformers import PreTrainedConfig

    from engine.config import EngineConfig
    from engine.model.decoder.decoder import Model

log = logging.getLogger(__name__)

PAGE_SIZE = 32  # tokens; the prefix cache keeps only whole pages
_HEADS = "num_attention_heads"


def build_engine(config: EngineConfig, progress: Callable[[str], None] = lambda _: None) -> Engine:
    """Load what `config` names and build an engine that is ready to step; `progress` receives the name of each stage.

    With `tensor_parallel_size` above 1 this function returns in rank 0 only. In the other processes it runs the worker
    loop as long as rank 0 lives, and then ends the process.

    Raises:
        ModelError: a checkpoint cannot be served, or the target and the draft do not fit together.
    """
    if config.tensor_parallel_size > 1 and not RankInfo.here().leads:
        load_shard(config, progress)()
        raise SystemExit(0)
    device = pick_device(config.device)
    _check_reproducible(config, device)
    target, ranks = _load_target(config, device, progress)
    draft = None
    if config.draft is not None:
        progress(f"loading draft {config.draft}")
        weights = config.draft_weights or config.weights
        whole = config.model_copy(update={"tensor_parallel_size": 1})
        draft = load(whole, config.draft, config.draft_revision, weights, device, progress=progress)
    vocab = None if draft is None else match_vocabularies(config, target, draft)
    progress("allocating K/V")
    return assemble(config, target, draft, vocab=vocab, ranks=ranks)


def load_shard(config: EngineConfig, progress: Callable[[str], None] = lambda _: None) -> Callable[[], None]:
    """Load the shard of a rank other than 0, and return its worker loop, which runs every pass of rank 0 until it ends.

    Raises:
        ModelError: for the reasons given at `build_engine`.
        RankLost: rank 0 ended before it had loaded.
    """
    device = pick_device(config.device)
    target, ranks = _load_target(config, device, progress)
    assert ranks is not None, "a share of a whole target"
    # In the order of `assemble`: the passes of the self-test are of all ranks together.
    make_runner, ragged = _way(config, target)
    ways = Ways.of(config, target, None, ragged)
    ranks.minimum(kv_gib(config, device, target.config))
    num_pages, page_size = ranks.receive(list[int])
    make_arena = partial(KVArena, num_pages=num_pages, page_size=page_size, device=target.device)
    progress(f"rank {ranks.place.rank} follows")
    return partial(worker_loop, ranks, make_runner(config, target, make_arena, StatePlan.of(config, {}, 0), ways))


def _load_target(
    config: EngineConfig, device: torch.device, progress: Callable[[str], None]
) -> tuple[Model, Ranks | None]:
    """Load the target, or this process's shard of it, and join the group of ranks with the other shards."""
    shares, ranks, share = config.tensor_parallel_size, None, None
    place = RankInfo.here() if shares > 1 else RankInfo()
    use_threads(config.threads or max(1, cores() // place.local_size))
    if shares > 1:
        place.check(shares)
        Implementation.of(config, read_config(config.target, config.revision), device)  # refuses most
        progress(f"meeting {shares - 1} other ranks")
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
    """Load one model or a shard of it; `progress` receives how many bytes have been read.

    Weights that are already rounded in the checkpoint stay as they are; others are rounded as asked.

    Raises:
        ModelError: the model cannot be loaded, or its rounded weights cannot run on this device.
    """
    with told(ReadProgress(f"loading {name}", partial(weights_size, name, revision), progress)):
        return _load(config, name, revision, weights, device, share)


def _load(
    config: EngineConfig, name: str, revision: str | None, weights: Weights, device: torch.device, share: Share | None
) -> Model:
    described = read_config(name, revision)
    held = held_as(config, name, revision, weights, device, described=described)
    log.info("%r is held in %s", name, held)
    log.info("%r: rounded are %s", name, held.rounding(device))
    implementation = Implementation.of(config, described, device)
    log.info("%r runs in: %s", name, implementation)
    if implementation.architecture is None:
        from engine.model.fallback import load_model

        return load_model(name, revision, held.dtype, device)
    in_rounds = device.type == "cpu" and config.loop == "rounds"  # our C cannot read their batches
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
    extra_proposers: Mapping[str, Proposer] = MappingProxyType({}),
    vocab: VocabMap | None = None,
    wrappers: Mapping[str, Callable[[Proposer], Proposer]] = MappingProxyType({}),
    ops: RoundOps | None = None,
    ranks: Ranks | None = None,
    tap: Tap | None = None,
) -> Engine:
    """Build an engine from models that are loaded already (with our attention: `runner.load_model`).

    Args:
        config: the options of the engine.
        target: the target model.
        draft: the draft model.
        extra_proposers: proposers, by name, that are added to those of the config or replace them.
        vocab: the token map for a draft of another vocabulary.
        wrappers: by proposer name, functions that wrap a proposer to watch it or to change its drafts.
        ops: replaces the usual operations of rounds.
        ranks: the group of ranks with the other shards of the target.
        tap: reads the target for a proposer of the caller's; where heads are loaded they have one of their own.
    """
    _check_reproducible(config, target.device)
    check_allowed(config, target)
    heads = load_heads(config, cast("DecoderModel", target))  # `check_allowed` said so
    # Before the self-test, which shows that it works.
    tap = Tap(target, {place for head in heads.values() for place in head.places}) if heads else tap
    make_runner, ragged = _way(config, target, tap)
    ways = Ways.of(config, target, draft, ragged)
    drafters = Drafters.load(config, target, draft, vocab, ways, heads, tap)
    # After a draft of the target's own layers was copied: it has none.
    adapters = _adapters(config, target, ranks)
    own = {name: adapters.load_unlisted(name, head.adapter) for name, head in heads.items() if head.adapter is not None}
    sizes = _sizes(config, target, drafters, ranks, ways)
    limit, page_size, num_pages, states = sizes.limit, sizes.page_size, sizes.num_pages, sizes.states
    spare = page_size if wants_rounds(config, target.device) else 0  # rows for what rounds write without a sequence
    make_arena = partial(KVArena, num_pages=num_pages, page_size=page_size, device=target.device, spare_rows=spare)
    if ranks is not None:
        ranks.broadcast([num_pages, page_size])
    runner: Runner = make_runner(config, target, make_arena, states, ways, adapters=adapters)
    runner = runner if ranks is None else ShardedRunner(runner, ranks)
    # Under the coupled rule the bits of a draft change no output, so only the target runs in slower fixed-shape passes.
    row_wise = is_batch_invariant(target)
    runners = drafters.runners(make_arena, partial(_attention, config.attention, row_wise=row_wise), states, ways)
    # Attention that fits a draft model also fits a head.
    attend = next((own.attend for own in runners.values() if isinstance(own, ModelRunner)), None)
    attend = attend or attention.choose(config.attention, target.device, row_wise=row_wise)
    prefill = PrefillBudget(config.max_step_ms / 1000, config.max_batch_tokens)
    by_name = drafters.proposers(runner, runners, make_arena, attend, prefill, own) | dict(extra_proposers)
    by_name |= {name: wrap(by_name[name]) for name, wrap in wrappers.items()}
    proposers = Proposers(by_name, runner.vocab_size, drafters.any_of)
    if config.proposer is not None and config.proposer not in proposers.names:
        raise ModelError(f"proposer is {config.proposer!r}; with what is loaded there is {', '.join(proposers.names)}")
    scheduler = _scheduler(config, proposers, prefill, sizes)
    borders = [longrope_border(model.config) for model in (target, draft or target)]
    limits = Limits(runner.vocab_size, min(limit, num_pages * page_size), end_tokens(target), *borders)
    mine, dtype = runners.get("model") if vocab is None else None, str(target.dtype).removeprefix("torch.")
    # Rounds draft with the draft model alone: `auto` is theirs where it has no other model or head to choose.
    by_draft = ("model", AUTO) if drafters.any_of == ("model", "suffix") else ("model",)
    on_device = frozenset(by_draft if isinstance(mine, ModelRunner) else ()) - {*extra_proposers, *wrappers}
    mine = mine if on_device and isinstance(mine, ModelRunner) else None
    rounds = rounds_for(config, runner, mine, limits.max_model_len, on_device, ops)
    if all(map(runs_in_c, (target, *drafters.models.values()))):
        leave_to_pool()
    return Engine(config, limits, runner, proposers, scheduler, rounds=rounds, dtype=dtype, adapters=adapters)


def _way(
    config: EngineConfig, target: Model, tap: Tap | None = None
) -> tuple[Callable[..., Runner], Callable[[Model], attention.Attend]]:
    """What makes the target's runner, and what chooses the attention of a model in ragged batches."""
    # int8 and packed floats are batch-invariant by themselves; torch's matmuls need passes of one shape.
    row_wise = is_batch_invariant(target)
    needs_tiles = config.reproducible and not row_wise
    make_runner = partial(_tiled_runner, tap=tap) if needs_tiles else _runner
    return make_runner, partial(_ragged, config, target, needs_tiles=needs_tiles, row_wise=row_wise)


def _adapters(config: EngineConfig, target: Model, ranks: Ranks | None) -> Adapters:
    """Load the adapters that the config names, and prepare for more; only a whole decoder has some."""
    changed = target if isinstance(target, DecoderModel) and ranks is None else None
    adapters = Adapters(changed, row_wise=target.device.type == "cpu" or config.reproducible)
    for name, folder in config.adapter.items():
        adapters.load(name, Path(folder))
    return adapters


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The sizes of an engine's arenas."""

    limit: int  # tokens of the longest sequence
    page_size: int
    num_pages: int  # of each arena
    states: StatePlan


def _sizes(config: EngineConfig, target: Model, drafters: Drafters, ranks: Ranks | None, ways: Ways) -> _Sizes:
    """Divide the memory for keys, values and states among the arenas of the target and of what drafts for it."""
    limit = max_model_len(config, [model.config for model in (target, *drafters.models.values())])
    page_size = min(config.page_size or (PAGE_SIZE if config.prefix_cache else limit), limit)
    memory = kv_gib(config, target.device, target.config)
    memory = memory if ranks is None else ranks.minimum(memory)
    ragged = {name: m for name, m in {TARGET: target, **drafters.models}.items() if m not in ways.alone}
    states = StatePlan.of(config, ragged, memory)
    layouts = [ways.alone.get(target) or layout_of(config, target), *drafters.layouts.values()]
    num_pages = pages_within(memory - states.gib, config.max_batch_size, layouts, page_size, limit)
    return _Sizes(limit, page_size, num_pages, states)


def _scheduler(config: EngineConfig, proposers: Proposers, prefill: PrefillBudget, sizes: _Sizes) -> Scheduler:
    """Build a scheduler, with a pool of pages for each arena: the target's, and those of the proposers with K/V."""
    run, traits = -(-sizes.limit // sizes.page_size), proposers.traits
    make_pool = partial(PagePool, sizes.num_pages, sizes.page_size, run=run, prefix_cache=config.prefix_cache)
    makers = {name: trait._replace(find=None) for name, trait in traits.items()}  # rounds look nothing up
    return Scheduler(
        make_pool(states=sizes.states.target_pool),
        config.max_batch_size,
        config.max_batch_tokens,
        {name: make_pool(states=sizes.states.pool_of(name)) for name in proposers.draft_kv_users},
        proposers.draft_kv_sharers,
        AdaptiveK(traits),
        AdaptiveK(makers),
        prefill,
        config.max_batch_size * config.num_draft_tokens,
    )


def pick_device(name: str) -> torch.device:
    """`auto` -> cuda where there is one, else cpu; ModelError where cuda is asked for and missing."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("device is cuda, and torch sees no CUDA device here")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def layout_of(config: EngineConfig, model: Model) -> KVLayout:
    """The K/V layout of a model, or of this process's shard of it."""
    return layout_of_model(model).stored_as(config.kv_cache_dtype)


def max_model_len(config: EngineConfig, models: list[PreTrainedConfig]) -> int:
    """The smaller of what is asked and what the models' positions allow; ModelError where more is asked."""
    known = [known_positions(model) for model in models]
    if config.max_model_len is not None and config.max_model_len > min(known):
        raise ModelError(f"max_model_len is {config.max_model_len}; the models know positions up to {min(known)}")
    return config.max_model_len or min(known)


def pages_within(memory: float, most: int, layouts: list[KVLayout], page_size: int, max_model_len: int) -> int:
    """Pages per arena: as many as `memory` GiB hold, but at most what `most` sequences of full length can use."""
    page_bytes = page_size * sum(layout.bytes_per_token for layout in layouts)
    affordable = int(memory * GIB) // max(1, page_bytes)  # a model without attention keeps nothing by position
    if affordable < 1:
        raise ModelError(
            f"kv_memory is {memory} GiB; one page of {page_size} tokens takes {page_bytes} bytes: "
            "give more, or a smaller max_model_len or page_size"
        )
    return min(affordable, most * -(-max_model_len // page_size))


def _check_reproducible(config: EngineConfig, device: torch.device) -> None:
    if config.reproducible and device.type not in ("cpu", "cuda"):
        raise ModelError(f"reproducible is for cpu and cuda: on {device.type} no order of sums is known to be fixed")
    if config.reproducible and device.type == "cuda" and not has_triton():
        raise ModelError("reproducible on cuda needs Triton: the order of sums of other attention hangs on lengths")


def _runner(
    config: EngineConfig,
    model: Model,
    make_arena: Callable[..., KVArena],
    states: StatePlan,
    ways: Ways,
    adapters: Adapters | None = None,
) -> Runner:
    if model in ways.alone:
        return alone(model, make_arena(ways.alone[model]))
    arena = make_arena(layout_of(config, model))
    return ModelRunner(model, arena, ways.attends[model], adapters, states.arena(TARGET, model.device))


def _ragged(
    config: EngineConfig,
    target: Model,
    model: Model,
    *,
    row_wise: bool,
    needs_tiles: bool = False,
) -> attention.Attend:
    """The attention with which the target, or this process's shard of it, or a draft passes the self-test.

    `needs_tiles`: passes of the target are tiles of one shape, for which there is one attention.
    """
    name: AttentionName = "fixed" if model is target and needs_tiles else config.attention
    return _attention(name, model, layout_of(config, model), row_wise=row_wise)


def _attention(name: AttentionName, model: Model, layout: KVLayout, *, row_wise: bool) -> attention.Attend:
    """Choose the attention of this name, or else the fastest that fits; transformers' module is tested with it."""

    def try_out(attend: attention.Attend) -> None:
        if not isinstance(model, DecoderModel):
            from engine.startup.self_test import check_ragged_contract

            check_ragged_contract(model, layout, attend)
        elif getattr(attend, "func", attend) is not native.attend:  # kernels are compiled when they first run
            _run_once(attend, layout, model)

    return attention.fitting(name, model.device, try_out, row_wise=row_wise)


def _run_once(attend: attention.Attend, layout: KVLayout, model: Model) -> None:
    """Attend from one row in each kind of layer."""
    arena = KVArena(layout, num_pages=1, page_size=PAGE_SIZE, device=model.device)
    batch, heads = RaggedBatch.of([Feed.begun([0], 0, 1)], PAGE_SIZE, model.device), shape_of(model.config, _HEADS)
    for kind in dict.fromkeys(layer for layer in layout.layers if layer is not None):
        k, v = (rows[layout.layers.index(kind)] for rows in (arena.k, arena.v))
        query = torch.zeros(1, max(heads, kind.heads), kind.key_dim, dtype=model.dtype, device=model.device)
        attend(query, k, v, batch, AttentionSpec(1.0))


def _tiled_runner(
    config: EngineConfig,
    model: Model,
    make_arena: Callable[..., KVArena],
    states: StatePlan,
    ways: Ways,
    tap: Tap | None,
    adapters: Adapters | None = None,
) -> Runner:
    from engine.startup.batch_invariance import ensure_batch_invariance

    layout = layout_of(config, model)
    ensure_batch_invariance(model, layout)
    arena = make_arena(layout, spare_rows=TILE)
    inner = ModelRunner(model, arena, ways.attends[model], adapters, states.arena(TARGET, model.device))
    return FixedShapeRunner(inner, scratch=arena.num_pages, tap=tap, scratch_state=states.scratch)
