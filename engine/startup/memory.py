"""How much memory keys and values may take. Knows shapes and devices; knows no model that is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedConfig

from engine.device_loop.graphs import MemoryBudget
from engine.device_loop.shapes import MOST_RECORDED, allows_rounds, in_order_of_worth, places_for
from engine.errors import ModelError
from engine.kernels.paging import scratch_bytes

if TYPE_CHECKING:  # only its values are read: a GPU machine without pydantic passes benchmarks/harness/bare.py
    from engine.config import EngineConfig

log = logging.getLogger(__name__)

GIB = 2**30
ON_A_CPU = 2.0  # GiB: what a machine has free now may be wanted by others later
_SHARE = 0.95  # of what a card has free: what is left is for what nobody foresaw, such as pieces that do not fit
_A_ROUND = 16 << 20  # bytes that a recorded round takes for itself: a kilobyte or so for each of its kernels, in all
_GRAPHS = 0.1  # of what is free is the most that recorded rounds may take; the rest of them run as others stand in
_NUMBER = 8  # bytes; the noise of a draw is float64
_COPIES = 4  # of the logits, while tokens are drawn from them
_LOGITS = 2  # float32 numbers for each logit, where tokens are drawn by kernels
_LONGEST = 1 << 20  # tokens, of a model that says nothing of its own
_WIDTHS = 6  # rows as wide as a layer's widest that a pass holds at once

Free = Callable[[torch.device], int]


def free_on(device: torch.device) -> int:
    """Bytes that a CUDA device has free, those included that torch keeps for itself and does not use."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def unreserved_on(device: torch.device) -> int:
    """Bytes that nobody has asked the driver for; torch gives back first what it does not use."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return free


def kv_gib(config: EngineConfig, device: torch.device, target: PreTrainedConfig, free: Free = free_on) -> float:
    """GiB for keys and values: as asked; else, on CUDA, what is free now but for what passes will need.

    Raises:
        ModelError: nothing is left.
    """
    if config.kv_memory is not None:
        return config.kv_memory
    if device.type != "cuda":
        return ON_A_CPU
    found = free(device) * _SHARE / GIB
    needed = pass_bytes(config, target) / GIB + min(graph_bytes(config, target) / GIB, _GRAPHS * found)
    if found <= needed:
        raise ModelError(
            f"{found:.1f} GiB are free on {device} and passes may need {needed:.1f}: nothing is left for keys and "
            "values; give smaller models, max_batch_size or max_batch_tokens, or kv_memory itself"
        )
    log.info("of %.1f GiB that are free on %s, K/V takes at most %.1f", found / _SHARE, device, found - needed)
    return found - needed


def graph_bytes(config: EngineConfig, target: PreTrainedConfig) -> int:
    """What rounds of all shapes take when they are recorded: each its graphs, and all one pool to work in."""
    if not allows_rounds(config):
        return 0
    text, most_drafts = target.get_text_config(), config.num_draft_tokens if config.draft is not None else 0
    rows = places_for(config.max_batch_size) * (most_drafts + 1)
    pool: int = rows * (text.vocab_size * _LOGITS * 4 + _widest(target) * _WIDTHS * _NUMBER)
    pool += _shared_attention(rows, config, text)
    return pool + _A_ROUND * min(MOST_RECORDED, len(in_order_of_worth(config.max_batch_size, most_drafts)))


def graph_budget(config: EngineConfig, target: PreTrainedConfig, device: torch.device) -> MemoryBudget:
    """Memory for recorded rounds once K/V have theirs: as planned, or what passes leave if that is less."""
    left = free_on(device) - pass_bytes(config, target)
    return MemoryBudget(min(graph_bytes(config, target), left), lambda: unreserved_on(device))


def pass_bytes(config: EngineConfig, target: PreTrainedConfig) -> int:
    """What the largest pass holds beside weights and K/V: its rows between layers, its logits and their draws.

    And what the attention of one layer shares out. Shares of a target have fewer heads each, and need less.
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
    """Where long sequences are shared among programs, what these say of one layer before it is merged."""
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    longest = config.max_model_len or getattr(text, "max_position_embeddings", None) or _LONGEST
    return scratch_bytes(rows, text.num_attention_heads, head_dim, longest)
