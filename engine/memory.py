"""How much memory keys and values may take. Knows shapes and devices; knows no model that is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedConfig

from engine.errors import ModelError

if TYPE_CHECKING:  # it is asked for values alone: a GPU machine without pydantic has others (benchmarks/bare.py)
    from engine.config import EngineConfig

log = logging.getLogger(__name__)

GIB = 2**30
ON_A_CPU = 2.0  # GiB: what a machine has free now may be wanted by others later
_SHARE = 0.95  # of what a card has free: what is left is for what nobody foresaw, such as pieces that do not fit
_GRAPHS = 1.0  # GiB for recorded rounds; all of them work in one pool, and each takes some tens of MiB for itself
_NUMBER = 8  # bytes; the noise of a draw is float64
_COPIES = 4  # of the logits, while tokens are drawn from them
_WIDTHS = 6  # rows as wide as a layer's widest that a pass holds at once

Free = Callable[[torch.device], int]


def free_on(device: torch.device) -> int:
    """Bytes that a CUDA device has free, those included that torch keeps for itself and does not use."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def kv_gib(config: EngineConfig, device: torch.device, target: PreTrainedConfig, free: Free = free_on) -> float:
    """GiB for keys and values: as asked; else, on CUDA, what is free now but for what passes will need.

    Raises:
        ModelError: nothing is left.
    """
    if config.kv_memory is not None:
        return config.kv_memory
    if device.type != "cuda":
        return ON_A_CPU
    found, needed = free(device) * _SHARE / GIB, pass_bytes(config, target) / GIB + _GRAPHS
    if found <= needed:
        raise ModelError(
            f"{found:.1f} GiB are free on {device} and passes may need {needed:.1f}: nothing is left for keys and "
            "values; give smaller models, max_batch_size or max_batch_tokens, or kv_memory itself"
        )
    log.info("of %.1f GiB that are free on %s, K/V takes at most %.1f", found / _SHARE, device, found - needed)
    return found - needed


def pass_bytes(config: EngineConfig, target: PreTrainedConfig) -> int:
    """What the largest pass holds beside weights and K/V: its rows between layers, its logits and their draws."""
    text = target.get_text_config()
    rows, decided = config.max_batch_tokens, config.max_batch_size * (config.num_draft_tokens + 1)
    widest = max(text.hidden_size, getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
    drawn: int = decided * text.vocab_size * _COPIES * _NUMBER
    between: int = max(rows, decided) * widest * _WIDTHS * _NUMBER
    return drawn + between
