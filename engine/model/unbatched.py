"""Runs a model's own code one sequence at a time, for models whose code cannot run a ragged batch.

Attention is then transformers', with the model's own masks and positions. A sequence's history is still in our arena,
so rollback is an integer, and the prefix cache, chunks and preemption work as for other models. There are two variants,
with different arena layouts:

- *Keys and values.* The model uses a cache that reads and writes rows of the arena.
- *Tokens.* A model without such a cache (it has its own state object, or transformers feeds it its whole text for each
token) is fed its whole text in each pass. Its arena has one number per position: the token.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, cache_utils
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from pilotfish.engine.errors import ModelError
from pilotfish.engine.kv.arena import KVArena, KVLayout, LayerKV
from pilotfish.engine.kv.batch import Feed

_NOTHING: Any = getattr(cache_utils, "DummyLayer", None)  # of a layer without cache; missing in older transformers
# The layout of an arena of tokens, in float32, which represents all ids below 2**24 exactly.
TOKENS = KVLayout((LayerKV(heads=1, key_dim=1, value_dim=1, is_latent=True),), torch.float32)
_CACHE_NAMES = ("cache", "past_key_values")  # the second is its name before transformers 5.2x
_NO_CACHE = "its transformers class has no key/value cache"
_PROBE = 2  # tokens of the pass that records the shapes of keys and values


def use_own_attention(model: PreTrainedModel) -> None:
    """Use transformers' attention: its fused kernel if the model's class supports it, else the plain one."""
    for name in ("sdpa", "eager"):
        try:
            model.set_attn_implementation(name)
        except ValueError:  # not supported by the class
            continue
        if model.config._attn_implementation == name:  # noqa: SLF001 - there is no public way to read it
            return
    # A class with its own attention code: only its mask code reads the name.
    model.config._attn_implementation = "eager"  # noqa: SLF001  # its setter refuses such classes


@torch.inference_mode()
def cache_layout(model: PreTrainedModel) -> KVLayout:
    """The layout of the cache of `model`, recorded in a pass over two tokens.

    Raises:
        ModelError: layers store anything but keys and values by position (states, compressed or indexed keys).
    """
    name = _cache_name(model)
    if name is None:
        raise ModelError(_NO_CACHE)
    cache: Any = DynamicCache(config=model.config.get_text_config(decoder=True))
    ids = torch.zeros((1, _PROBE), dtype=torch.int64, device=model.device)
    model(input_ids=ids, use_cache=True, **{name: cache})
    shapes = tuple(_shape_of(layer) for layer in cache.layers)
    keys = next((layer.keys for layer in cache.layers if layer.keys is not None), None)
    if keys is None:
        raise ModelError(_NO_CACHE)
    return KVLayout(shapes, keys.dtype)


def _shape_of(layer: Any) -> LayerKV | None:
    """The K/V of a layer of transformers' cache; None if it stores nothing. Raises ModelError for other contents."""
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer, _NOTHING):
        raise ModelError(_NO_CACHE)
    if layer.keys is None:
        return None
    if layer.keys.shape[0] != 1 or layer.keys.ndim != 4 or layer.keys.shape[2] != _PROBE:
        raise ModelError(_NO_CACHE)
    return LayerKV(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3])


def _cache_name(model: PreTrainedModel) -> str | None:
    """The keyword of the model's cache argument; None if it has none."""
    known = inspect.signature(model.forward).parameters
    return next((name for name in _CACHE_NAMES if name in known), None)


