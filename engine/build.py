"""From a config to an engine: loads the models, sizes the arenas, wires the parts. Nothing here runs in a step."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from engine import attention
from engine.bits import hold_bits
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ModelError
from engine.intake import Limits
from engine.kv import BlockPool, KVArena, KVLayout
from engine.probe import probe
from engine.proposers import ModelProposer, NGramProposer, NoProposer, Proposer, Proposers
from engine.runner import ModelRunner, Runner, end_tokens, known_positions, kv_layout, load_model, vocab_size
from engine.scheduler import Scheduler
from engine.tiles import TILE, TiledRunner

GIB = 2**30


def build_engine(config: EngineConfig, progress: Callable[[str], None] = lambda _: None) -> Engine:
    """Load what `config` names and make it ready to step; `progress` is told each stage.

    Raises:
        ModelError: a checkpoint that cannot be served, or a pair that does not fit together.
    """
    device = pick_device(config.device)
    _check_bits_are_promised(config, device)
    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    dtype = getattr(torch, config.dtype)
    progress(f"loading target {config.target}")
    target = load_model(config.target, config.revision, dtype, device)
    draft = None
    if config.draft is not None:
        progress(f"loading draft {config.draft}")
        draft = load_model(config.draft, config.draft_revision, dtype, device)
    progress("allocating K/V")
    return assemble(config, target, draft)


def assemble(
    config: EngineConfig,
    target: PreTrainedModel,
    draft: PreTrainedModel | None = None,
    extra_proposers: Mapping[str, Proposer] = MappingProxyType({}),
) -> Engine:
    """An engine of models that are loaded already (with our attention: `runner.load_model`).

    `extra_proposers` come to those that the config brings, or replace them by name.
    """
    if draft is not None and vocab_size(draft) != vocab_size(target):
        raise ModelError(
            f"draft {config.draft!r} has {vocab_size(draft)} tokens and target {config.target!r} {vocab_size(target)}: "
            "a draft must share the target's vocabulary"
        )
    _check_bits_are_promised(config, target.device)
    models = [target] if draft is None else [target, draft]
    limit = max_model_len(config, [model.config for model in models])
    layouts = [kv_layout(model.config, model.dtype) for model in models]
    page_size = min(config.page_size or limit, limit)
    num_pages = pages_within(config, layouts, page_size, limit)
    attend = attention.choose(config.attention, contiguous=page_size >= limit)
    # Under the coupled rule a draft's bits reach no output: only the target is slowed down for them.
    make = [_tiled_runner if config.reproducible else _runner, _runner]
    runners = [f(m, kv, attend, num_pages, page_size) for f, m, kv in zip(make, models, layouts, strict=False)]
    proposers = _proposers(config, runners[1] if draft is not None else None, extra_proposers, runners[0].vocab_size)
    scheduler = Scheduler(
        BlockPool(num_pages, page_size),
        BlockPool(num_pages, page_size) if draft is not None else None,
        config.max_batch_size,
        config.max_batch_tokens,
        proposers.draft_kv_users,
    )
    limits = Limits(runners[0].vocab_size, min(limit, num_pages * page_size), end_tokens(target))
    return Engine(config, limits, runners[0], proposers, scheduler)


def pick_device(name: str) -> torch.device:
    """`auto` -> cuda where there is one, else cpu; ModelError where cuda is asked for in vain."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("device is cuda, and torch sees no CUDA device here")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def max_model_len(config: EngineConfig, models: list[PreTrainedConfig]) -> int:
    """The least of what is asked and what the models' positions allow."""
    known = [known_positions(model) for model in models]
    if config.max_model_len is not None and config.max_model_len > min(known):
        raise ModelError(f"max_model_len is {config.max_model_len}; the models know positions up to {min(known)}")
    return config.max_model_len or min(known)


def pages_within(config: EngineConfig, layouts: list[KVLayout], page_size: int, max_model_len: int) -> int:
    """Pages per arena: what the memory holds, but no more than a full batch of longest sequences could use."""
    page_bytes = page_size * sum(layout.bytes_per_token for layout in layouts)
    affordable = int(config.kv_memory * GIB) // page_bytes
    if affordable < 1:
        raise ModelError(
            f"kv_memory is {config.kv_memory} GiB; one page of {page_size} tokens takes {page_bytes} bytes: "
            "give more, or a smaller max_model_len or page_size"
        )
    return min(affordable, config.max_batch_size * -(-max_model_len // page_size))


def _check_bits_are_promised(config: EngineConfig, device: torch.device) -> None:
    if config.reproducible and device.type != "cpu":
        raise ModelError(f"reproducible is for the CPU: on {device.type} it was never measured, so it is not promised")


def _tiled_runner(
    model: PreTrainedModel, layout: KVLayout, _: attention.Attend, num_pages: int, page_size: int
) -> Runner:
    attend = attention.choose("fixed", contiguous=False)
    probe(model, layout, attend)
    hold_bits(model, layout)
    arena = KVArena(layout, num_pages, page_size, model.device, spare_rows=TILE)
    return TiledRunner(ModelRunner(model, arena, attend), scratch=num_pages)


def _runner(
    model: PreTrainedModel, layout: KVLayout, attend: attention.Attend, num_pages: int, page_size: int
) -> Runner:
    probe(model, layout, attend)
    return ModelRunner(model, KVArena(layout, num_pages, page_size, model.device), attend)


def _proposers(config: EngineConfig, draft: Runner | None, extra: Mapping[str, Proposer], vocab_size: int) -> Proposers:
    by_name: dict[str, Proposer] = {"none": NoProposer(), "ngram": NGramProposer()}
    if draft is not None:
        by_name["model"] = ModelProposer(draft, config.max_batch_tokens)
    by_name |= extra
    if config.proposer is not None and config.proposer not in by_name:
        raise ModelError(f"proposer is {config.proposer!r}; without a draft model there is {', '.join(by_name)}")
    return Proposers(by_name, vocab_size)
