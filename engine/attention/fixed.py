"""Attention in an order fixed by absolute position: a query's bits do not depend on how its batch was put together.

Keys come in blocks of `BLOCK` positions, counted from position 0 of their sequence, and queries in tiles of `ROWS` of
one sequence. A pair of the two is one small matmul, always of the same shape, and `GROUP` pairs are one call, always of
the same shape too. A query sums the results of its blocks from left to right. Masked keys
add zeros, which change no bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.attention.reference import AttentionSpec, arena_rows, hidden_from
from engine.kv.arena import floats_of, width_of
from engine.kv.batch import RaggedBatch

BLOCK = 64
ROWS = 4  # a verified sequence has K + 1, a decoding one 1: more would mostly be padding
GROUP = 4
_LANES = 8  # head_dim is padded to a multiple: behind it MKL computes a row differently from place to place
_MASKED = torch.finfo(torch.float32).min  # its exp is 0, and unlike -inf it cannot make a NaN


@dataclass(frozen=True, slots=True)
class Pairs:
    """N tiles of queries, and the P pairs of a tile and a block that it sees; P is a multiple of `GROUP`.

    Tile N - 1 belongs to no query: it receives the results of the pairs that fill up the last group.
    """

    rows: Tensor  # [N, ROWS], rows of the batch; a tile with fewer repeats its last
    home: Tensor  # [T], the index of each row of the batch among the N * ROWS
    tile: Tensor  # [P], ascending; within a tile its blocks from left to right
    where: Tensor  # [P, kv_heads * BLOCK], rows of the arena seen as [rows * kv_heads, d]
    hidden: Tensor  # [P, 1, group * ROWS, BLOCK] bool, which keys a query must not see


def attend(query: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, spec: AttentionSpec) -> Tensor:
    """Same contract as `reference.attend`; a query's bits do not depend on the rest of the batch."""
    kv_heads = k.shape[1]
    group = query.shape[1] // kv_heads
    pairs = batch.once(("pairs", spec.reach, kv_heads, group), partial(pair_up, batch, spec, kv_heads, group))
    q = query[pairs.rows].float().unflatten(2, (kv_heads, group))  # [N, ROWS, kv_heads, group, d]
    q = _padded(q.permute(0, 2, 3, 1, 4).flatten(2, 3) * spec.scale)  # [N, kv_heads, group * ROWS, d]
    scores = torch.cat([_scores(q, k, pairs.tile[g], pairs.where[g]) for g in _groups(pairs)])
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    floor = q.new_full(q.shape[:3], _MASKED) if spec.sinks is None else _sinks(spec.sinks, q)
    weights, largest = _exp(scores.masked_fill_(pairs.hidden, _MASKED), pairs.tile, floor)
    value_dim = width_of(v)
    out = q.new_zeros(*q.shape[:3], value_dim + -value_dim % _LANES)
    for g in _groups(pairs):
        # One after the other in the order of the index: from left to right for each tile.
        out.index_add_(0, pairs.tile[g], _values(weights[g], v, pairs.where[g]))
    total = (floor - largest).exp_().index_add_(0, pairs.tile, weights.sum(-1))
    out = (out / total[..., None])[..., :value_dim]
    out = out.unflatten(2, (group, ROWS)).permute(0, 3, 1, 2, 4).reshape(-1, query.shape[1], value_dim)
    result: Tensor = out[pairs.home].to(query.dtype)
    return result


