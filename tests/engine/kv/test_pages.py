"""The prefix cache: what it finds is what was asked for, and nobody's pages are another's."""

from __future__ import annotations

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pilotfish.engine.kv.pages import PagePool
from pilotfish.engine.stats import CacheChange
from pilotfish.engine.types import KVCursor

PAGE = 2
TEXT = st.lists(st.integers(0, 1), min_size=1, max_size=9)
SALT = st.sampled_from([None, "a", "b"])


class Arena(RuleBasedStateMachine):
    """Sequences come, feed, share, go and come again; each arena row remembers which token of whose salt is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(9, PAGE, run=4, prefix_cache=True)
        self.rows: dict[int, tuple[str | None, tuple[int, ...]]] = {}  # row -> salt, tokens up to and with its own
        self.live: list[tuple[KVCursor, list[int], str | None]] = []
        self.pool.watch()
        self.told: dict[int, CacheChange] = {}  # what the changes say is cached

    @precondition(lambda self: len(self.live) < 3)
    @rule(tokens=TEXT, salt=SALT, data=st.data())
    def come(self, tokens: list[int], salt: str | None, data: st.DataObject) -> None:
        if self.live and data.draw(st.booleans()):  # it goes on from the text of another, whose pages it finds
            _, text, salt = data.draw(st.sampled_from(self.live))
            tokens = [*text, *tokens][:14]
        cursor = KVCursor()
        self.pool.adopt(cursor, self.pool.find(tokens, salt))
        assert cursor.kv_len < len(tokens), "the newest token must be left to feed"
        for position in range(cursor.kv_len):
            assert self.rows[self._row(cursor, position)] == (salt, tuple(tokens[: position + 1]))
        self.live.append((cursor, tokens, salt))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def feed(self, data: st.DataObject) -> None:
        cursor, tokens, salt = data.draw(st.sampled_from(self.live))
        if not self.pool.reserve(cursor, len(tokens)):
            return
        for position in range(cursor.kv_len, len(tokens)):
            self.rows[self._row(cursor, position)] = (salt, tuple(tokens[: position + 1]))
        cursor.advance(len(tokens))
        tokens.append(data.draw(st.integers(0, 1)))
        if data.draw(st.booleans()):
            self.pool.share(cursor, tokens, salt)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), trust=st.booleans())
    def go(self, data: st.DataObject, trust: bool) -> None:
        cursor, tokens, salt = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        pages = set(cursor.page_table)
        if trust:
            self.pool.share(cursor, tokens, salt)
        else:
            self.pool.forget(cursor)
            assert not pages & set(self.pool.find([*tokens, 0], salt)), "a page that was forgotten is found"
        self.pool.release(cursor)

    def _row(self, cursor: KVCursor, position: int) -> int:
        return cursor.page_table[position // PAGE] * PAGE + position % PAGE

    @invariant()
    def books_are_right(self) -> None:
        self.pool.check_invariants(cursor for cursor, _, _ in self.live)

    @invariant()
    def changes_tell_what_is_cached(self) -> None:
        for change in self.pool.take_changes():
            self.heard(change)
        self.pool.watch()
        assert list(self.pool.take_changes()) == list(self.told.values()), "who begins to watch now hears of the same"

    def heard(self, change: CacheChange) -> None:
        if change.tokens:
            assert change.number not in self.told
            self.told[change.number] = change
        else:
            del self.told[change.number]


TestArena = Arena.TestCase
# A failure is made small, and not explained besides, which takes a minute.
TestArena.settings = settings(
    max_examples=40, stateful_step_count=30, phases=[Phase.reuse, Phase.generate, Phase.shrink]
)


def _pool(num_pages: int = 8, **options: object) -> PagePool:
    return PagePool(num_pages, PAGE, **{"prefix_cache": True, **options})


def _fed(pool: PagePool, tokens: list[int], salt: str | None = None) -> KVCursor:
    """A sequence that was fed all but its newest token, and went."""
    cursor = KVCursor()
    pool.adopt(cursor, pool.find(tokens, salt))
    assert pool.reserve(cursor, len(tokens))
    cursor.advance(len(tokens) - 1)
    pool.share(cursor, tokens, salt)
    return cursor


def test_a_page_is_found_once_its_last_position_is_written() -> None:
    pool, tokens = _pool(), list(range(PAGE))
    _fed(pool, tokens)
    assert not pool.find([*tokens, 0], None)
    _fed(pool, [*tokens, 0])
    assert len(pool.find([*tokens, 0], None)) == 1


def test_found_up_to_the_last_whole_page_and_never_the_newest_token() -> None:
    pool = _pool()
    cursor = _fed(pool, [1, 2, 3, 4, 5])
    pool.release(cursor)
    assert len(pool.find([1, 2, 3, 4, 5], None)) == 2
    assert len(pool.find([1, 2, 3, 4], None)) == 1, "the newest token has to be fed, so its page is not found"
    assert len(pool.find([1, 2, 9, 4, 5], None)) == 1
    assert pool.find([9, 2, 3, 4, 5], None) == []


def test_holders_at_the_same_time_share_one_page_and_the_last_one_frees_it() -> None:
    pool = _pool()
    first = _fed(pool, [1, 2, 3])
    second = _fed(pool, [1, 2, 7])
    assert first.page_table[0] == second.page_table[0]
    pool.release(first)
    assert len(pool.find([1, 2, 3], None)) == 1
    pool.check_invariants([second])
    pool.release(second)
    assert pool.num_free == pool.num_pages


def test_kept_pages_give_way_oldest_and_deepest_first() -> None:
    pool = _pool(num_pages=4)
    pool.release(_fed(pool, [1, 2, 3, 4, 5]))  # two pages kept
    pool.release(_fed(pool, [6, 7, 8]))  # one more
    cursor = KVCursor()
    assert pool.reserve(cursor, 4)
    assert len(pool.find([1, 2, 3, 4, 5], None)) == 1, "the deeper page of the oldest goes first"
    assert len(pool.find([6, 7, 8], None)) == 1


def test_changes_name_the_predecessor_or_the_salt() -> None:
    pool = _pool(num_pages=4)
    pool.release(_fed(pool, [1, 2, 3, 4, 5], "a"))
    assert not pool.take_changes(), "nobody watches"
    pool.watch()
    first, second = pool.take_changes()
    assert first == CacheChange(first.number, None, "a", (1, 2))
    assert second == CacheChange(second.number, first.number, None, (3, 4))
    pool.release(_fed(pool, [6, 7, 8]))
    assert [change[1:] for change in pool.take_changes()] == [(None, None, (6, 7))], "there was a free page"
    assert pool.reserve(KVCursor(), 4)
    assert pool.take_changes() == (CacheChange(second.number),)
    assert not pool.take_changes()


def test_without_prefix_cache_nothing_is_kept() -> None:
    pool = _pool(prefix_cache=False)
    pool.release(_fed(pool, [1, 2, 3, 4, 5]))
    assert pool.find([1, 2, 3, 4, 5], None) == []
    assert not pool._entries


def test_pages_of_one_sequence_lie_in_a_row_while_there_is_room() -> None:
    pool, cursors = _pool(num_pages=12, run=4), [KVCursor() for _ in range(3)]
    for length in (2, 4, 6, 8):
        for cursor in cursors:
            pool.reserve(cursor, length)
    assert [cursor.page_table for cursor in cursors] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
