"""Comparison with other programs: same weights, prompts and threads, round by round, with speculation on both sides."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks.harness.busy import neighbours
from benchmarks.harness.lab import BenchOptions, Lab, Row, Section
from benchmarks.harness.machine import Memory
from benchmarks.harness.synthetic import int8_of, matrix_bytes
from benchmarks.harness.timing import AUTO
from benchmarks.harness.turns import Turn, foreign, median_speed, promising, ratios, take_turns, worth_while
from benchmarks.peers.catalogue import OURS, PEERS, Peer, PeerSetting, pythons
from benchmarks.peers.remote import NotMeasured, Remote
from pilotfish.engine.machine.threads import cores

BATCHES = (1, 4, 8, 16)
DRAFTS = (2, 4, 6)
EIGHT_BITS = ("int8", "q8_0")
# Speeds relative to the fastest in the first round; slower ways are not run again. `HOPELESS` is for plain decoding,
# which is kept longer as the baseline.
SLOW, HOPELESS = 0.4, 0.1
_SPARE = 64  # tokens beyond prompt and output


def measure(lab: Lab) -> list[Row]:
    """Measure every available program, batch and number of neighbours; a missing program gets a row with the reason."""
    wanted = lab.options
    batches = wanted.batches or BATCHES
    setting = setting_of(lab, max(batches), wanted.prompt)
    rows: list[Row] = []
    with ExitStack() as processes:
        running = started(lab, processes, chosen(wanted), setting, rows)
        memory = Memory(setting.threads)
        for batch in batches:
            for count in wanted.neighbours:
                with neighbours(count):
                    rows += [{"neighbours": count} | row for row in _batch(lab, running, batch, memory)]
    return rows


def setting_of(lab: Lab, batch: int, prompt: int) -> PeerSetting:
    """Return settings for `batch` sequences with prompts of at most `prompt` tokens."""
    wanted = lab.options
    length = prompt + wanted.tokens + _SPARE
    threads, logs = wanted.threads or cores(), wanted.models / "logs"
    return PeerSetting(lab.pair, pythons(wanted.peers_python), threads, batch, length, logs)


def chosen(options: BenchOptions) -> list[Peer]:
    """Return the programs that the options name, in full or in part; if none of ours is named, add all of ours."""
    if options.peers is None:
        return list(PEERS)
    named = [peer for peer in PEERS if any(_is_meant(peer, name) for name in options.peers)]
    has_ours = any(peer.is_ours for peer in named)
    return [peer for peer in PEERS if peer in named or (peer.is_ours and not has_ours)]


def _is_meant(peer: Peer, name: str) -> bool:
    """Return whether `name` selects this peer. A full name selects only that program."""
    is_whole = name in {other.name for other in PEERS}
    return name == peer.name if is_whole else name in peer.name


def started(
    lab: Lab,
    processes: ExitStack,
    peers: Sequence[Peer],
    setting: PeerSetting,
    rows: list[Row],
    warm_up: Callable[[Remote], object] = lambda _: None,
) -> dict[Peer, Remote]:
    """Start the programs, which run until `processes` closes. One that fails gets a row with the reason."""
    running: dict[Peer, Remote] = {}
    for peer in peers:
        try:
            remote = processes.enter_context(peer.start(setting))
            lab.tell(f"{peer.name}: {remote.ready()}")
            warm_up(remote)
            running[peer] = remote
        except NotMeasured as error:
            rows.append(not_measured(lab, peer, error))
    return running


def not_measured(lab: Lab, peer: Peer, error: NotMeasured) -> Row:
    """Report the error on the console and return a row for the page."""
    lab.tell(f"{peer.name}: not measured: {error}")
    return {"name": peer.name, "remark": f"not measured: {error}"}


def _batch(lab: Lab, running: dict[Peer, Remote], batch: int, memory: Memory) -> Iterator[Row]:
    """Measure all ways to run one batch; a first round shows which work and which are worth more rounds."""
    prompts = lab.pair.rule.prompts(batch, lab.options.prompt)
    ways: dict[str, Callable[[], Turn]] = {}
    labels: dict[str, Row] = {}
    for peer, remote in running.items():
        for k in _drafts(lab, peer) if batch <= peer.most else ():
            name = f"{peer.name}, K {k}"
            ways[name] = partial(_turn, lab, remote, prompts, k)
            labels[name] = {"batch": batch, "name": peer.name, "k": k, "is_ours": peer.is_ours}
    first: dict[str, Turn] = {}
    for name, run in ways.items():
        try:
            first[name] = run()
        except NotMeasured as error:
            yield labels[name] | {"remark": f"not measured: {error}"}
    if not any(labels[name]["is_ours"] for name in first):
        why = "first turns alone: nothing of ours runs beside it"
        yield from (labels[name] | {"tokens_per_second": turn.speed, "remark": why} for name, turn in first.items())
        return
    left = {name: ways[name] for name in _worth_while(first, ways, labels)}
    bandwidths: list[float] = []

    def read_memory() -> None:
        bandwidths.append(memory.bandwidth())

    turns = take_turns(left, lab.options.rounds, partial(_tell, lab, batch), read_memory, NotMeasured)
    for name in first.keys() - turns.keys():
        why = "ended in a later turn" if name in left else "far behind"
        yield labels[name] | {"tokens_per_second": first[name].speed, "remark": f"first turns alone: {why}"}
    yield from _rows(turns, labels, matrix_bytes(int8_of(lab.pair.target)), bandwidths)


def _worth_while(first: dict[str, Turn], ways: dict[str, Callable[[], Turn]], labels: dict[str, Row]) -> list[str]:
    """Return our ways, plain decoding unless it is hopeless, and drafts unless they are slow."""
    ours = [name for name in first if labels[name]["is_ours"]]
    fast = worth_while(first, ways, SLOW, ours)
    plain = [name for name in promising(first, HOPELESS, ()) if not labels[name]["k"]]
    return promising(first, SLOW, [*plain, *fast])


def _drafts(lab: Lab, peer: Peer) -> list[int | str]:
    if peer.drafts:
        return [peer.drafts]
    fixed = lab.drafts(DRAFTS) if peer.speculates and not peer.auto else []
    return [*([0] if peer.plain else []), *fixed, *([AUTO] if peer.auto else [])]


def _turn(lab: Lab, remote: Remote, prompts: Sequence[tuple[int, ...]], k: int | str) -> Turn:
    return checked_turn(lab, remote, prompts, lab.options.tokens, k)


def checked_turn(lab: Lab, remote: Remote, prompts: Sequence[tuple[int, ...]], tokens: int, k: int | str) -> Turn:
    """Run one turn and compare its tokens with the rule.

    Raises:
        NotMeasured: The program cannot run it, or returned another text.
    """
    turn = remote.run(prompts, tokens, k)
    if turn.tokens != [lab.pair.rule.text(prompt[-1], tokens) for prompt in prompts]:
        raise NotMeasured("returned other tokens than the rule in the weights")
    return turn


def _tell(lab: Lab, batch: int, text: str) -> None:
    lab.tell(f"peers, batch {batch}, {text}")


def _rows(
    turns: dict[str, list[Turn]], labels: dict[str, Row], weight_bytes: int, bandwidths: Sequence[float]
) -> Iterator[Row]:
    ours = [name for name in turns if labels[name]["is_ours"]]
    best = max(ours, key=lambda name: median_speed(turns[name]))
    plain = turns[next(name for name in ours if not labels[name]["k"])]
    for name, mine in turns.items():
        # A step of plain decoding reads every weight once.
        needs = [turn.speed / labels[name]["batch"] * weight_bytes / 1e9 for turn in mine]
        is_plain_int8 = name == f"{OURS}, K 0"
        shares = [need / had for need, had in zip(needs, bandwidths, strict=True)]
        yield labels[name] | {
            "tokens_per_second": median_speed(mine),
            "whole": statistics.median(turn.whole_speed for turn in mine),
            "plain_over_it": statistics.median(ratios(plain, mine)),
            "best_over_it": statistics.median(ratios(turns[best], mine)),
            "speeds": [turn.speed for turn in mine],
            "bandwidths": list(bandwidths),
            "memory_share": statistics.median(shares) if is_plain_int8 else None,
            "foreign": foreign(mine),
            "remark": f"{statistics.median(shares):.0%} of the memory's limit" if is_plain_int8 else "",
        }


def plot(rows: Sequence[Row], folder: Path) -> Sequence[str]:
    """Plot the best way of each program, with or without drafts, by batch."""
    from benchmarks.harness.plots import Line, draw

    measured = [r for r in rows if r.get("speeds") and not _neighbours(r)]
    lines = []
    for name in dict.fromkeys(_program(r) for r in measured):
        best = _best_by_batch([r for r in measured if _program(r) == name])
        lines.append(Line(name, list(best), [row["tokens_per_second"] for row in best.values()]))
    title = "Decoding speed, with own speculation where that is faster"
    return [draw(folder / "peers.png", title, "batch (sequences)", "decoding speed (tokens/s)", lines)]


def _program(row: Row) -> str:
    """`openvino int8 + draft` -> `openvino int8`."""
    name: str = row["name"]
    return name.removesuffix(" + draft").removesuffix(f" {AUTO.upper()}")


def _best_by_batch(rows: Sequence[Row]) -> dict[int, Row]:
    best: dict[int, Row] = {}
    for row in sorted(rows, key=lambda r: (r["batch"], r["tokens_per_second"])):
        best[row["batch"]] = row
    return best


def verdict(rows: Sequence[Row]) -> Sequence[str]:
    """Return sentences about the goals, batch by batch."""
    measured = [r for r in rows if r.get("speeds")]
    conditions = sorted({(r["batch"], _neighbours(r)) for r in measured})
    return [line for condition in conditions for line in _verdict(measured, *condition)]


def _neighbours(row: Row) -> int:
    """Busy processes beside the row; files from before they were counted have none."""
    return int(row.get("neighbours", 0))


def _verdict(rows: Sequence[Row], batch: int, neighbours: int) -> Iterator[str]:
    mine = [r for r in rows if (r["batch"], _neighbours(r)) == (batch, neighbours)]
    where = f"Batch {batch}" + (f" beside {neighbours} busy" if neighbours else "")
    others = [r for r in mine if not r["is_ours"]]
    plain = next(r for r in mine if r["is_ours"] and not r["k"])
    speed = f"{plain['tokens_per_second']:.1f} tokens/s"
    parts = [f"{plain['memory_share']:.0%} of the memory's limit"] if plain["memory_share"] else []
    parts += [f"{r['plain_over_it']:.2f} times {r['name']}" for r in others if not r["k"] and _kind(r) in EIGHT_BITS]
    yield f"- {where}, plain: {', '.join([speed, *parts])}."
    best = max((r for r in mine if r["is_ours"]), key=lambda r: r["tokens_per_second"])
    parts = [f"{plain['best_over_it']:.2f} times plain"]
    if others:
        first = max(others, key=lambda r: r["tokens_per_second"])
        parts.append(f"{first['best_over_it']:.2f} times the best other ({first['name']}, K {first['k']})")
    yield f"- {where}, with drafts: {best['tokens_per_second']:.1f} tokens/s (K {best['k']}), {', '.join(parts)}."


def _kind(row: Row) -> str:
    return str(row["name"]).split()[1]


SECTION = Section(
    "peers",
    "Beside other programs",
    measure,
    "Decoding speed in tokens/s from the moment that every sequence has a token, median over rounds; whole: prompts "
    "included. Ratios are medians of ratios within a round: our plain decoding over it, and our best way over it. The "
    "draft model agrees with the target at the stated rate in all programs, by construction of the weights. The start "
    "of decoding is unknown for transformers' batches: both speeds are the whole. llama.cpp is driven through its C "
    "interface by a loop of ours; ik_llama.cpp likewise, with llama.cpp's files. vLLM has a fixed K. Memory is read "
    "before each round. Neighbours: busy processes, started by the benchmark and counted among the foreign cores.",
    {
        "batch": "{batch}",
        "neighbours": "{neighbours}",
        "program": "{name}",
        "K": "{k}",
        "tokens/s": "{tokens_per_second:.1f}",
        "whole": "{whole:.1f}",
        "our plain/it": "{plain_over_it:.2f}",
        "our best/it": "{best_over_it:.2f}",
        "foreign cores": "{foreign:.2f}",
        "remark": "{remark}",
    },
    plot,
    verdict,
)
