"""Recurrent states, which a length cannot roll back: the slot and position of each sequence's state.

A recurrent layer (Mamba, gated delta rules) or a short convolution keeps no K/V by position but one state per sequence,
which every token changes. Rollback is still an integer. A slot holds the state at a position `base` and a *log* of the
changes by later tokens. Only accepted tokens move `base`; drafts are only logged. The next pass reads the newest slot
whose `base` is not beyond its first position, applies the accepted part of the log, and continues. It writes to a
different slot than it reads, so a pass can be repeated.

Example: a slot with base 10; a pass feeds the newest token (position 10) and three drafts. It writes the state after
position 10 to the other slot, base 11, with a log of positions 11, 12, 13. One draft is accepted: the next pass starts
at position 12, reads base 11 and the log of position 11, and continues from there.

This module uses no tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from pilotfish.engine.types import EMPTY_STATE, KVCursor, StateSlot


def slots_per_sequence(*, snapshots: bool) -> int:
    """Slots per sequence: one is read, one written; with `snapshots` another one, for page boundaries."""
    return 3 if snapshots else 2


class StatePool:
    """The slots of one state arena: each is free, held by sequences, or kept with a page of the prefix cache.

    With `snapshots` the prefix cache keeps the states at page boundaries.
    """

    def __init__(self, num_slots: int, log_rows: int, *, snapshots: bool) -> None:
        self.num_slots, self.log_rows = num_slots, log_rows
        self.per_sequence = slots_per_sequence(snapshots=snapshots)
        self._snapshots = snapshots
        self._free = set(range(num_slots)) - {EMPTY_STATE}
        self._holders = [0] * num_slots  # cursors that hold or read it
        self._kept: OrderedDict[int, int] = OrderedDict()  # by page number in the prefix cache, oldest first

    @property
    def num_free(self) -> int:
        """Available slots: free ones, and those kept only by the prefix cache."""
        return len(self._free) + sum(not self._holders[slot] for slot in self._kept.values())

    @property
    def has_room(self) -> bool:
        """Whether one more sequence could start."""
        return self.num_free >= self.per_sequence

    def has_empty(self, num_sequences: int) -> bool:
        """Whether `num_sequences` fit without evicting from the prefix cache."""
        return num_sequences * self.per_sequence <= len(self._free)

    def open(self, cursor: KVCursor) -> bool:
        """Give `cursor` its slots; False, with no change, if too few are free."""
        missing = self.per_sequence - sum(state.is_own for state in cursor.states)
        if missing > self.num_free:
            return False
        cursor.states += [StateSlot(self._take()) for _ in range(missing)]
        return True

    def close(self, cursor: KVCursor) -> None:
        for state in cursor.states:
            self._let_go(state.slot)
        cursor.states.clear()
        cursor.pending = None

    def num_covered(self, numbers: Seq[int]) -> int:
        """The number of usable pages of the cached pages `numbers`: up to the last one whose state is kept."""
        return max((i + 1 for i, number in enumerate(numbers) if number in self._kept), default=0)

    def adopt(self, cursor: KVCursor, number: int, base: int) -> None:
        """Begin with the state of the cached page `number`, which ends at position `base`."""
        slot = self._kept[number]
        self._kept.move_to_end(number)
        self._holders[slot] += 1
        cursor.states.append(StateSlot(slot, base, base, is_own=False))

    def keep(self, cursor: KVCursor, page_size: int) -> None:
        """Keep the states of `cursor` at the ends of its cached pages, and give it other slots for them, if available.

        Without a free slot the state is not kept, and later requests compute it again.
        """
        for i, state in enumerate(cursor.states):
            page, rest = divmod(state.base, page_size)
            if not state.is_own or rest or not 0 < page <= len(cursor.shared):
                continue
            number = cursor.shared[page - 1]
            if number in self._kept or not self._snapshots or not self.num_free:
                continue
            cursor.states[i] = StateSlot(state.slot, state.base, state.end, is_own=False)
            self._kept[number] = state.slot
            cursor.states.append(StateSlot(self._take()))
        self._drop_unread(cursor)

    def _drop_unread(self, cursor: KVCursor) -> None:
        """Release kept slots that the cursor no longer reads."""
        newest = max((s.base for s in cursor.states if s.base <= cursor.kv_len <= s.end), default=None)
        for state in [s for s in cursor.states if not s.is_own and s.base != newest]:
            cursor.states.remove(state)
            self._let_go(state.slot)

    def _take(self) -> int:
        if not self._free:
            oldest = next(number for number, slot in self._kept.items() if not self._holders[slot])
            self._free.add(self._kept.pop(oldest))
        slot = self._free.pop()
        self._holders[slot] = 1
        return slot

    def _let_go(self, slot: int) -> None:
        self._holders[slot] -= 1
        if not self._holders[slot] and slot not in self._kept.values():
            self._free.add(slot)

    def check_invariants(self, cursors: Iterable[KVCursor]) -> None:
        """Check I5 for states: free, kept and held slots are complete, and no two sequences write to one slot."""
        holders, writers = [0] * self.num_slots, [0] * self.num_slots
        for cursor in cursors:
            assert not cursor.states or sum(s.is_own for s in cursor.states) == self.per_sequence, "slots are missing"
            can_go_on = any(state.base <= cursor.kv_len <= state.end for state in cursor.states)
            assert not cursor.states or not cursor.kv_len or can_go_on, "no slot covers kv_len"
            for state in cursor.states:
                holders[state.slot] += 1
                writers[state.slot] += state.is_own
        assert holders == self._holders, "the holder count of a slot is wrong"
        assert max(writers) <= 1, "two sequences write to one slot"
        kept = set(self._kept.values())
        assert len(kept) == len(self._kept), "a slot is kept with two pages"
        assert not any(writers[slot] for slot in kept), "a kept slot can be written"
        held = {slot for slot, number in enumerate(holders) if number}
        assert not held & self._free, "a free slot is held"
        assert not kept & self._free, "a free slot is kept"
        assert self._free | held | kept == set(range(self.num_slots)) - {EMPTY_STATE}, "a slot was lost"
