"""What each kernel may take, by its name. What takes more must give its reason here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Budget:
    """Of one kernel in one model, but for what one launch takes."""

    variants: int  # specialisations: each costs a second or more, at the worst in the middle of a request
    per_kind_of_layer: bool = False  # so many for layers with a window, and so many for those without
    blocks: int = 1  # that must stand on one multiprocessor together
    stack: int = 0  # bytes of a thread that may be in memory; anything but 0 needs a reason
    stack_on_sm_80: int = 0  # the same for the older card, of its largest variant


BUDGETS = {
    # Of few rows, and of prompts; a register or two may be kept in memory at the edges of loops. On sm_80, whose tensor
    # cores read from registers what sm_90's read from shared memory, prompts with heads of 256 numbers spill some more.
    "_attend_kernel": Budget(2, per_kind_of_layer=True, stack=16, stack_on_sm_80=128),
    "_plan_kernel": Budget(2, per_kind_of_layer=True),
    "_merge_kernel": Budget(1),
    "_rotate_kernel": Budget(1),
    "_norm_kernel": Budget(3),  # alone, of a sum, and rounded
    "_gate_kernel": Budget(3),  # both activations are tried, and one is rounded
    "_round_kernel": Budget(1),
    "_w4_kernel": Budget(3),  # tiles of three sizes
    "_tiles_kernel": Budget(2),  # for tiles of two sizes
    "_order_kernel": Budget(1),
    "_experts_kernel": Budget(4, blocks=2, stack_on_sm_80=16),  # both matrices, in tiles of two sizes
    "_sum_kernel": Budget(1),
    "_commit_kernel": Budget(1),
    "_peaks_kernel": Budget(1),
    "_search_kernel": Budget(2),  # of tokens, and of their weights
    "_end_kernel": Budget(1),
    "_noise_kernel": Budget(1, blocks=2),
    "_first_kernel": Budget(1),
}
NOT_ON_SM_80 = frozenset(("_round_kernel",))  # 8-bit floats, which it does not have