def pair_up(batch: RaggedBatch, spec: AttentionSpec, kv_heads: int, group: int) -> Pairs:
    """Which tile of queries meets which block of keys; the same for all layers with this reach and these heads."""
    device = batch.positions.device
    tiles = [
        (i, range(start, min(start + ROWS, batch.cu_seqlens[i + 1])))
        for i in range(len(batch.kv_lens))
        for start in range(batch.cu_seqlens[i], batch.cu_seqlens[i + 1], ROWS)
    ]
    ends = [batch.kv_lens[i] - batch.cu_seqlens[i + 1] for i, _ in tiles]  # position = row + this
    seen = [_blocks_seen(range(r.start + end, r.stop + end), spec) for (_, r), end in zip(tiles, ends, strict=True)]
    pairs = [(n, block) for n, blocks in enumerate(seen) for block in blocks]
    pairs += [(len(tiles), pairs[-1][1])] * (-len(pairs) % GROUP)
    tiles.append(tiles[-1])
    rows = torch.tensor([[min(r.start + j, r.stop - 1) for j in range(ROWS)] for _, r in tiles], device=device)
    home = [n * ROWS + j for n, (_, r) in enumerate(tiles[:-1]) for j in range(len(r))]
    tile, block = torch.tensor(pairs, device=device).unbind(1)
    key = block[:, None] * BLOCK + torch.arange(BLOCK, device=device)  # [P, BLOCK]
    where = _arena_rows(batch, torch.tensor([i for i, _ in tiles], device=device)[tile], key)
    hidden = hidden_from(batch.positions[rows][tile][:, :, None], key[:, None, :], spec)  # [P, ROWS, BLOCK]
    return Pairs(
        rows=rows,
        home=torch.tensor(home, device=device),
        tile=tile,
        where=(where[:, None] * kv_heads + torch.arange(kv_heads, device=device)[:, None]).flatten(1),
        hidden=hidden.repeat(1, group, 1)[:, None],
    )


def _blocks_seen(positions: range, spec: AttentionSpec) -> range:
    """Blocks that hold a key which one of these positions sees; 130..131 -> 0..2, with a window of 5 -> 1..2."""
    return range(spec.oldest(positions.start) // BLOCK, (positions.stop - 1) // BLOCK + 1)


def _arena_rows(batch: RaggedBatch, sequence: Tensor, key: Tensor) -> Tensor:
    """Arena rows of key positions `[P, BLOCK]` of sequences `[P]`."""
    device = key.device
    tables = [batch.once(("rows", i), partial(arena_rows, batch, i, device)) for i in range(len(batch.kv_lens))]
    lengths = torch.tensor(batch.kv_lens, device=device)
    first = (lengths.cumsum(0) - lengths)[sequence, None]
    # Rows beyond the sequence may hold NaN of another one, which no mask removes: its last row is used instead.
    return torch.cat(tables)[first + key.minimum(lengths[sequence, None] - 1)]


def _groups(pairs: Pairs) -> list[slice]:
    return [slice(start, start + GROUP) for start in range(0, len(pairs.tile), GROUP)]


def _scores(q: Tensor, k: Tensor, tile: Tensor, where: Tensor) -> Tensor:
    """q k^T of one group: `[GROUP, kv_heads, group * ROWS, BLOCK]`."""
    key = _gathered(k, where)
    scores: Tensor = torch.bmm(q[tile].flatten(0, 1), key.transpose(1, 2)).unflatten(0, (GROUP, -1))
    return scores


def _values(weights: Tensor, v: Tensor, where: Tensor) -> Tensor:
    """The weighted values of one group: `[GROUP, kv_heads, group * ROWS, d]`."""
    values: Tensor = torch.bmm(weights.flatten(0, 1), _gathered(v, where)).unflatten(0, (GROUP, -1))
    return values


def _gathered(arena: Tensor, where: Tensor) -> Tensor:
    """Blocks of keys or values, float32 `[GROUP * kv_heads, BLOCK, d]`."""
    found = arena.view(-1, arena.shape[2]).index_select(0, where.flatten()).view(-1, BLOCK, arena.shape[2])
    return _padded(floats_of(found, torch.float32))


def _padded(x: Tensor) -> Tensor:
    missing = -x.shape[-1] % _LANES
    return F.pad(x, (0, missing)) if missing else x.contiguous()


def _sinks(sinks: Tensor, q: Tensor) -> Tensor:
    """[heads] -> a score for every query of all tiles, `[N, kv_heads, group * ROWS]`."""
    return sinks.float().view(q.shape[1], -1).repeat_interleave(ROWS, 1).expand(len(q), -1, -1).contiguous()


def _exp(scores: Tensor, tile: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """exp(scores - the largest of the query), and that; a maximum has no order, so all blocks may have the same."""
    top = scores.amax(-1)  # [P, kv_heads, group * ROWS]
    largest = floor.scatter_reduce(0, tile[:, None, None].expand_as(top), top, "amax")
    return scores.sub_(largest[tile][..., None]).exp_(), largest
