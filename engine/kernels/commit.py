"""Accept and commit on the device: which drafts stay, where the output ends, and the pointers that follow.

`engine.verify.coupled` and `engine.engine.Engine._commit` in one small kernel, for a loop that the host does not watch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.args import Committed, Tracks


def commit(drawn: Tensor, drafts: Tensor, num_sound: Tensor, slots: Tensor, tracks: Tracks) -> Committed:
    """Keep drafts while they equal what was drawn, up to an end token or the longest length; append, move, end.

    `drawn` int64 `[B, K + 1]`, the target's own tokens; `drafts` int64 `[B, K]`, -1 where there is none;
    `num_sound` int64 `[B]`, leading rows of logits that were numbers; `slots` int64 `[B]`, each at most once.
    """
    num, width = drawn.shape
    found = [torch.empty_like(slots) for _ in range(3)]
    if num:
        _commit_kernel[(num,)](
            drawn, drafts, num_sound, slots, tracks.tokens, tracks.length, tracks.max_length, tracks.ends,
            tracks.running, *found, drawn.stride(0), drafts.stride(0), tracks.tokens.stride(0), width,
            BLOCK=max(32, triton.next_power_of_2(width)), ENDS=tracks.ends.shape[1], num_warps=1,
        )  # fmt: skip
    return Committed(drawn, *found)


@triton.jit(  # compiled once for all K up to 31
    do_not_specialize=["drawn_stride", "drafts_stride", "tokens_stride", "width"],
    do_not_specialize_on_alignment=["drawn_ptr", "drafts_ptr", "num_sound_ptr", "slots_ptr"],
)
def _commit_kernel(
    drawn_ptr, drafts_ptr, num_sound_ptr, slots_ptr, tokens_ptr, length_ptr, max_length_ptr, ends_ptr, running_ptr,
    num_fresh_ptr, num_accepted_ptr, ended_ptr, drawn_stride, drafts_stride, tokens_stride,
    width, BLOCK: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + b)
    i = tl.arange(0, BLOCK)
    drawn = tl.load(drawn_ptr + b * drawn_stride + i, mask=i < width, other=-2)
    draft = tl.load(drafts_ptr + b * drafts_stride + i, mask=i < width - 1, other=-1)
    num_kept = tl.min(tl.where(drawn == draft, BLOCK, i), 0)  # one beyond the drafts is never equal
    length, running = tl.load(length_ptr + slot), tl.load(running_ptr + slot)
    ends = i < 0
    for e in tl.static_range(ENDS):
        ends = ends | (drawn == tl.load(ends_ptr + slot * ENDS + e))
    num_sound = tl.load(num_sound_ptr + b)
    to_end = tl.min(tl.where(ends, i + 1, BLOCK + 1), 0)
    room = tl.load(max_length_ptr + slot) - length
    num_fresh = tl.minimum(tl.minimum(num_kept + 1, to_end), tl.minimum(room, num_sound)) * running
    tl.store(tokens_ptr + slot * tokens_stride + length + i, drawn, mask=i < num_fresh)
    ended = tl.where(num_fresh == num_sound, 3, 0) * tl.where(num_sound < num_kept + 1, 1, 0)
    ended = tl.where(num_fresh == room, 2, ended)
    ended = tl.where(num_fresh == to_end, 1, ended) * running
    tl.store(length_ptr + slot, length + num_fresh)
    tl.store(running_ptr + slot, tl.where(ended > 0, 0, running))
    tl.store(num_fresh_ptr + b, num_fresh)
    tl.store(num_accepted_ptr + b, tl.minimum(num_kept, num_fresh))
    tl.store(ended_ptr + b, ended)
