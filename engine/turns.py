"""Fair sharing of the target among callers, and the selection of sequences for a step of limited time.

Independent of pages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from collections.abc import Sequence as Seq

from pilotfish.engine.control.prefill_budget import PrefillBudget
from pilotfish.engine.params import MAX_PREDICTED_DRAFTS
from pilotfish.engine.types import Sequence

TURN = 32  # tokens that a place in the batch counts as, because it will soon get them
_MANY = 8  # ratio of places above which shares are uneven, and first tokens do not wait for long steps
_RECENT = 8_192  # tokens of all callers after which one without any is considered absent


class Shares:
    """Tokens served to callers, and their places in the batch.

    Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): a caller is charged
    for the tokens of its prompts and outputs when they are fed, and the caller with the lowest counter is served first.
    A returning caller is raised to the level of those that wait: idle time gives no credit.
    """

    def __init__(self) -> None:
        self._had: dict[str, int] = {}
        self._places: dict[str, int] = {}
        self._total = 0
        self._latest: dict[str, int] = {}  # total when a caller was last charged

    def join(self, caller: str, waiting: Collection[str], present: Collection[str]) -> None:
        """Record that a caller without waiting requests has a new one; `waiting` and `present`: the other callers."""
        mine = self._had.get(caller, 0)
        # If no caller is present, all counters are reset.
        others = waiting or present or self._had
        level = (min if waiting else max)((self._had[other] for other in others), default=0)
        # Absent callers that are not ahead of the others would return at their level anyway.
        self._had = {c: had for c, had in self._had.items() if c in present or had > level}
        self._had[caller] = max(mine, level)
        self._latest = {c: then for c, then in self._latest.items() if self._total - then < _RECENT}

    def charge(self, caller: str, tokens: int) -> None:
        """Charge a caller for tokens fed to the target."""
        self._had[caller] += tokens
        self._total += tokens
        self._latest[caller] = self._total

    def place(self, caller: str, change: int) -> None:
        """Change a caller's number of places by one."""
        self._places[caller] = self.places(caller) + change
        if not self._places[caller]:
            del self._places[caller]

    def places(self, caller: str) -> int:
        return self._places.get(caller, 0)

    def rank(self, caller: str, tokens: int = 0) -> int:
        """A caller's counter, including its places and these tokens. The lowest is served first."""
        return self._had[caller] + TURN * self.places(caller) + tokens

    @property
    def holders(self) -> tuple[str, ...]:
        return tuple(self._places)

    @property
    def largest(self) -> str:
        """The caller with places that has the largest share."""
        return max(self._places, key=self.rank)

    @property
    def is_uneven(self) -> bool:
        """Whether a recently active caller has few places and another one many."""
        recent = (caller for caller, then in self._latest.items() if self._total - then < _RECENT)
        most = max(self._places.values(), default=0)
        return any(_MANY * max(1, self.places(caller)) <= most for caller in recent)

    def may_displace(self, caller: str, other: str) -> bool:
        """Whether moving a place from `other` to `caller` brings their shares closer."""
        return self.rank(caller, TURN) <= self.rank(other, -TURN)

    def goes_alone(self, caller: str, other: str, tokens: int) -> bool:
        """Whether a step with this many tokens of `caller` excludes `other`, which has many more places."""
        return self.places(other) >= 2 * self.places(caller) and self.rank(caller, tokens) <= self.rank(other)


def equal_parts(wanted: Seq[int], total: int) -> list[int]:
    """Divide `total` equally; unused parts go to later entries: [3, 9, 90], 20 -> [3, 9, 8]."""
    parts = list[int]()
    for i, most in enumerate(wanted):
        parts.append(min(most, -(-total // (len(wanted) - i))))
        total -= parts[-1]
    return parts


# Per step, for grammar masks. A mask usually takes 10 us, but up to 0.1 s for a hostile structure: its outputs then
# take turns, without drafts.
MASK_SECONDS = 0.05


def in_step(
    running: list[Sequence], shares: Shares, prefill: PrefillBudget, most_tokens: int
) -> tuple[list[Sequence], bool]:
    """The sequences that may take part in a step, and whether its prompt chunks must be short.

    So callers with small shares get their first tokens soon. Prompts of such a caller are processed without the
    sequences of callers with large shares. Before it has a request, steps are kept short, because a new request waits
    for the current step: steps alternate between decoding and prefill. Rounds on the device are short anyway.
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
    """Record whose turn it is; return the identities of the others."""
    for sequence in turn:
        sequence.num_missed = 0
    for sequence in others:
        sequence.num_missed += 1
    return {id(sequence) for sequence in others}


def in_turn(sequences: list[Sequence]) -> list[Sequence]:
    """The sequences whose masks fit into the step; the others have precedence in a later one.

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
    """Maximum drafts of each sequence whose masks fit into the step, in equal shares of the remaining time."""
    costly = [sequence.mask_seconds for sequence in sequences if sequence.mask_seconds]
    spare = max(0.0, MASK_SECONDS - sum(costly))
    for sequence in sequences:
        seconds = sequence.mask_seconds
        yield int(spare / len(costly) / seconds) if seconds else MAX_PREDICTED_DRAFTS
