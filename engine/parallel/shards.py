"""A target in shards: each process of a group holds one, and all run every pass. Knows feeds; knows no request.

A pass is the same call in each process, with the same batch: rank 0 builds the batch and first broadcasts it to the
others. All ranks compute whole logits; only rank 0 uses them. How matrices are cut is in `model/decoder/share.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from torch import Tensor

from engine.errors import RankLost
from engine.kv.batch import Feed
from engine.model.runner import Runner

if TYPE_CHECKING:
    from engine.parallel.group import Ranks

log = logging.getLogger(__name__)


class ShardedRunner:
    """The Runner of rank 0: it broadcasts each pass, so that the other ranks run it with their shards."""

    def __init__(self, inner: Runner, ranks: Ranks) -> None:
        self._inner, self._ranks = inner, ranks
        self.vocab_size = inner.vocab_size
        self._is_whole = True

    def forward(self, feeds: Seq[Feed]) -> Tensor:
        """Do what `Runner.forward` does.

        Raises:
            RankLost: this pass or an earlier one failed, for any reason. Some rank may still be in a collective of the
                failed pass, and would mix it up with the collectives of the next pass.
        """
        if not self._is_whole:
            raise RankLost("an earlier pass over all ranks failed: they are not in step any more")
        message = encoded(feeds)
        self._is_whole = False
        try:
            self._ranks.broadcast(message)
            logits = self._inner.forward(feeds)
        except Exception as error:
            raise RankLost(f"a pass over all ranks failed: {error}") from error
        self._is_whole = True
        return logits


def worker_loop(ranks: Ranks, runner: Runner) -> None:
    """Run every pass of rank 0, until it broadcasts an empty message or ends. An error in a pass ends this process."""
    try:
        while message := ranks.receive():
            runner.forward(decoded(message))
    except RankLost as error:
        log.info("rank 0 has ended: %s", error)


def encoded(feeds: Seq[Feed]) -> list[int]:
    """Encode feeds as integers: for each feed five lengths and numbers, then its tokens, then its pages.

    Feed([7, 8], start=3, page_table=[5]) with one row of logits and table 0 -> [2, 3, 1, 1, 0, 7, 8, 5].
    """
    message: list[int] = []
    for feed in feeds:
        message += (len(feed.tokens), feed.start, len(feed.page_table), feed.num_logits, feed.table)
        message += feed.tokens
        message += feed.page_table
    return message


def decoded(message: Seq[int]) -> list[Feed]:
    """Decode the feeds that `encoded` has encoded."""
    return list(_read(message))


def _read(message: Seq[int]) -> Iterator[Feed]:
    at = 0
    while at < len(message):
        num_tokens, start, num_pages, num_logits, table = message[at : at + 5]
        pages = at + 5 + num_tokens
        yield Feed(message[at + 5 : pages], start, message[pages : pages + num_pages], num_logits, table)
        at = pages + num_pages
