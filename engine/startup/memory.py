"""Computes the memory for keys, values and recurrent states, from shapes and devices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pilotfish.engine.device_loop.graph_cache import MOST_RECORDED, allows_rounds, in_order_of_worth, places_for
from pilotfish.engine.device_loop.graphs import A_ROUND, MemoryBudget, MemoryUse
from pilotfish.engine.errors import ModelError
from pilotfish.engine.kernels.paging import scratch_bytes
from pilotfish.engine.kv.states import StatePool, slots_per_sequence
from pilotfish.engine.recurrent.arena import StateArena, StatePart, bytes_per_slot, parts_of

if TYPE_CHECKING:  # for types only: benchmarks/harness/bare.py passes its own class where pydantic is missing
    from transformers import PreTrainedConfig

    from pilotfish.engine.config import EngineConfig
    from pilotfish.engine.model.decoder.decoder import Model

log = logging.getLogger(__name__)

GIB = 2**30
ON_A_CPU = 2.0  # GiB; fixed, because other processes may later need the currently free memory
_SHARE = 0.95  # share of a GPU's free memory that is used; the rest is a reserve, for example for fragmentation
_GRAPHS = 0.1  # maximum share of free memory for recorded rounds; other shapes run in larger recorded ones
_NUMBER = 8  # bytes; the noise of a draw is float64
_COPIES = 4  # copies of the logits while tokens are drawn from them
_LOGITS = 2  # float32 numbers per logit, if kernels draw the tokens
_LONGEST = 1 << 20  # tokens, for a model whose config gives no limit
_LEAST = 0.001  # default GiB for keys and values
_WIDTHS = 6  # rows of maximum width that a pass holds at once
TARGET = "target"  # key besides the names of proposers
# States are large (megabytes per layer). Their slots share the memory for keys and values; if their part is too small
# for all sequences, fewer run at once.
_STATES_SHARE = 0.5  # maximum part of that memory
_SPARE = 1  # slots reserved for the empty state


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a CUDA device."""

    free: int  # including memory reserved but unused by torch in this process
    total: int
    held: int  # by tensors of this process

    @classmethod
    def of(cls, device: torch.device) -> DeviceMemory:
        """Current values of the driver and torch."""
        (free, total), held = torch.cuda.mem_get_info(device), torch.cuda.memory_allocated(device)
        return cls(free + torch.cuda.memory_reserved(device) - held, total, held)

    def holding(self, more: int) -> DeviceMemory:
        """The same with `more` bytes held by this process."""
        return DeviceMemory(self.free - more, self.total, self.held + more)

    def part(self, engines: int) -> int:
        """The remaining part of one of `engines`: 80 GiB in total, two engines, 16 GiB of weights each: 24 GiB."""
        return min(self.free, self.total // engines - self.held)


def use_of(device: torch.device) -> MemoryUse:
    """Used memory after torch has returned its unused memory."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return MemoryUse(total - free, torch.cuda.memory_reserved(device))


def kv_gib(
    config: EngineConfig, device: torch.device, target: PreTrainedConfig,
    memory: Callable[[torch.device], DeviceMemory] = DeviceMemory.of,
) -> float:  # fmt: skip
    """GiB for keys and values: as configured; else, on CUDA, this engine's part minus the needs of passes.

    Raises:
        ModelError: no memory is left, or several engines share the device and this one's part is exceeded.
    """
    engines, asked = config.engines_per_device, config.kv_memory
    if device.type != "cuda" or (asked is not None and engines == 1):
        return ON_A_CPU if asked is None else asked
    found = memory(device).part(engines) * _SHARE / GIB
    needed = pass_bytes(config, target) / GIB + min(graph_bytes(config, target) / GIB, _GRAPHS * found)
    if engines > 1 and found - needed < (asked or _LEAST):
        given = "not given" if asked is None else f"{asked:g} GiB"
        raise ModelError(
            f"kv_memory is {given} with {engines} engines per device (standby included); one engine's share of "
            f"{device} leaves {found - needed:.1f} GiB for keys and values: reduce kv_memory, engines_per_device or "
            "standbys, or use a smaller model"
        )
    if asked is not None:
        return asked
    if found <= needed:
        raise ModelError(
            f"{found:.1f} GiB are free on {device} and passes need up to {needed:.1f}, which leaves none for keys and "
            "values: use a smaller model, reduce max_batch_size or max_batch_tokens, or set kv_memory"
        )
    log.info("%.1f GiB free on %s; at most %.1f GiB for K/V", found / _SHARE, device, found - needed)
    return found - needed


def graph_bytes(config: EngineConfig, target: PreTrainedConfig) -> int:
    """Bytes for recorded rounds of all shapes: the graphs of each round, and one memory pool that all rounds share."""
    if not allows_rounds(config):
        return 0
    text, most_drafts = target.get_text_config(), config.num_draft_tokens if config.draft else 0
    rows = places_for(config.max_batch_size) * (most_drafts + 1)
    pool: int = rows * (text.vocab_size * _LOGITS * 4 + _widest(target) * _WIDTHS * _NUMBER)
    pool += _shared_attention(rows, config, text)
    return pool + A_ROUND * min(MOST_RECORDED, len(in_order_of_worth(config.max_batch_size, most_drafts)))


def graph_budget(config: EngineConfig, target: PreTrainedConfig, device: torch.device) -> MemoryBudget:
    """Memory for recorded rounds after allocating K/V: as planned, or what passes leave free if that is less."""
    left = DeviceMemory.of(device).part(config.engines_per_device) - pass_bytes(config, target)
    return MemoryBudget(min(graph_bytes(config, target), left), lambda: use_of(device))


def pass_bytes(config: EngineConfig, target: PreTrainedConfig) -> int:
    """Bytes of the largest pass besides weights and K/V.

    These are its rows between layers, its logits, the work space of draws, and the partial results of one layer's
    attention. A shard of a target has fewer heads and needs less.
    """
    text, widest = target.get_text_config(), _widest(target)
    rows, decided = config.max_batch_tokens, config.max_batch_size * (config.num_draft_tokens + 1)
    drawn: int = decided * text.vocab_size * _COPIES * _NUMBER
    between: int = max(rows, decided) * widest * _WIDTHS * _NUMBER
    return drawn + between + _shared_attention(max(rows, decided), config, text)


def _widest(target: PreTrainedConfig) -> int:
    text = target.get_text_config()
    widest: int = max(text.hidden_size, getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
    return widest


def _shared_attention(rows: int, config: EngineConfig, text: PreTrainedConfig) -> int:
    """Bytes of one layer's partial attention results, if long sequences are split among programs."""
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    widest = max(head_dim, *(getattr(text, name, None) or 0 for name in ("kv_lora_rank", "global_head_dim")))
    longest = config.max_model_len or getattr(text, "max_position_embeddings", None) or _LONGEST
    return scratch_bytes(rows, text.num_attention_heads, widest, longest)


@dataclass(frozen=True, slots=True)
class StatePlan:
    """The states of a target and of the models that draft for it, by `TARGET` and by proposer name."""

    parts: Mapping[str, tuple[StatePart, ...]]
    slots: Mapping[str, int]  # of each arena
    log_rows: int
    prefix_cache: bool  # whether the prefix cache keeps states of the target

    @classmethod
    def of(cls, config: EngineConfig, models: Mapping[str, Model], memory: float) -> StatePlan:
        """Plan for `models`, by `TARGET` and by proposer name, within `memory` GiB for states, keys and values.

        Raises:
            ModelError: there is no room for a single sequence.
        """
        parts = {name: found for name, model in models.items() if (found := parts_of(model))}
        log_rows, most = max(1, config.num_draft_tokens), config.max_batch_size
        sizes = {name: bytes_per_slot(found, log_rows) for name, found in parts.items()}
        own = {name: slots_per_sequence(snapshots=config.prefix_cache and name == TARGET) for name in parts}
        budget = int(memory * GIB * _STATES_SHARE) - _SPARE * sum(sizes.values())
        one = sum(own[name] * size for name, size in sizes.items())
        if parts and budget < one:
            raise ModelError(
                f"kv_memory is {memory} GiB, of which states may take half; one sequence needs {one} bytes: "
                "increase it, or reduce num_draft_tokens"
            )
        running = min(most, budget // one) if parts else 0
        slots = {name: _SPARE + running * own[name] for name in parts}
        if TARGET in parts and config.prefix_cache:
            slots[TARGET] += min(2 * most, (budget - running * one) // sizes[TARGET])
        return cls(parts, slots, log_rows, config.prefix_cache)

    @property
    def gib(self) -> float:
        """GiB of all state arenas."""
        return sum(bytes_per_slot(parts, self.log_rows) * self.slots[name] for name, parts in self.parts.items()) / GIB

    def arena(self, name: str, device: torch.device) -> StateArena | None:
        """The state arena of a model; None if it has no recurrent layers."""
        if name not in self.parts:
            return None
        return StateArena(self.parts[name], self.slots[name], self.log_rows, device)

    def pool(self, name: str) -> StatePool | None:
        """A new slot pool of a model; None if it has no recurrent layers."""
        if name not in self.parts:
            return None
        return StatePool(self.slots[name], self.log_rows, snapshots=self.prefix_cache and name == TARGET)
