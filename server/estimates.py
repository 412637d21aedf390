"""How long things have taken of late, and so how long the next will take. Knows numbers only.

What is not known takes no time: nobody is refused on a guess. Where a deadline is concerned, hope decides: a refusal
means that even with luck it would have been late. Where the queue's length is concerned, the most likely does.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.stats import StepStats
from engine.types import Request
from server.queue import Outlook
from server.streams.output import Timeline

_NEW = 0.1  # weight of the newest value in a mean of the last ten or so
_KEEP = 0.995  # per step: the best rate fades, so that a machine that became slower is believed in the end
_MIN_PROMPT_TOKENS = 32  # a step that feeds fewer tells nothing of the speed of reading
RETRY_SECONDS = (1.0, 0.1, 30.0)  # hint for a refused caller: where nothing is known; least; most


class Estimates:
    """Fed by steps and by requests that end."""

    def __init__(self) -> None:
        self._service: float | None = None  # seconds that a request spends in the engine
        self._per_token: float | None = None  # seconds between two tokens of one output
        self._prompt_rate = 0.0  # best tokens of prompts per second
        self._paces: dict[int, float] = {}  # seconds between two tokens of one output, by how many decode, doubling
        self._tokens = self._most_tokens = 0.0  # means of what outputs had, and of what they might have had
        self._rounds = self._drafted = self._accepted = 0.0  # fading sums

    def observe(self, stats: StepStats) -> None:
        """A step."""
        self._rounds = self._rounds * _KEEP + stats.rounds
        self._drafted = self._drafted * _KEEP + stats.drafted
        self._accepted = self._accepted * _KEEP + stats.accepted
        seconds = sum(stats.phase_seconds.values())
        decoding = sum(forward.sequences for forward in stats.forwards if forward.kind == "verify")
        if stats.generated_tokens and decoding:  # a sequence in its prompt gets no tokens and slows no other
            size = decoding.bit_length()
            self._paces[size] = _mean(self._paces.get(size), seconds * decoding / stats.generated_tokens)
        if stats.prompt_tokens >= _MIN_PROMPT_TOKENS and seconds > 0:
            self._prompt_rate = max(self._prompt_rate * _KEEP, stats.prompt_tokens / seconds)
        elif not stats.prompt_tokens and stats.generated_tokens and stats.running:
            self._per_token = _mean(self._per_token, seconds * stats.running / stats.generated_tokens)

    @property
    def acceptance_rate(self) -> float | None:
        """Drafts kept of those made, over the last steps; None before the first."""
        return self._accepted / self._drafted if self._drafted else None

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per round, over the last steps; None before the first."""
        return 1 + self._accepted / self._rounds if self._rounds else None

    def end(self, timeline: Timeline) -> None:
        """A request that has run is over."""
        if timeline.started is not None and timeline.ended is not None:
            self._service = _mean(self._service, timeline.ended - timeline.started)

    def end_output(self, tokens: int, most: int) -> None:
        """An output is over that has so many tokens, and might have had `most`."""
        self._tokens = _mean(self._tokens or None, tokens)
        self._most_tokens = _mean(self._most_tokens or None, most)

    def left(self, tokens: int, most: int) -> float:
        """Tokens that an output which has so many is likely to bring yet: most do not use up what they may have."""
        return max(0.0, most * self._share - tokens)

    @property
    def _share(self) -> float:
        return self._tokens / self._most_tokens if self._most_tokens else 0.0

    def turn(self, waiting: int, left: Sequence[float]) -> float:
        """Seconds until so many that wait, and then one more, have got a place: outputs that run have `left` to bring.

        [10, 30] tokens left, 20 tokens per output, a token per second; 0, 1, 2 wait: 10 s, 30 s, and 10 + 20 s.
        """
        if not left or not self._paces:
            return 0.0
        nearest = min(self._paces, key=lambda size: abs(size - len(left).bit_length()))
        rounds, place = divmod(waiting, len(left))
        return (left[place] + rounds * self._tokens) * self._paces[nearest]

    def wait(self, ahead: int, running: int) -> float:
        """Seconds until `ahead` others and then this one have got a place, where `running` now hold all of them.

        Each place becomes free once per time of service; `running` of them are spread over it.
        """
        return 0.0 if self._service is None else (ahead + 1) * self._service / (running + 1)

    def work(self, request: Request, max_len: int) -> float:
        """Seconds from its place to the last of the tokens that `request` is sure to get, of `max_len` at most."""
        reading = len(request.token_ids) / self._prompt_rate if self._prompt_rate else 0.0
        return reading + (least_tokens(request, max_len) - 1) * (self._per_token or 0.0)

    def outlook(self, waiting: int, left: Sequence[float]) -> Outlook:
        """What a request can expect behind `waiting` others without a place; `left` as in `turn`, ascending.

        Past times of service lag behind when load rises; what runs now tells little when lengths differ much.
        """
        before = max(0, waiting)
        wait = max(self.wait(before, len(left)), self.turn(before, left))
        return Outlook(wait if waiting >= 0 else 0.0, self._service or 0.0, self._retry(wait))

    def _retry(self, wait: float) -> float:
        """Seconds after which all that wait now have a place: an earlier retry would find them still waiting."""
        unknown, least, most = RETRY_SECONDS
        return unknown if self._service is None else min(most, max(least, wait))


def least_tokens(request: Request, max_len: int) -> int:
    """How many tokens an output is sure to have: most end by themselves, sooner than `max_len` makes them."""
    sampling = request.sampling
    may_end = not sampling.ignore_eos or sampling.stop or sampling.stop_token_ids or sampling.guided
    if may_end:
        return max(1, sampling.min_tokens)
    return max_len - len(request.token_ids)


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + _NEW * (new - old)
