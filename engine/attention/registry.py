"""Which attention implementation runs, and the hook by which transformers' models call it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from engine.attention import fixed, native, paged, reference, rows, sdpa
from engine.attention.spec import AttentionSpec
from engine.errors import ModelError
from engine.kernels import has_triton, is_interpreted
from engine.kv.arena import KVArena
from engine.kv.batch import RaggedBatch
from engine.native import library

log = logging.getLogger(__name__)

AttentionName = Literal["auto", "native", "triton", "rows", "sdpa", "reference", "fixed"]

# Under this name transformers finds us. It must NOT be registered with its mask interface: then no mask is built.
_PREFIX = "pilotfish_"
ATTENTION_NAME = f"{_PREFIX}ragged"
# What layers pass besides, and what changes nothing of inference over our arena.
_HARMLESS = frozenset(
    {"dropout", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions", "output_router_logits"}
)


# Attention of a ragged batch over one layer of an arena: query, k, v, batch, spec; shapes as in `reference.attend`.
Attend = Callable[[Tensor, Tensor, Tensor, RaggedBatch, AttentionSpec], Tensor]


@dataclass(frozen=True, slots=True)
class Ragged:
    """The one keyword that a forward pass carries down to the attention function."""

    batch: RaggedBatch
    arena: KVArena
    attend: Attend
    states: object = None  # of the pass (`recurrent.states.PassStates`), for the layers of a decoder that keep some
    embedded: Tensor | None = None  # what its first layer reads, [1, T, width], for later ones that read it too

    def attend_layer(
        self,
        layer: int,
        query: Tensor,  # [T, heads, key_dim]
        key: Tensor,  # [T, kv_heads, key_dim]
        value: Tensor,  # [T, kv_heads, value_dim]
        spec: AttentionSpec,
    ) -> Tensor:  # [T, heads, value_dim]
        """Write the new K/V of a layer in place, then attend."""
        self.arena.write(layer, self.batch.kv_rows, key, value)
        return self.attend(query, self.arena.k[layer], self.arena.v[layer], self.batch, spec)


class CurrentPass:
    """Where the attention modules of a model find the batch of its pass, if a layer drops the keyword on its way."""

    def __init__(self) -> None:
        self.ragged: Ragged | None = None

    @classmethod
    def of(cls, model: nn.Module) -> CurrentPass:
        """The one that the attention modules of `model` look at; installed at the first call."""
        modules = [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]
        found = (getattr(module, "current_pass", None) for module in modules)
        shared = next((one for one in found if isinstance(one, CurrentPass)), None) or cls()
        for module in modules:
            module.current_pass = shared  # type: ignore[assignment]  # no parameter, and no module
        return shared

    @contextmanager
    def runs(self, ragged: Ragged) -> Iterator[None]:
        """Within it the model runs a pass over this batch."""
        self.ragged = ragged
        try:
            yield
        finally:
            self.ragged = None


_BY_NAME: Mapping[str, Attend] = {
    "native": native.attend,
    "triton": paged.attend,
    "rows": rows.attend,
    "sdpa": sdpa.attend,
    "reference": reference.attend,
    "fixed": fixed.attend,
}


def is_ours(implementation: str) -> bool:
    """Whether transformers' models call us under this name of an attention, and not its own code."""
    return implementation.startswith(_PREFIX)


def choose(name: AttentionName, device: torch.device, *, row_wise: bool = False) -> Attend:
    """Pick an implementation; `auto` is the fastest here, or if `row_wise` that of those whose rows see no other.

    `fixed` is the one whose order of sums hangs on absolute positions alone: our kernel with tiles of one size where
    it can be had.

    Raises:
        ModelError: `native` or `triton` is asked for and cannot be had.
    """
    has_native = device.type == "cpu" and library() is not None
    has_kernel = device.type == "cuda" and has_triton()
    if name == "native" and not has_native:
        raise ModelError(
            "attention is native; it needs a CPU and our C kernels (`pilotfish check` says what is missing)"
        )
    if name == "triton" and not has_kernel and not is_interpreted():
        raise ModelError(f"attention is triton; it needs a CUDA device and Triton, and this is {device.type}")
    others: AttentionName = "rows" if row_wise else "sdpa"
    fastest: AttentionName = "native" if has_native else "triton" if has_kernel else others
    chosen = fastest if name == "auto" else name
    if chosen == "fixed" and has_kernel:
        log.info("attention on %s: triton, all rows in tiles of one size", device.type)
        return paged.attend_fixed
    log.info("attention on %s: %s%s", device.type, chosen, "" if name == "auto" else ", as asked for")
    return partial(native.attend, otherwise=_BY_NAME[others]) if chosen == "native" else _BY_NAME[chosen]


def _hook(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, key_dim]
    key: Tensor,  # [1, kv_heads, T, key_dim]
    value: Tensor,  # [1, kv_heads, T, value_dim]
    attention_mask: Tensor | None,
    *,
    ragged: Ragged | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Called by every layer of a transformers model."""
    ragged = ragged if ragged is not None else _current(module)
    if attention_mask is not None:
        raise ModelError(f"{type(module).__name__} builds its own mask, which knows nothing of ragged batches")
    unknown = [name for name, value in others.items() if value is not None and name not in _HARMLESS]
    if unknown:
        raise ModelError(f"{type(module).__name__} asks for {', '.join(unknown)}, which our attention does not do")
    layer = module.layer_idx
    assert isinstance(layer, int)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    spec = AttentionSpec(scale, sliding_window, None, softcap, s_aux)
    q, k, v = (rows[0].transpose(0, 1) for rows in (query, key, value))
    return ragged.attend_layer(layer, q, k, v, spec)[None], None  # [1, T, heads, value_dim]


def _current(module: nn.Module) -> Ragged:
    current = getattr(module, "current_pass", None)
    if not isinstance(current, CurrentPass) or current.ragged is None:
        raise ModelError(f"{type(module).__name__} runs outside of a pass of a ragged batch")
    return current.ragged


def register_hook() -> None:
    """Let transformers' models find our attention by its name; called before one is made."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _hook)
