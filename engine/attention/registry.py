"""Selects the attention implementation, and provides the hook by which transformers' models call it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from pilotfish.engine.attention import native, paged, reference, sdpa
from pilotfish.engine.attention.reference import AttentionSpec
from pilotfish.engine.choices import AttentionKind
from pilotfish.engine.errors import ModelError
from pilotfish.engine.kernels import faults, has_triton, is_interpreted
from pilotfish.engine.kv.arena import KVArena
from pilotfish.engine.kv.batch import RaggedBatch
from pilotfish.engine.native import library

log = logging.getLogger(__name__)

# Our name in transformers' registry. It must NOT be registered in its mask interface, so that no mask is built.
ATTENTION_NAME = "pilotfish_ragged"
# Further arguments of layers, without effect on inference over our arena.
_HARMLESS = frozenset(
    {"dropout", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions", "output_router_logits"}
)


# Attention of a ragged batch over one layer of an arena: query, k, v, batch, spec; shapes as in `reference.attend`.
Attend = Callable[[Tensor, Tensor, Tensor, RaggedBatch, AttentionSpec], Tensor]


@dataclass(frozen=True, slots=True)
class Ragged:
    """What a forward pass carries down to its attention."""

    batch: RaggedBatch
    arena: KVArena
    attend: Attend
    states: object = None  # of the pass (`recurrent.arena.PassStates`), for the recurrent layers of a decoder
    embedded: Tensor | None = None  # input of its first layer, [1, T, width], for later layers that also read it

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


_PASS: ContextVar[Ragged | None] = ContextVar("pass", default=None)  # that a model of transformers runs


@contextmanager
def running(ragged: Ragged) -> Iterator[None]:
    """Context in which transformers' models run a pass over this batch; not all of their layers forward keywords."""
    token = _PASS.set(ragged)
    try:
        yield
    finally:
        _PASS.reset(token)


_BY_NAME: Mapping[str, Attend] = {
    "native": native.attend,
    "triton": paged.attend,
    "rows": sdpa.attend_rows,
    "sdpa": sdpa.attend,
    "reference": reference.attend,
    "fixed": sdpa.attend_fixed,
}


def choose(name: AttentionKind, device: torch.device, *, row_wise: bool = False) -> Attend:
    """Choose an implementation; `auto` is the fastest, or with `row_wise` the fastest with independent rows.

    `fixed` is the fastest in which a row's bits depend neither on other rows nor on the number of threads.

    Raises:
        ModelError: `native` or `triton` is asked for and not available.
    """
    has_native = device.type == "cpu" and library() is not None
    has_kernel = device.type == "cuda" and has_triton()
    if name == "native" and not has_native:
        raise ModelError(
            "attention is native, which requires a CPU and the C kernels (`pilotfish check` reports what is missing)"
        )
    if name == "triton" and not has_kernel and not is_interpreted():
        raise ModelError(f"attention is triton, which requires a CUDA device and Triton; device is {device.type}")
    others: AttentionKind = "fixed" if name == "fixed" else "rows" if row_wise else "sdpa"
    fastest: AttentionKind = "native" if has_native else "triton" if has_kernel else others
    chosen = fastest if name in ("auto", "fixed") else name
    if name == "fixed" and has_kernel:
        log.info("attention on %s: triton, one tile size for all rows", device.type)
        return paged.attend_fixed
    log.info("attention on %s: %s%s", device.type, chosen, "" if name == "auto" else " (configured)")
    return partial(native.attend, otherwise=_BY_NAME[others]) if chosen == "native" else _BY_NAME[chosen]


def fitting(
    name: AttentionKind, device: torch.device, self_test: Callable[[Attend], None], *, row_wise: bool = False
) -> Attend:
    """As `choose`, but if `auto` selects our kernel and it does not compile or fit in `self_test`, use torch's.

    Raises:
        ModelError: the kernel was selected by name; or any other error of `self_test`.
    """
    chosen = choose(name, device, row_wise=row_wise)
    try:
        self_test(chosen)
    except faults() as error:
        if name != "auto":
            raise ModelError(f"attention is {name}; its kernel cannot run on this device: {error}") from error
        log.warning("attention on %s: falling back to torch, the kernel failed: %s", device.type, error)
        chosen = choose("rows" if row_wise else "sdpa", device)
        self_test(chosen)
    return chosen


def hook(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, key_dim]
    key: Tensor,  # [1, kv_heads, T, key_dim]
    value: Tensor,  # [1, kv_heads, T, value_dim]
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Called by every layer of a transformers model."""
    ragged = _PASS.get()
    if ragged is None:
        raise ModelError(f"{type(module).__name__} was called outside of a ragged pass")
    if attention_mask is not None:
        raise ModelError(f"{type(module).__name__} passes its own attention mask, which ragged batches do not support")
    unknown = [name for name, value in others.items() if value is not None and name not in _HARMLESS]
    if unknown:
        raise ModelError(f"{type(module).__name__} passes unsupported attention arguments: {', '.join(unknown)}")
    layer = module.layer_idx
    assert isinstance(layer, int)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    spec = AttentionSpec(scale, sliding_window, None, softcap, s_aux)
    q, k, v = (rows[0].transpose(0, 1) for rows in (query, key, value))
    return ragged.attend_layer(layer, q, k, v, spec)[None], None  # [1, T, heads, value_dim]
