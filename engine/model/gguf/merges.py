"""The merges that a vocabulary with scores implies. Knows texts, ids and scores, and no file.

To look each beginning and each end of each text up in a dictionary takes seconds for 262,144 tokens. Here all texts go
on by one character at a time, and those that began alike share a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

_Array = np.ndarray[Any, Any]
_CHAR_BITS, _ID_BITS = 21, 31  # of a character's number, and of a token's


def merges_of(ids: Mapping[str, int], scores: _Array) -> tuple[_Array, _Array]:
    """Of each token any two that make it, the tokens of the best scores first: ids of the first and the second parts.

    Tokens a 0, b 0, ab -1, aba -2 -> (a, b), (ab, a).
    """
    texts, tokens = list(ids), np.fromiter(ids.values(), np.int32)
    chars = np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32)
    sizes = np.fromiter(map(len, texts), np.int64)
    stops = np.cumsum(sizes)
    first = _names(chars, tokens, sizes, stops - sizes, 1)[:-1]  # of what is before each cut
    second = _names(chars, tokens, sizes, stops - 1, -1)[1:]
    whole = np.repeat(tokens, sizes)
    cuts = np.flatnonzero((first >= 0) & (second >= 0) & (whole[1:] == whole[:-1]))
    first, second, best = first[cuts], second[cuts], -scores[whole[cuts]].astype(float)
    order = np.argsort(first.astype(np.int64) << _ID_BITS | second)
    order = order[np.argsort(best[order], kind="stable")]
    return first[order], second[order]


def _names(chars: _Array, tokens: _Array, sizes: _Array, starts: _Array, step: int) -> _Array:
    """For each character of all texts, the token that is its text from the start to there; -1 where none is.

    Texts a, ab, b of tokens 5, 6, 7: of the characters a, ab, b -> 5, 5 6, 7. With a step of -1 texts are read
    backwards from their last characters, `starts` -> 5, 6 7, 7.
    """
    names, live = np.full(len(chars), -1, np.int32), np.flatnonzero(sizes)
    nodes = np.zeros(len(live), np.int64)  # the number of what each text is so far
    for done in range(int(sizes.max())):
        at = starts[live] + step * done
        found, nodes = np.unique(nodes << _CHAR_BITS | chars[at], return_inverse=True)
        ends = sizes[live] == done + 1
        named = np.full(len(found), -1, np.int32)
        named[nodes[ends]] = tokens[live[ends]]
        names[at] = named[nodes]
        live, nodes = live[~ends], nodes[~ends]
    return names
