"""Each kernel in plain torch: the oracle of the tests, and the implementation without Triton.

No function reads a tensor's value on the host or creates one there, so that tests without a GPU can check that the loop
does not, either.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pilotfish.engine.kernels.args import (
    FULL,
    LARGEST,
    LARGEST_CODE,
    RUNNING,
    STOPPED,
    TINIEST,
    TINIEST_PEAK,
    UNSOUND,
    Committed,
    Fp8Rows,
    FusedWeights,
    Tracks,
)
from pilotfish.engine.kernels.paging import Paging


def attend(
    query: Tensor,  # [T, heads, key_dim]
    k: Tensor,  # [rows, kv_heads, scaled + key_dim]
    v: Tensor,  # [rows, kv_heads, scaled + value_dim]
    paging: Paging,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    *,
    chunk: int | None = None,
    sinks: Tensor | None = None,  # [heads]
    scaled: int = 0,
) -> Tensor:  # [T, heads, value_dim]
    """As `attention.attend`, but rows without a sequence become 0. Gathers `max_kv` keys per row: for small sizes."""
    sequence, position = _rows_of(paging, len(query))
    key = torch.arange(min(paging.max_kv, paging.tables.shape[1] * paging.page_size), device=query.device)
    table = paging.tables[paging.spans[sequence, 3].long()].long()  # [T, W]
    where = table[:, key // paging.page_size] * paging.page_size + key % paging.page_size
    visible = (key <= position[:, None]) & (sequence >= 0)[:, None]
    if window is not None:
        visible &= key > position[:, None] - window
    if chunk is not None:
        visible &= key >= (position // chunk * chunk)[:, None]
    q = query.float().unflatten(1, (k.shape[1], -1))  # [T, kv_heads, group, head_dim]
    scores = torch.einsum("tkgd,tjkd->tkgj", q, _numbers(k[where], scaled)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    hidden = ~visible[:, None, None]
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(*scores.shape[1:3], 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., : len(key)].masked_fill(hidden, 0)
    # Masked arena rows may contain anything: 0 times NaN would be NaN.
    values = _numbers(v[where], scaled).masked_fill(~visible[:, :, None, None], 0)
    return torch.einsum("tkgj,tjkd->tkgd", weights, values).flatten(1, 2).to(query.dtype)


def _numbers(heads: Tensor, scaled: int) -> Tensor:
    """Vectors in float32; `scaled`: bytes of the scale at the beginning of each vector of codes."""
    if not scaled:
        return heads.float()
    return heads[..., scaled:] * heads[..., :scaled].contiguous().view(torch.float32)


def _rows_of(paging: Paging, num_rows: int) -> tuple[Tensor, Tensor]:
    """The sequence (-1: none) and the position of each row of the batch, int64 `[T]`."""
    row = torch.arange(num_rows, device=paging.spans.device)
    first, rows, start, _ = paging.spans.long().unbind(1)
    mine = (row[:, None] >= first) & (row[:, None] < first + rows)  # [T, B]
    sequence = torch.where(mine.any(1), mine.long().argmax(1), -1)
    return sequence, start[sequence] + row - first[sequence]


def rotate_and_write(
    projected: Tensor, cos: Tensor, sin: Tensor, kv_rows: Tensor, k: Tensor, v: Tensor,
    norms: tuple[Tensor, Tensor] | None = None, eps: float = 0.0, scaled: int = 0,
) -> Tensor:  # fmt: skip
    """As `rows.rotate_and_write`."""
    heads = projected.unflatten(1, (-1, k.shape[2] - scaled)).float()
    query, key, value = heads.split([heads.shape[1] - 2 * k.shape[1], k.shape[1], k.shape[1]], 1)
    if norms is not None:
        query, key = _normed(query, norms[0], eps), _normed(key, norms[1], eps)
    for arena, new in ((k, _rotated(key, cos, sin)), (v, value)):
        arena.index_copy_(0, kv_rows, round_heads(new.to(projected.dtype)) if scaled else new.to(arena.dtype))
    return _rotated(query, cos, sin).to(projected.dtype)


def round_heads(heads: Tensor) -> Tensor:
    """Vectors `[..., dim]` to int8 `[..., 4 + dim]`: to nearest, the largest number of each to 127 or -127.

    The first four are the bytes of the scale, float32. A vector that holds a NaN or an infinity gets the scale NaN.
    `rotate_row` in `native/rows.c` computes the same bits.
    """
    x = heads.float()
    peak = x.abs().amax(-1, keepdim=True).clamp_min_(TINIEST_PEAK)
    scale = peak * (1 / LARGEST_CODE) + (x - x).sum(-1, keepdim=True)  # 0, but NaN for invalid scales
    codes = (x * (1 / peak * LARGEST_CODE)).round_().nan_to_num_(0, 0, 0).to(torch.int8)
    return torch.cat([scale.view(torch.int8), codes], -1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, heads, head_dim] float32: the halves (a, b) of the turning part become (a cos - b sin, b cos + a sin)."""
    turning, rest = x[..., : cos.shape[1]], x[..., cos.shape[1] :]
    first, second = turning.chunk(2, -1)
    turned = turning * cos[:, None].float() + torch.cat([-second, first], -1) * sin[:, None].float()
    return torch.cat([turned, rest], -1)


