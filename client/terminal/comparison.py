"""Measures what speculation gains: one request with drafts and without, by turns, on a running server."""

from __future__ import annotations

import time
from dataclasses import dataclass
from secrets import token_hex

from pilotfish.client.options import GenerateOptions, Prompt
from pilotfish.client.results import Completion
from pilotfish.client.sync_client import Client

LEAST_ROUNDS, MOST_ROUNDS = 5, 9
ENOUGH_SECONDS = 8.0  # no more rounds after this, and after the least number
MOST_SPREAD = 1.25  # between the gains of two rounds, without the best and the worst; beyond it, another load decides
LEAST_TOKENS = 32  # with fewer, one slow step would be most of the difference


@dataclass(frozen=True, slots=True)
class Round:
    """One completion with drafts and one without, right after each other: what else the machine does slows both."""

    drafted: Completion
    plain: Completion

    @property
    def gain(self) -> float:
        """Return how many times as fast a token is with drafts."""
        return (_seconds(self.plain) / _tokens(self.plain)) / (_seconds(self.drafted) / _tokens(self.drafted))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rounds of the same request."""

    rounds: tuple[Round, ...]

    @property
    def is_same(self) -> bool:
        """Whether all completions have the same tokens."""
        runs = [run for each in self.rounds for run in (each.drafted, each.plain)]
        return len({tuple(output.token_ids for output in run.outputs) for run in runs}) == 1

    @property
    def is_measured(self) -> bool:
        """Whether the completions are long enough."""
        return all(min(_tokens(each.drafted), _tokens(each.plain)) >= LEAST_TOKENS for each in self.rounds)

    def lines(self) -> list[tuple[str, str]]:
        """Return the lines of a table, names and values: the times of the round with the median gain, and that gain."""
        rounds = sorted(self.rounds, key=lambda each: each.gain) if self.is_measured else self.rounds
        median = rounds[len(rounds) // 2]
        found = [
            (name, f"{_tokens(run)} tokens in {_seconds(run):.2f} s")
            for name, run in (("with drafts", median.drafted), ("without drafts", median.plain))
        ]
        if not self.is_measured:
            return [*found, ("gain", f"not measured: fewer than {LEAST_TOKENS} tokens"), ("text", self._verdict)]
        low, high = rounds[1].gain, rounds[-2].gain
        spread = f"{low:.2f} to {high:.2f} in {len(rounds)} rounds without the best and the worst"
        gain = f"{median.gain:.2f} times as fast with drafts ({spread})"
        gain = gain if high <= MOST_SPREAD * low else f"not measured: the machine is too busy ({spread})"
        return [*found, ("gain", gain), ("text", self._verdict)]

    @property
    def _verdict(self) -> str:
        if self.is_same:
            return "the same with and without drafts"
        by_rule = self.rounds[0].drafted.finished.speculation.verification == "rejection"
        return "a different sample, as expected under rejection" if by_rule else "A DIFFERENT TEXT"


def compare(client: Client, prompt: Prompt, options: GenerateOptions, timeout: float | None) -> Comparison:
    """Run the request in rounds; in every other round, plain decoding comes first.

    Each run has its own cache salt, so that it finds neither the prompt nor another run's output in the prefix cache.
    """

    def run(changed: GenerateOptions) -> Completion:
        wanted: GenerateOptions = {**options, **changed, "cache_salt": token_hex(8)}
        return client.generate(prompt, timeout=timeout, **wanted)

    rounds: list[Round] = []
    start = time.monotonic()
    while len(rounds) < LEAST_ROUNDS or (len(rounds) < MOST_ROUNDS and time.monotonic() - start < ENOUGH_SECONDS):
        ways: tuple[GenerateOptions, GenerateOptions] = ({}, {"speculation": "off"})
        if len(rounds) % 2:
            plain, drafted = map(run, ways[::-1])
        else:
            drafted, plain = map(run, ways)
        rounds.append(Round(drafted, plain))
    return Comparison(tuple(rounds))


def _tokens(run: Completion) -> int:
    return sum(output.finished.usage.completion_tokens for output in run.outputs)


def _seconds(run: Completion) -> float:
    """Return the seconds from the first step to the end of the last output."""
    return max(output.finished.timing.total_seconds - output.finished.timing.queue_seconds for output in run.outputs)