class ArenaLayer(CacheLayerMixin):
    """The keys and values of one layer and one sequence, as a layer of transformers' cache."""

    def __init__(self, k: Tensor, v: Tensor, rows: Tensor, start: int) -> None:
        """Rows `[kv_len]` of `k` and `v` belong to the sequence; those before position `start` are already written."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._k, self._v, self._rows, self._length = k, v, rows, start

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the arena exists."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write new keys and values `[1, heads, T, dim]`; return all so far, `[1, heads, length, dim]`."""
        rows = self._rows[self._length : self._length + key_states.shape[2]]
        self._k.index_copy_(0, rows, key_states[0].transpose(0, 1))
        self._v.index_copy_(0, rows, value_states[0].transpose(0, 1))
        self._length += key_states.shape[2]
        self.keys, self.values = self._read(self._k), self._read(self._v)
        return self.keys, self.values

    def _read(self, stored: Tensor) -> Tensor:
        return stored[self._rows[: self._length]].transpose(0, 1)[None].contiguous()

    def get_seq_length(self) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of visible positions of a pass over `query_length` tokens, and the first; windows are in the mask."""
        return self._length + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1


class UnbatchedRunner:
    """One transformers model with its arena, run one sequence at a time; implements `runner.Runner`."""

    def __init__(self, model: PreTrainedModel, arena: KVArena) -> None:
        self.model, self.arena, self.device = model.eval(), arena, model.device
        self.vocab_size = plain_logits(model, [0]).shape[1]
        self._keeps_tokens = arena.layout == TOKENS
        self._cache_name = _cache_name(model)
        self._takes = inspect.signature(model.forward).parameters.keys()

    @torch.inference_mode()
    def forward(self, feeds: Seq[Feed]) -> Tensor:
        """Run all `feeds`, each in a separate pass; float32 logits `[R, vocab]`, R = sum of `num_logits`."""
        return torch.cat([self._one(feed) for feed in feeds])

    def _one(self, feed: Feed) -> Tensor:
        page, rest = self.arena.page_size, range(feed.kv_len)
        rows = torch.tensor([feed.page_table[p // page] * page + p % page for p in rest], device=self.device)
        ids = torch.tensor(feed.tokens, device=self.device)
        if not self._keeps_tokens:
            layers: list[Any] = [self._layer(i, rows, feed.start) for i in range(len(self.arena.k))]
            return self._logits(ids, feed.start, feed.num_logits, {str(self._cache_name): Cache(layers=layers)})
        tokens = self.arena.k[0][:, 0, 0]
        tokens[rows[feed.start :]] = ids.float()
        if not feed.num_logits:
            return torch.empty((0, self.vocab_size), device=self.device)
        return self._logits(tokens[rows].long(), 0, feed.num_logits, {})

    def _layer(self, layer: int, rows: Tensor, start: int) -> Any:
        if self.arena.layout.layers[layer] is None:
            return _NOTHING()
        return ArenaLayer(self.arena.k[layer], self.arena.v[layer], rows, start)

    def _logits(self, ids: Tensor, start: int, count: int, cache: dict[str, Cache]) -> Tensor:
        """Logits of the last `count` of the tokens `ids`, which begin at position `start`: `[count, vocab]`."""
        positions = torch.arange(start, start + len(ids), device=self.device)[None]
        wanted = {"logits_to_keep": max(1, count), "use_cache": bool(cache), "position_ids": positions}
        known: dict[str, Any] = {name: value for name, value in wanted.items() if name in self._takes}
        logits: Tensor = self.model(input_ids=ids[None], **known, **cache).logits[0]
        return logits[len(logits) - count :].float()


@torch.inference_mode()
def plain_logits(model: PreTrainedModel, tokens: Seq[int]) -> Tensor:
    """Logits of one text from the model's own code without a cache: `[len(tokens), vocab]`.

    Positions begin at 0, as in `generate`: RoBERTa-like models would otherwise begin after their pad token.
    """
    takes = inspect.signature(model.forward).parameters
    wanted = {"use_cache": False, "position_ids": torch.arange(len(tokens), device=model.device)[None]}
    known: dict[str, Any] = {name: value for name, value in wanted.items() if name in takes}
    output: Any = model(input_ids=torch.tensor([list(tokens)], device=model.device), **known)
    logits: Tensor = output.logits[0]
    if logits.ndim != 2:
        raise ModelError(
            f"{type(model).__name__} returned logits of shape {list(output.logits.shape)}; expected one row per token"
        )
    return logits.float()
