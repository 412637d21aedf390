"""Comparison with other programs before the first token: the time of prefill, and the time of starting a program."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from benchmarks.harness.busy import neighbours
from benchmarks.harness.lab import Lab, Row, Section
from benchmarks.harness.turns import Turn, foreign
from benchmarks.peers.catalogue import Peer, PeerSetting
from benchmarks.peers.remote import NotMeasured, Remote
from benchmarks.sections.peers import checked_turn, chosen, not_measured, setting_of, started

LENGTHS = (512, 2048, 8192)
_SHORT = 16  # tokens of the first prompt, which warms a program up


def measure_prompts(lab: Lab) -> list[Row]:
    """Measure every program that supports plain decoding, for every length and number of neighbours."""
    lengths = lab.options.contexts or LENGTHS
    setting = setting_of(lab, 1, max(lengths))
    rows: list[Row] = []
    with ExitStack() as processes:
        running = started(lab, processes, _plain(lab), setting, rows, lambda remote: _first(lab, remote, _SHORT))
        for length in lengths:
            for count in lab.options.neighbours:
                with neighbours(count):
                    rows += [{"prompt": length, "neighbours": count} | row for row in _length(lab, running, length)]
    return rows


def _plain(lab: Lab) -> list[Peer]:
    return [peer for peer in chosen(lab.options) if peer.plain]


def _first(lab: Lab, remote: Remote, length: int) -> Turn:
    """Generate one token after a new prompt."""
    prompts = lab.pair.rule.prompts(1, length, seed=time.monotonic_ns())
    return checked_turn(lab, remote, prompts, 1, 0)


def _length(lab: Lab, running: dict[Peer, Remote], length: int) -> Iterator[Row]:
    """Measure round by round. All rounds count, because the short prompt was the warm-up and long ones take minutes."""
    turns: dict[str, list[Turn]] = {peer.name: [] for peer in running}
    for number in range(lab.options.rounds):
        for peer in list(running)[:: -1 if number % 2 else 1]:
            if peer.name not in turns:
                continue
            try:
                turn = _first(lab, running[peer], length)
            except NotMeasured as error:
                del turns[peer.name]
                yield not_measured(lab, peer, error)
                continue
            turns[peer.name].append(turn)
            lab.tell(f"prompt of {length}, {peer.name}: {turn.seconds:.2f} s")
    yield from _rows({peer.name for peer in running if peer.is_ours}, turns, length)


def _rows(ours: set[str], turns: dict[str, list[Turn]], length: int) -> Iterator[Row]:
    base = next((turns[name] for name in turns if name in ours), None)
    for name, mine in turns.items():
        seconds = statistics.median(turn.seconds for turn in mine)
        over = [it.seconds / own.seconds for it, own in zip(mine, base, strict=True)] if base else []
        yield {
            "name": name,
            "is_ours": name in ours,
            "seconds": seconds,
            "tokens_per_second": length / seconds,
            "all_seconds": [turn.seconds for turn in mine],
            "foreign": foreign(mine),
            "remark": "",
        } | ({"ours_over_it": statistics.median(over)} if over else {})


def measure_starts(lab: Lab) -> list[Row]:
    """Measure every program alone, one after another, from its start to its first token."""
    setting = setting_of(lab, 1, _SHORT)
    lab.pair  # noqa: B018 - written before the clock runs
    found: dict[Peer, list[tuple[float, float]]] = {}
    rows: list[Row] = []
    # The first round is not counted: it converts models and brings files into the page cache.
    for number in range(lab.options.rounds + 1):
        for peer in _plain(lab) if not number else list(found):
            try:
                ready, first = _start(lab, peer, setting)
            except NotMeasured as error:
                found.pop(peer, None)
                rows.append(not_measured(lab, peer, error))
                continue
            lab.tell(f"start {number}, {peer.name}: ready after {ready:.2f} s, first token after {first:.2f} s")
            found.setdefault(peer, []).extend([(ready, first)] if number else [])
    base = next((times for peer, times in found.items() if peer.is_ours), None)
    for peer, times in found.items():
        over = [it[1] / own[1] for it, own in zip(times, base, strict=True)] if base else []
        rows.append(
            {
                "name": peer.name,
                "is_ours": peer.is_ours,
                "ready": statistics.median(ready for ready, _ in times),
                "first": statistics.median(first for _, first in times),
                "all_first": [first for _, first in times],
                "remark": "",
            }
            | ({"ours_over_it": statistics.median(over)} if over else {})
        )
    return rows


def _start(lab: Lab, peer: Peer, setting: PeerSetting) -> tuple[float, float]:
    began = time.perf_counter()
    with peer.start(setting) as remote:
        remote.ready()
        ready = time.perf_counter() - began
        _first(lab, remote, _SHORT)
        return ready, time.perf_counter() - began


def verdict(rows: Sequence[Row]) -> Sequence[str]:
    """Return sentences about ours and the best other program, by length and neighbours."""
    measured = [row for row in rows if "seconds" in row]
    conditions = sorted({(row["prompt"], row["neighbours"]) for row in measured})
    return [line for condition in conditions for line in _verdict(measured, *condition)]


def _verdict(rows: Sequence[Row], length: int, count: int) -> Iterator[str]:
    here = [row for row in rows if (row["prompt"], row["neighbours"]) == (length, count)]
    mine, others = [r for r in here if r["is_ours"]], [r for r in here if not r["is_ours"]]
    if mine and others:
        own, best = (min(part, key=lambda row: row["seconds"]) for part in (mine, others))
        where = f"Prompt of {length}" + (f" beside {count} busy" if count else "")
        gain = best["seconds"] / own["seconds"]
        yield f"- {where}: {own['tokens_per_second']:.0f} tokens/s ({own['name']}), {gain:.2f} times {best['name']}."


PROMPTS = Section(
    "peers-prompts",
    "Prompts, beside other programs",
    measure_prompts,
    "Seconds from the request to the first token of one stream, median over rounds, and prompt tokens in that time. "
    "Ratios are medians of ratios within a round: its seconds over ours (the first of ours in the table), so above 1 "
    "is faster than it. No prompt is cached. Every program has read a short prompt before.",
    {
        "prompt": "{prompt}",
        "neighbours": "{neighbours}",
        "program": "{name}",
        "seconds": "{seconds:.2f}",
        "tokens/s": "{tokens_per_second:.0f}",
        "its seconds/ours": "{ours_over_it:.2f}",
        "foreign cores": "{foreign:.2f}",
        "remark": "{remark}",
    },
    verdict=verdict,
)

STARTS = Section(
    "peers-start",
    "From start to first token, beside other programs",
    measure_starts,
    "Seconds from the start of the process, one program at a time: until the model is loaded, and until the first "
    f"token after a prompt of {_SHORT}; median of the starts after a first one, so that files are in memory.",
    {
        "program": "{name}",
        "loaded": "{ready:.2f}",
        "first token": "{first:.2f}",
        "its seconds/ours": "{ours_over_it:.2f}",
        "remark": "{remark}",
    },
)

SECTIONS = (PROMPTS, STARTS)