def _normed(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * scale


def add_norm(
    x: Tensor, residual: Tensor | None, scale: Tensor, eps: float, before: tuple[Tensor, float] | None = None
) -> tuple[Tensor, Tensor]:
    """As `rows.add_norm`."""
    if before is not None:
        x = _normed(x, *before).to(x.dtype)
    total = x if residual is None else x + residual
    return _normed(total, scale, eps).to(x.dtype), total


def add_norm_round(
    x: Tensor, residual: Tensor | None, scale: Tensor, eps: float, before: tuple[Tensor, float] | None = None
) -> tuple[Fp8Rows, Tensor]:
    """As `rows.add_norm_round`."""
    normed, total = add_norm(x, residual, scale, eps, before)
    return round_rows(normed), total


def gate(both: Tensor, activation: str) -> Tensor:
    """As `rows.gate`."""
    bent, up = both.float().chunk(2, -1)
    bent = F.silu(bent) if activation == "silu" else F.gelu(bent, approximate="tanh")
    return (bent * up).to(both.dtype)


def gate_round(both: Tensor, activation: str) -> Fp8Rows:
    """As `rows.gate_round`."""
    return round_rows(gate(both, activation))


def round_rows(x: Tensor) -> Fp8Rows:
    """As `rows.round_rows`."""
    wide = x.reshape(-1, x.shape[-1]).float()
    scale = wide.abs().amax(1, keepdim=True).clamp(min=TINIEST) / LARGEST
    return Fp8Rows((wide / scale).to(torch.float8_e4m3fn), scale, x.shape, x.dtype)


def w4_levels(words: Tensor) -> Tensor:
    """The levels of a matrix in 4 bits, -8 .. 7: int16 `[in / GROUP, out, WORDS]` -> int8 `[out, in]`."""
    each = torch.stack([(words >> shift) & 15 for shift in (0, 4, 8, 12)], 2) - 8  # [groups, out, 4, WORDS]
    return each.flatten(2).transpose(0, 1).flatten(1).to(torch.int8)


def w4_matmul(x: Tensor, words: Tensor, scale: Tensor, bias: Tensor | None, _arrived: Tensor) -> Tensor:
    """As `w4.w4_matmul`: products with the dequantised matrix, summed in float32."""
    weight: Tensor = w4_levels(words).float().unflatten(1, (len(words), -1)) * scale.t()[..., None].float()
    out = x.float() @ weight.flatten(1).t()
    return (out if bias is None else out + bias.float()).to(x.dtype)


def mix(x: Tensor, chosen: Tensor, weights: Tensor, stacks: FusedWeights) -> Tensor:
    """As `experts.mix`. All experts multiply all rows: for small sizes."""
    ups, downs = ((m if stacks.transposed else m.transpose(1, 2)).float() for m in (stacks.up, stacks.down))
    both = x.float() @ ups  # [E, T, 2 inner]
    both = both if stacks.up_bias is None else both + stacks.up_bias.float()[:, None]
    inner = stacks.gate(both).to(x.dtype).float()
    given = inner @ downs
    given = (given if stacks.down_bias is None else given + stacks.down_bias.float()[:, None]).to(x.dtype)
    is_known = (chosen >= 0) & (chosen < len(downs))
    expert = torch.where(is_known, chosen, 0)  # [T, k]
    mine = given.transpose(0, 1).gather(1, expert[..., None].expand(*expert.shape, given.shape[2]))
    return (mine.float() * torch.where(is_known, weights.float(), 0)[..., None]).sum(1).to(x.dtype)


def commit(drawn: Tensor, drafts: Tensor, num_sound: Tensor, slots: Tensor, tracks: Tracks) -> Committed:
    """As `sampling.commit`. Writes whole rows of `tokens`: for small sizes."""
    width, length, running = drawn.shape[1], tracks.length[slots], tracks.running[slots]
    i = torch.arange(width, device=drawn.device)
    num_kept = (drawn[:, :-1] == drafts).long().cumprod(1).sum(1)
    ends = (drawn[..., None] == tracks.ends[slots, None]).any(-1)
    to_end = torch.where(ends, i + 1, width + 1).amin(1)
    room = tracks.max_length[slots] - length
    num_fresh = (num_kept + 1).minimum(to_end).minimum(room).minimum(num_sound) * running
    ended = torch.where((num_fresh == num_sound) & (num_sound <= num_kept), UNSOUND, RUNNING)
    ended = torch.where(num_fresh == to_end, STOPPED, torch.where(num_fresh == room, FULL, ended)) * running
    offset = torch.arange(tracks.tokens.shape[1], device=drawn.device) - length[:, None]  # [B, L]
    fresh = (offset >= 0) & (offset < num_fresh[:, None])
    new = drawn.gather(1, offset.clamp(0, width - 1))
    tracks.tokens.index_copy_(0, slots, torch.where(fresh, new, tracks.tokens[slots]))
    tracks.length.index_copy_(0, slots, length + num_fresh)
    tracks.running.index_copy_(0, slots, running * (ended == RUNNING))
    return Committed(drawn, num_fresh, num_kept.minimum(num_fresh), ended)
