"""Which sequences take part in a step, where it would be too long with all. Knows no pages and no tokens."""

from __future__ import annotations

from collections.abc import Iterator

from engine.control.prefill_budget import PrefillBudget
from engine.params import MAX_PREDICTED_DRAFTS
from engine.shares import Shares
from engine.types import Sequence

# Of a step, for the masks of structures. A mask takes 10 us, but one of a hostile structure up to 0.1 s: its outputs
# then take turns, and have no drafts.
MASK_SECONDS = 0.05


def in_step(
    running: list[Sequence], shares: Shares, prefill: PrefillBudget, most_tokens: int
) -> tuple[list[Sequence], bool]:
    """The sequences that may take part in a step, and whether what it reads is to be short.

    So callers with small shares get their first tokens soon. Prompts of such a caller are read without the sequences of
    callers with large shares. Before it asks, steps are as short as costs little, as the step under way is the other
    half of its wait: a step decodes or reads, in turn, and not all at once. Rounds on the device are short anyway.
    """
    behind, others = [s for s in running if s.is_behind], set[str]()
    if behind:
        reader = min((s.request.caller for s in behind), key=shares.rank)
        fed = min(sum(s.todo for s in behind if s.request.caller == reader), most_tokens)
        others = {caller for caller in shares.holders if shares.goes_alone(reader, caller, fed)}
        running = [s for s in running if s.on_device or s.request.caller not in others]
    if not shares.is_uneven:
        return running, False
    decoding = [s for s in running if s.todo == 1 and not s.on_device and not s.grammar_lag]
    is_short = bool(behind) and not others
    if is_short and (not decoding or any(s.num_missed for s in behind)):
        late = _late(behind, decoding)
    else:
        decoding.sort(key=lambda s: (shares.rank(s.request.caller), -s.num_missed))
        most = prefill.few(len(decoding))
        late = _late(decoding[:most], decoding[most:] + (behind if is_short else []))
    return [s for s in running if id(s) not in late], is_short


def _late(turn: list[Sequence], others: list[Sequence]) -> set[int]:
    """Note whose turn it is. Returns the identities of the others."""
    for sequence in turn:
        sequence.num_missed = 0
    for sequence in others:
        sequence.num_missed += 1
    return {id(sequence) for sequence in others}


def in_turn(sequences: list[Sequence]) -> list[Sequence]:
    """The sequences whose masks fit into the step; the others come first in a later one.

    Example: four outputs whose masks take 20 ms each. Two of them fit into 50 ms, so each has every second step.
    """
    if sum(sequence.mask_seconds for sequence in sequences) <= MASK_SECONDS:
        return sequences
    left, late = MASK_SECONDS, set()
    for sequence in sorted(sequences, key=lambda s: -s.num_missed):
        if left < MASK_SECONDS and sequence.mask_seconds > max(0.0, left):
            sequence.num_missed += 1
            late.add(id(sequence))
        else:
            sequence.num_missed = 0
            left -= sequence.mask_seconds
    return [sequence for sequence in sequences if id(sequence) not in late]


def most_masked(sequences: list[Sequence]) -> Iterator[int]:
    """Drafts of each sequence whose masks fit into the step, in equal shares of the time that is left for them."""
    costly = [sequence.mask_seconds for sequence in sequences if sequence.mask_seconds]
    spare = max(0.0, MASK_SECONDS - sum(costly))
    for sequence in sequences:
        seconds = sequence.mask_seconds
        yield int(spare / len(costly) / seconds) if seconds else MAX_PREDICTED_DRAFTS
