"""Pages of an arena: free, held by a sequence, or kept for later requests that start with the same tokens.

The prefix cache: a full page whose K/V is written is entered under the key (predecessor, its own tokens). Keys are
exact: tokens are compared instead of hashes, so no collision can give one caller the keys and values of another. The
predecessor is the number of the previous page, and numbers are never reused; the predecessor of the first page is the
caller's salt. So equal prompts share pages only with equal salts, and a page whose predecessor was removed can never be
found.

This module uses no tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Seq
from itertools import count
from typing import Any

from pilotfish.engine.kv.states import StatePool
from pilotfish.engine.stats import CacheChange
from pilotfish.engine.types import KVCursor

Key = tuple[int | None, Any, tuple[int, ...]]  # the fields of a `CacheChange` besides its number


class PagePool:
    """The pages of one arena: each is free, held by page tables, or kept only by the prefix cache (I5).

    For a model with recurrent states, `states` is their pool: a cursor has slots there while it has pages, and cached
    pages can be used up to the last one whose state is kept.
    """

    def __init__(
        self, num_pages: int, page_size: int, *, run: int = 1, prefix_cache: bool = False,
        states: StatePool | None = None,
    ) -> None:  # fmt: skip
        self.num_pages, self.page_size, self.prefix_cache, self.states = num_pages, page_size, prefix_cache, states
        self._run = run  # pages of the longest sequence: a new sequence starts where it can grow without a gap
        self._free = set(range(num_pages))
        self._holders = [0] * num_pages
        self._numbers = count()
        self._pages: dict[Key, int] = {}  # the prefix cache
        self._entries: dict[int, CacheChange] = {}  # by page: its key
        self._kept: OrderedDict[int, None] = OrderedDict()  # cached pages that no page table holds, oldest first
        self._changes: list[CacheChange] | None = None  # changes of the prefix cache, not taken yet; None: not watched

    @property
    def num_free(self) -> int:
        """Available pages: free ones, and those kept only by the prefix cache."""
        return len(self._free) + len(self._kept)

    @property
    def has_slots(self) -> bool:
        """Whether another sequence could get state slots, if it needs any."""
        return self.states is None or self.states.has_room

    def has_empty(self, num_sequences: int, num_tokens: int) -> bool:
        """Whether `num_sequences` of `num_tokens` each fit without evicting from the prefix cache."""
        has_slots = self.states is None or self.states.has_empty(num_sequences)
        return has_slots and num_sequences * self.pages_for(num_tokens) <= len(self._free)

    @property
    def most_drafts(self) -> int | None:
        """Maximum number of tokens of a sequence that can be rolled back; None: no limit."""
        return None if self.states is None else self.states.log_rows

    def pages_for(self, num_tokens: int) -> int:
        """The number of pages for `num_tokens` tokens; page_size 16: 0 -> 0, 1 -> 1, 16 -> 1, 17 -> 2."""
        return -(-num_tokens // self.page_size)

    def reserve(self, cursor: KVCursor, num_tokens: int) -> bool:
        """Give `cursor` pages for its first `num_tokens` positions; False, with no change, if too few are free."""
        missing = self.pages_for(num_tokens) - len(cursor.page_table)
        if missing > self.num_free or not (self.states is None or self.states.open(cursor)):
            return False
        for _ in range(missing):
            cursor.page_table.append(self._take(cursor.page_table[-1] if cursor.page_table else None))
        return True

    def release(self, cursor: KVCursor) -> None:
        """Take all pages back and reset the cursor to an empty one."""
        for page in reversed(cursor.page_table):  # the last page is evicted first: the others are usable without it
            self._holders[page] -= 1
            if not self._holders[page]:
                self._put_away(page)
        cursor.page_table.clear()
        cursor.shared.clear()
        cursor.kv_len = 0
        if self.states is not None:
            self.states.close(cursor)

    def _take(self, previous: int | None) -> int:
        """Take a free page, preferably the one after `previous`, so that most K/V of a sequence is contiguous."""
        if not self._free:
            oldest, _ = self._kept.popitem(last=False)
            self._remove(oldest)
            self._free.add(oldest)
        page = self._best_free(previous)
        self._free.remove(page)
        self._holders[page] = 1
        return page

    def _best_free(self, previous: int | None) -> int:
        if previous is not None and previous + 1 in self._free:
            return previous + 1
        start = next((page for page in range(0, self.num_pages, self._run) if page in self._free), None)
        return min(self._free) if start is None else start

    def _put_away(self, page: int) -> None:
        if page in self._entries:
            self._kept[page] = None
        else:
            self._free.add(page)

    # -------------------------------------------------------------------------------------------- the prefix cache

    def find(self, tokens: Seq[int], salt: Hashable) -> list[int]:
        """The cached pages of the beginning of `tokens`, in order; they never include the newest token."""
        found: list[int] = []
        before: int | None = None
        while self.prefix_cache and (len(found) + 1) * self.page_size < len(tokens):
            page = self._pages.get(self._key(before, salt, tokens, len(found)))
            if page is None:
                break
            found.append(page)
            before = self._entries[page].number
        if self.states is None:
            return found
        return found[: self.states.num_covered([self._entries[page].number for page in found])]

    def num_kept(self, pages: Iterable[int]) -> int:
        """The number of these pages that are kept only by the prefix cache and therefore count as free."""
        return sum(page in self._kept for page in pages)

    def adopt(self, cursor: KVCursor, pages: Seq[int]) -> None:
        """Begin an empty page table with cached pages."""
        assert not cursor.page_table, "only an empty page table can adopt cached pages"
        for page in pages:
            self._kept.pop(page, None)
            self._holders[page] += 1
        cursor.page_table += pages
        cursor.shared += [self._entries[page].number for page in pages]
        cursor.kv_len = len(pages) * self.page_size
        if self.states is not None and pages:
            self.states.adopt(cursor, cursor.shared[-1], cursor.kv_len)

    def share(self, cursor: KVCursor, tokens: Seq[int], salt: Hashable) -> None:
        """Enter the cursor's full pages with written K/V into the prefix cache, if they are not there yet."""
        while self.prefix_cache and (len(cursor.shared) + 1) * self.page_size <= cursor.kv_len:
            i = len(cursor.shared)
            key = self._key(cursor.shared[-1] if i else None, salt, tokens, i)
            cursor.shared.append(self._enter(key, cursor.page_table[i]))
        if self.states is not None:
            self.states.keep(cursor, self.page_size)

    def forget(self, cursor: KVCursor) -> None:
        """Remove these pages from the prefix cache, because their content may be invalid."""
        for page in cursor.page_table:
            if page in self._entries:
                self._remove(page)
        cursor.kv_len = 0
        cursor.reset_states()

    def watch(self) -> None:
        """Record the changes of the prefix cache from now on, beginning with the pages that are already in it."""
        self._changes = [*self._entries.values()]  # in the order of their numbers

    def take_changes(self) -> tuple[CacheChange, ...]:
        """The changes since the last call, in order; empty if they are not watched."""
        changes, self._changes = self._changes, None if self._changes is None else []
        return tuple(changes or ())

    def _enter(self, key: Key, page: int) -> int:
        """Enter a page under `key` and return the number of the entry; an existing entry is kept."""
        known = self._pages.get(key)
        if known is None:
            known, entry = page, CacheChange(next(self._numbers), *key)
            self._pages[key], self._entries[page] = page, entry
            if self._changes is not None:
                self._changes.append(entry)
        return self._entries[known].number

    def _remove(self, page: int) -> None:
        entry = self._entries.pop(page)
        del self._pages[entry[1:]]
        if self._changes is not None:
            self._changes.append(CacheChange(entry.number))

    def _key(self, before: int | None, salt: Hashable, tokens: Seq[int], i: int) -> Key:
        """The key of page i of a text; only the first one, which has no predecessor, has the salt."""
        span = tuple(tokens[i * self.page_size : (i + 1) * self.page_size])
        return before, salt if before is None else None, span

    def check_invariants(self, cursors: Iterable[KVCursor]) -> None:
        """Check I5: free, kept and held pages are disjoint and complete; no `kv_len` exceeds its page table.

        The same for state slots, and that a slot covers each `kv_len` (I8).
        """
        cursors = list(cursors)
        if self.states is not None:
            self.states.check_invariants(cursors)
        holders = [0] * self.num_pages
        for cursor in cursors:
            assert cursor.kv_len <= len(cursor.page_table) * self.page_size, "kv_len beyond the page table"
            assert len(set(cursor.page_table)) == len(cursor.page_table), "a page occurs twice in one page table"
            for page in cursor.page_table:
                holders[page] += 1
        assert holders == self._holders, "the holder count of a page is wrong"
        held = [page for page, number in enumerate(holders) if number]
        assert sorted([*self._free, *self._kept, *held]) == list(range(self.num_pages)), "a page was lost or duplicated"
        assert {entry[1:]: page for page, entry in self._entries.items()} == self._pages, "inconsistent prefix cache"
