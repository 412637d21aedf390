"""`pilotfish verify`: checks on a running server that a request's tokens depend on model, prompt, parameters and seed.

It knows the public protocol only. What plain decoding answers a request that is alone is the expected answer. The same
request is then sent with every proposer and several numbers of drafts: alone, in company, as a stream, and as a stream
that is cut and resumed.
"""

from __future__ import annotations

import argparse
import json
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from secrets import token_hex

from client import Client, ModelInfo, Output, RequestFailedError, Retry, Tls, errors
from client.terminal import VARIABLE
from server.commands.arguments import Tokens, at_least, read_prompts
from server.commands.verify_answers import (
    PLAIN,
    WAYS,
    FirstDifference,
    VerifyCase,
    VerifySetting,
    Way,
    ask,
    cases,
    default_prompts,
    first_difference,
    largest_gap,
    settings,
)

_LISTED = 50  # differences in the text; the JSON has all
_GONE = (
    errors.UnavailableError,
    errors.UnauthenticatedError,
    errors.PermissionDeniedError,
    errors.QueueFullError,
    errors.CancelledError,
)

Tell = Callable[[str], None]
Answers = dict[str, tuple[Output, ...]]


ERRORS = (RequestFailedError, OSError, ValueError)  # the server cannot be reached or refuses, or a prompt is none


@dataclass(slots=True)
class VerifyRow:
    """The figures of one setting: answers compared and equal by way, and what drafting did."""

    compared: dict[Way, int] = field(default_factory=lambda: dict.fromkeys(WAYS, 0))
    equal: dict[Way, int] = field(default_factory=lambda: dict.fromkeys(WAYS, 0))
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class VerifyJob:
    """One answer to ask for. A resumed stream is cut after `cut` tokens."""

    setting: VerifySetting
    case: VerifyCase
    way: Way
    salt: str
    cut: int = 0


@dataclass(slots=True)
class VerifyReport:
    """Everything that was found."""

    info: ModelInfo
    is_reproducible: bool
    left_out: list[str] = field(default_factory=list)
    rows: dict[VerifySetting, VerifyRow] = field(default_factory=dict)
    differences: list[tuple[VerifyJob, FirstDifference]] = field(default_factory=list)
    largest_gap: float = 0.0

    @property
    def tolerance(self) -> float:
        """Return how far rounding may move a log-probability, as docs/reproducibility.md says."""
        if self.is_reproducible:
            return 0.0
        return 1e-4 if self.info.dtype == "float32" else 0.1

    def add(self, job: VerifyJob, expected: tuple[Output, ...], found: tuple[Output, ...] | RequestFailedError) -> None:
        row = self.rows.setdefault(job.setting, VerifyRow())
        row.compared[job.way] += 1
        if isinstance(found, RequestFailedError):
            first: FirstDifference | None = FirstDifference("answer", 0, None, "tokens", str(found))
        else:
            first = first_difference(expected, found, self.tolerance, is_greedy=job.case.is_greedy)
            self.largest_gap = max(self.largest_gap, largest_gap(expected, found))
            row.tokens += sum(len(output.token_ids) for output in found)
            row.drafted += sum(output.finished.speculation_stats.drafted for output in found)
            row.accepted += sum(output.finished.speculation_stats.accepted for output in found)
        if first is None:
            row.equal[job.way] += 1
        else:
            self.differences.append((job, first))

    def as_dict(self) -> dict[str, object]:
        return {
            "model": self.info.model,
            "device": self.info.device,
            "dtype": self.info.dtype,
            "reproducible": self.is_reproducible,
            "tolerance": self.tolerance,
            "largest_logprob_difference": self.largest_gap,
            "left_out": self.left_out,
            "rows": [{**_name(setting), **asdict(row)} for setting, row in self.rows.items()],
            "differences": [
                {**_name(job.setting), "way": job.way, "case": job.case.name, "first": asdict(first)}
                for job, first in self.differences
            ],
            "equal": not self.differences,
        }


def _name(setting: VerifySetting) -> dict[str, str]:
    return {"proposer": setting.proposer, "drafts": setting.drafts}


