"""Computes how much memory keys and values may take. It uses shapes and devices only, and no loaded model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.device_loop.graph_cache import MOST_RECORDED, allows_rounds, in_order_of_worth, places_for
from engine.device_loop.graphs import A_ROUND, MemoryBudget, MemoryUse
from engine.errors import ModelError
from engine.kernels.paging import scratch_bytes

if TYPE_CHECKING:  # for types only: benchmarks/harness/bare.py passes its own class where pydantic is missing
    from transformers import PreTrainedConfig

    from engine.config import EngineConfig

log = logging.getLogger(__name__)

GIB = 2**30
ON_A_CPU = 2.0  # GiB; a fixed size, because other processes may later need the memory that is free now
_SHARE = 0.95  # share of a card's free memory that we use: the rest is for unforeseen needs, such as fragmentation
_GRAPHS = 0.1  # largest share of free memory for recorded rounds; shapes beyond it run in recorded larger shapes
_NUMBER = 8  # bytes; the noise of a draw is float64
_COPIES = 4  # copies of the logits while tokens are drawn from them
_LOGITS = 2  # float32 numbers for each logit, where kernels draw the tokens
_LONGEST = 1 << 20  # tokens, for a model whose config gives no limit
_LEAST = 0.001  # GiB for keys and values, where their part is not asked for
_WIDTHS = 6  # rows, each as wide as a layer's widest, that a pass holds at once


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a CUDA device."""

    free: int  # including those that torch has reserved here and does not use
    total: int
    held: int  # by tensors of this process

    @classmethod
    def of(cls, device: torch.device) -> DeviceMemory:
        """What the driver and torch say now."""
        (free, total), held = torch.cuda.mem_get_info(device), torch.cuda.memory_allocated(device)
        return cls(free + torch.cuda.memory_reserved(device) - held, total, held)

    def holding(self, more: int) -> DeviceMemory:
        """The same once this process holds so many bytes more."""
        return DeviceMemory(self.free - more, self.total, self.held + more)

    def part(self, engines: int) -> int:
        """What one of so many engines may still take: 80 GiB in all, two engines, 16 GiB of weights each: 24 GiB."""
        return min(self.free, self.total // engines - self.held)


def use_of(device: torch.device) -> MemoryUse:
    """What is taken once torch has returned what it does not use."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return MemoryUse(total - free, torch.cuda.memory_reserved(device))


def kv_gib(
    config: EngineConfig, device: torch.device, target: PreTrainedConfig,
    memory: Callable[[torch.device], DeviceMemory] = DeviceMemory.of,
) -> float:  # fmt: skip
    """GiB for keys and values: as asked; else, on CUDA, this engine's part of the memory minus what passes will need.

    Raises:
        ModelError: no memory is left; or several engines share the device, and more than this one's part is asked for.
    """
    engines, asked = config.engines_per_device, config.kv_memory
    if device.type != "cuda" or (asked is not None and engines == 1):
        return ON_A_CPU if asked is None else asked
    found = memory(device).part(engines) * _SHARE / GIB
    needed = pass_bytes(config, target) / GIB + min(graph_bytes(config, target) / GIB, _GRAPHS * found)
    if engines > 1 and found - needed < (asked or _LEAST):
        given = "not given" if asked is None else f"{asked:g} GiB"
        raise ModelError(
            f"kv_memory is {given}, and engines_per_device {engines}, with a standby counted: one engine's part of "
            f"{device} leaves {found - needed:.1f} GiB for keys and values; give less kv_memory, a smaller model, "
            "fewer engines or no standby"
        )
    if asked is not None:
        return asked
    if found <= needed:
        raise ModelError(
            f"{found:.1f} GiB are free on {device} and passes may need {needed:.1f}: nothing is left for keys and "
            "values; give smaller models, max_batch_size or max_batch_tokens, or kv_memory itself"
        )
    log.info("of %.1f GiB that are free on %s, K/V takes at most %.1f", found / _SHARE, device, found - needed)
    return found - needed


def graph_bytes(config: EngineConfig, target: PreTrainedConfig) -> int:
    """Bytes for recorded rounds of all shapes: the graphs of each round, and one memory pool that all rounds share."""
    if not allows_rounds(config):
        return 0
    text, most_drafts = target.get_text_config(), config.num_draft_tokens if config.draft is not None else 0
    rows = places_for(config.max_batch_size) * (most_drafts + 1)
    pool: int = rows * (text.vocab_size * _LOGITS * 4 + _widest(target) * _WIDTHS * _NUMBER)
    pool += _shared_attention(rows, config, text)
    return pool + A_ROUND * min(MOST_RECORDED, len(in_order_of_worth(config.max_batch_size, most_drafts)))


def graph_budget(config: EngineConfig, target: PreTrainedConfig, device: torch.device) -> MemoryBudget:
    """Memory for recorded rounds after K/V are allocated: as planned, or what passes leave free if that is less."""
    left = DeviceMemory.of(device).part(config.engines_per_device) - pass_bytes(config, target)
    return MemoryBudget(min(graph_bytes(config, target), left), lambda: use_of(device))


def pass_bytes(config: EngineConfig, target: PreTrainedConfig) -> int:
    """Bytes that the largest pass holds beside weights and K/V.

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
    """Bytes of one layer's partial attention results, where long sequences are split among kernel programs."""
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    widest = max(head_dim, *(getattr(text, name, None) or 0 for name in ("kv_lora_rank", "global_head_dim")))
    longest = config.max_model_len or getattr(text, "max_position_embeddings", None) or _LONGEST
    return scratch_bytes(rows, text.num_attention_heads, widest, longest)
