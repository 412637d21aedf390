"""What a model keeps of a sequence beside keys and values, and which of its layers attend: shown by a tiny pass."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from engine.errors import ModelError
from engine.kv.arena import LayerKV
from engine.kv.batch import Feed, RaggedBatch
from engine.kv.latent import latent_of
from engine.recurrent import registry
from engine.recurrent.parts import StatePart
from engine.recurrent.plan import ScanPlan
from engine.recurrent.states import RaggedStates
from engine.types import EMPTY_STATE, StateSpan

_CACHE_NAMES = ("cache", "past_key_values", "cache_params")  # of one argument, in families and versions
_WATCHING = "pilotfish_watching"  # the attention of the tiny pass, as transformers finds it
_FAULTS = (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError, AssertionError)


class Findings(NamedTuple):
    """What the pass has shown."""

    parts: tuple[StatePart, ...]  # of the state, in the order in which a pass comes to them
    attends: Mapping[int, LayerKV]  # the layers that attend, by number
    keyword: str  # the argument of the model's forward that takes a cache


class _Store:
    """Makes room for each part when the pass comes to it."""

    def __init__(self, device: torch.device) -> None:
        self.parts: list[StatePart] = []
        self.device = device

    def of(self, number: int, part: StatePart) -> tuple[Tensor, Tensor]:
        assert number == len(self.parts)
        self.parts.append(part)
        return part.tensors(2, 1, self.device)


class _Watch(RaggedStates):
    """Notes which layers keep keys and values, and which of them come to the attention function."""

    def __init__(self, plan: ScanPlan, store: _Store) -> None:
        super().__init__(plan, store, registry.choose(store.device))
        self.keep_kv: set[int] = set()
        self.attends: dict[int, LayerKV] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.keep_kv.add(layer_idx)
        return super().update(key_states, value_states, layer_idx)


@torch.inference_mode()
def probe(model: PreTrainedModel) -> Findings:
    """Run a prepared model over two tokens.

    Raises:
        ModelError: it cannot run with our states, or keeps some in a way that we do not know.
    """
    feed = Feed([0, 1], 0, [0], state=StateSpan(EMPTY_STATE, 0, EMPTY_STATE + 1, 2))
    batch = RaggedBatch.of([feed], page_size=2, device=model.device)
    store = _Store(model.device)
    watch, keyword = _Watch(ScanPlan.of(batch, log_rows=1), store), _cache_keyword(model)
    attention = model.config._attn_implementation  # noqa: SLF001 - there is no public way to read it
    model.set_attn_implementation(_WATCHING)  # ours needs an arena, whose shape is not known yet
    try:
        model(input_ids=batch.input_ids[None], use_cache=False, watch=watch, **{keyword: watch})
        watch.check_all_ran()
    except (ModelError, *_FAULTS) as error:
        reason = str(error) if isinstance(error, ModelError) else repr(error)
        raise ModelError(f"{type(model).__name__} cannot run with its states in slots: {reason}") from error
    finally:
        model.set_attn_implementation(attention)
    apart = watch.keep_kv - watch.attends.keys()
    if apart:
        raise ModelError(f"{type(model).__name__}: layer {min(apart)} does not go through the attention interface")
    return Findings(tuple(store.parts), watch.attends, keyword)


def _cache_keyword(model: PreTrainedModel) -> str:
    names = inspect.signature(model.forward).parameters
    found = next((name for name in _CACHE_NAMES if name in names), None)
    if found is None:
        raise ModelError(f"{type(model).__name__} has layers that keep a state, but its forward takes no cache")
    return found


def _note(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, key_dim]
    key: Tensor,  # [1, kv_heads, T, key_dim]
    value: Tensor,  # [1, kv_heads, T, value_dim]
    attention_mask: Tensor | None,  # noqa: ARG001 - as transformers calls it
    *,
    watch: _Watch,
    **_: object,
) -> tuple[Tensor, None]:
    """Called by every layer of the model that attends, with what our attention would be handed."""
    layer = module.layer_idx
    assert isinstance(layer, int)
    latent = latent_of(module)
    watch.attends[layer] = LayerKV(key.shape[1], key.shape[3], value.shape[3], is_latent=latent is not None)
    out = value.new_zeros(query.shape[2], query.shape[1], value.shape[3])  # [T, heads, value_dim]
    return (out if latent is None else latent.expand(out))[None], None


AttentionInterface.register(_WATCHING, _note)