def run(arguments: Sequence[str], tell: Tell) -> tuple[str, bool]:
    """Verify, and return the report as text and whether all answers are equal; `tell` gets the progress."""
    asked = _parser().parse_args(arguments)
    tls = Tls(authority=asked.tls_ca) if asked.tls or asked.tls_ca else None
    retry = Retry(resume_attempts=3)  # a refusal to resume a stream is to be reported, not waited for
    with Client(asked.address, token=os.environ.get(VARIABLE), tls=tls, retry=retry) as client:
        report = _verify(asked, client, tell)
    return json.dumps(report.as_dict(), indent=1) if asked.json else as_text(report), not report.differences


def _verify(asked: Namespace, client: Client, tell: Tell) -> VerifyReport:
    info = client.model_info()
    tokenize = client.tokenize if info.has_tokenizer else None
    given = asked.prompts
    prompts = default_prompts(info, asked.tokens, tokenize) if given is None else read_prompts(given, tokenize)
    run = token_hex(8)  # names the caches of this run, which are empty at first
    is_reproducible = _refuses_rejection(client, prompts[0])
    report = VerifyReport(info, is_reproducible)
    wanted, expected = _expected(asked, client, prompts, run, report)
    draw, every = Random(asked.seed), settings(info, with_rejection=not is_reproducible)  # noqa: S311
    for setting in every:
        tell(f"alone: {setting.proposer}, {setting.drafts}")
        for case in _fitting(setting, wanted):  # over a cache that they share
            job = VerifyJob(setting, case, "alone", run)
            report.add(job, expected[case.name], _answer(client, job))
    others = [job for number in range(asked.rounds) for job in company(every, wanted, run, number, draw)]
    draw.shuffle(others)
    together = min(asked.company, info.max_batch_size)
    tell(f"in company: {len(others)} requests, {together} at a time")
    with ThreadPoolExecutor(together) as pool:
        try:
            answers = pool.map(lambda job: _answer(client, job), others)
            for job, found in zip(others, answers, strict=True):
                report.add(job, expected[job.case.name], found)
        finally:
            pool.shutdown(cancel_futures=True)
    return report


def _expected(
    asked: Namespace, client: Client, prompts: Sequence[Tokens], run: str, report: VerifyReport
) -> tuple[list[VerifyCase], Answers]:
    """Return the cases that the server serves, and the answers of plain decoding, alone and over empty caches."""
    probe = client.generate(
        prompts[0], temperature=0.0, max_tokens=asked.tokens, ignore_eos=True, cache_salt=run, speculation="off"
    )
    wanted: list[VerifyCase] = []
    expected: Answers = {}
    for number, case in enumerate(cases(prompts, asked.tokens, probe.outputs[0])):
        try:
            expected[case.name] = ask(client, case, {**PLAIN.of(case), "cache_salt": f"{run}-{number}"}, "alone", 0)
        except (errors.UnsupportedError, errors.InvalidRequestError) as error:
            report.left_out.append(f"{case.name}: {error}")
        else:
            wanted.append(case)
    if not wanted:
        raise ValueError(f"the server refuses every request; {report.left_out[0]}")
    return wanted, expected


