"""The attention of a layer (`AttentionSpec`) and its formula in plain torch: the oracle of the implementations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pilotfish.engine.kv.arena import floats_of, width_of
from pilotfish.engine.kv.batch import RaggedBatch


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSpec:
    """softmax(softcap(q k^T * scale) + causal mask, with a sink in its denominator) v."""

    scale: float
    window: int | None = None  # a token sees the `window` newest positions, its own included
    chunk: int | None = None  # positions are divided into chunks of this length; a token sees only its own chunk
    softcap: float | None = None  # scores become tanh(score / softcap) * softcap
    sinks: Tensor | None = None  # [heads], an additional score per query head, without a value

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """Window and chunk: layers with the same reach see the same keys and share masks and plans."""
        return self.window, self.chunk

    def oldest(self, position: int) -> int:
        """The first key that the token at `position` sees."""
        in_window = 0 if self.window is None else position - self.window + 1
        in_chunk = 0 if self.chunk is None else position // self.chunk * self.chunk
        return max(0, in_window, in_chunk)


def attend(
    query: Tensor,  # [T, heads, key_dim]
    k: Tensor,  # [rows, kv_heads, key_dim], the arena of one layer
    v: Tensor,  # [rows, kv_heads, value_dim]; may be a view of `k`. Both may be int8 with scales
    batch: RaggedBatch,
    spec: AttentionSpec,
) -> Tensor:  # [T, heads, value_dim]
    """Attention of each sequence over its own pages, in float32."""
    out = query.new_empty(*query.shape[:2], width_of(v))
    for i, kv_len in enumerate(batch.kv_lens):
        rows = slice(batch.cu_seqlens[i], batch.cu_seqlens[i + 1])
        where = batch.once(("rows", i), partial(arena_rows, batch, i, k.device))
        positions = batch.positions[rows]
        key, value = (floats_of(x[where], torch.float32) for x in (k, v))  # [kv_len, kv_heads, dim]
        out[rows] = attended(query[rows], key, value, causal_mask(positions, range(kv_len), spec), spec)
    return out


def attended(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, spec: AttentionSpec) -> Tensor:
    """[t, heads, key_dim] over [s, kv_heads, dim] in float32; `seen` `[t, s]`: None where every token sees all keys."""
    q = query.float().unflatten(1, (key.shape[1], -1))  # [t, kv_heads, group, key_dim]
    scores = torch.einsum("tkgd,jkd->kgtj", q, key.float()) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    found: Tensor = torch.einsum("kgtj,jkd->tkgd", _softmax(scores, spec.sinks), value.float()).flatten(1, 2)
    return found.to(query.dtype)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Weights of scores `[kv_heads, group, t, j]`; a sink takes part of the weight and has no value."""
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.float().view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]


def arena_rows(batch: RaggedBatch, i: int, device: torch.device) -> Tensor:
    """Arena rows of sequence i's positions 0 .. kv_len - 1, int64 `[kv_len]`."""
    pages = torch.tensor(batch.page_tables[i], dtype=torch.int64, device=device)
    position = torch.arange(batch.kv_lens[i], device=device)
    return pages[position // batch.page_size] * batch.page_size + position % batch.page_size


def causal_mask(positions: Tensor, keys: range, spec: AttentionSpec) -> Tensor:
    """True where the token at `positions[t]` may see key position `keys[j]`: bool `[t, len(keys)]`."""
    key, position = torch.arange(keys.start, keys.stop, device=positions.device), positions[:, None]
    seen = key <= position
    if spec.window is not None:
        seen = seen & (key > position - spec.window)
    if spec.chunk is not None:
        seen = seen & (key >= position // spec.chunk * spec.chunk)
    return seen