def _parser() -> argparse.ArgumentParser:
    port = os.environ.get("PILOTFISH_GRPC_PORT", "50051")
    parser = argparse.ArgumentParser(
        prog="pilotfish verify",
        description="Check on a running server that tokens depend on model, prompt, parameters and seed alone. "
        "Exit with 0 if all answers are equal, 1 if any differs, 2 if the server cannot be asked.",
        epilog=f"A token, where the server asks for one, is read from the variable {VARIABLE}.",
    )
    parser.add_argument("address", nargs="?", default=f"127.0.0.1:{port}", help="HOST:PORT (default: %(default)s)")
    parser.add_argument("--tls", action="store_true", help="use TLS with the system's CA bundle")
    parser.add_argument("--tls-ca", metavar="PATH", help="use TLS with this CA bundle (PEM)")
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="your own prompts, one per line; a .jsonl file has objects with `prompt` or `token_ids`",
    )
    for name, default, what in (
        ("tokens", 16, "maximum number of tokens per answer"),
        ("company", 32, "maximum number of concurrent requests"),
        ("rounds", 1, "number of passes with concurrent requests"),
    ):
        parser.add_argument(f"--{name}", type=at_least(1), default=default, help=f"{what} (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of requests (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _refuses_rejection(client: Client, prompt: Tokens) -> bool:
    """Whether the server is a reproducible one: such a server, and no other, refuses the rejection rule."""
    try:
        client.generate(prompt, max_tokens=1, verification="rejection")
    except errors.UnsupportedError:
        return True
    return False


def _fitting(setting: VerifySetting, wanted: Sequence[VerifyCase]) -> list[VerifyCase]:
    """The cases in which a setting must give plain decoding's tokens: under rejection the greedy ones."""
    return [case for case in wanted if setting.rule == "coupled" or case.is_greedy]


def company(
    every: Sequence[VerifySetting], wanted: Sequence[VerifyCase], run: str, number: int, draw: Random
) -> Iterator[VerifyJob]:
    """Yield every case under every setting, in one of the other ways by turns: after three rounds in each of them.

    Most share a cache with the others; every fourth has its own, so that its prompt is computed among others.
    """
    for i, setting in enumerate(every):
        for j, case in enumerate(_fitting(setting, wanted)):
            way = WAYS[1 + (i + j + number) % (len(WAYS) - 1)]
            salt = run if draw.randrange(4) else f"{run}-{draw.getrandbits(64):x}"
            yield VerifyJob(setting, case, way, salt, draw.randint(1, max(1, (case.options["max_tokens"] or 1) - 1)))


def _answer(client: Client, job: VerifyJob) -> tuple[Output, ...] | RequestFailedError:
    """Ask; an answer that the server failed to give is a difference, too."""
    try:
        return ask(client, job.case, {**job.setting.of(job.case), "cache_salt": job.salt}, job.way, job.cut)
    except _GONE:
        raise
    except RequestFailedError as error:
        return error


def as_text(report: VerifyReport) -> str:
    """Format the report: what is promised, a row per setting, every difference, and the verdict."""
    info = report.info
    lines = [f"{info.model} on {info.device} in {info.dtype}{', reproducible' * report.is_reproducible}"]
    if report.is_reproducible:
        lines += ["promised: equal tokens, and log-probabilities of the same bits", ""]
    else:
        within = f"log-probabilities within {report.tolerance:g}"
        lines += [f"promised: equal tokens except for near-ties, and {within}", ""]
    table = [["proposer", "drafts", *WAYS, "tokens", "drafted", "accepted"]]
    for setting, row in report.rows.items():
        ways = [f"{row.equal[way]}/{row.compared[way]}" for way in WAYS]
        table.append([*_name(setting).values(), *ways, *map(str, (row.tokens, row.drafted, row.accepted))])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines += ["  ".join(f"{cell:<{w}}" for cell, w in zip(line, widths, strict=True)).rstrip() for line in table]
    lines += ["", *(f"left out: {text}" for text in report.left_out)]
    for setting, row in report.rows.items():
        if setting.proposer != PLAIN.proposer and not row.drafted:
            lines.append(f"{setting.proposer} {setting.drafts} drafted nothing: its row says nothing about drafts")
    if any(setting.rule == "rejection" for setting in report.rows):
        lines.append("under rejection only greedy answers are compared: sampled ones depend on the drafts")
    for job, first in report.differences[:_LISTED]:
        lines.append(f"different: {job.setting.proposer} {job.setting.drafts}, {job.way}: {job.case.name}, {first}")
    if more := len(report.differences[_LISTED:]):
        lines.append(f"different: {more} more, which --json lists")
    return "\n".join([*lines, _verdict(report)])


def _verdict(report: VerifyReport) -> str:
    total = sum(sum(row.compared.values()) for row in report.rows.values())
    gap = f"log-probabilities differ by {report.largest_gap:.2g} at most"
    if not report.differences:
        return f"All {total} answers are equal; {gap}."
    ties = sum(first.is_near_tie for _, first in report.differences)
    return f"{len(report.differences)} of {total} answers differ, {ties} of them by near-ties; {gap}."
