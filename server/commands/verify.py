"""`pilotfish verify`: checks on a running server that tokens depend only on model, prompt, parameters and seed.

It uses the public protocol only. The expected answer is that of plain decoding without concurrent requests. The same
request is then sent with every proposer and several numbers of drafts: alone, concurrently, as a stream, and as a
stream that is interrupted and resumed.
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

_LISTED = 50  # differences in the text report; JSON lists all
_GONE = (
    errors.UnavailableError,
    errors.UnauthenticatedError,
    errors.PermissionDeniedError,
    errors.QueueFullError,
    errors.CancelledError,
)

Tell = Callable[[str], None]
Answers = dict[str, tuple[Output, ...]]


ERRORS = (RequestFailedError, OSError, ValueError)  # the server is unreachable or refuses, or a prompt is invalid


@dataclass(slots=True)
class VerifyRow:
    """The results of one setting: compared and equal answers by way, and statistics of drafting."""

    compared: dict[Way, int] = field(default_factory=lambda: dict.fromkeys(WAYS, 0))
    equal: dict[Way, int] = field(default_factory=lambda: dict.fromkeys(WAYS, 0))
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class VerifyJob:
    """One request to send. A resumed stream is interrupted after `cut` tokens."""

    setting: VerifySetting
    case: VerifyCase
    way: Way
    salt: str
    cut: int = 0


@dataclass(slots=True)
class VerifyReport:
    """The results of a run."""

    info: ModelInfo
    is_reproducible: bool
    skipped: list[str] = field(default_factory=list)
    rows: dict[VerifySetting, VerifyRow] = field(default_factory=dict)
    differences: list[tuple[VerifyJob, FirstDifference]] = field(default_factory=list)
    largest_gap: float = 0.0

    @property
    def tolerance(self) -> float:
        """Return by how much rounding may change a log-probability (docs/reproducibility.md)."""
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
            "left_out": self.skipped,
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
    """Return the report as text, and whether all answers are equal; `tell` receives progress messages."""
    asked = _parser().parse_args(arguments)
    tls = Tls(authority=asked.tls_ca) if asked.tls or asked.tls_ca else None
    retry = Retry(resume_attempts=3)  # a refusal to resume a stream is reported instead of retried
    with Client(asked.address, token=os.environ.get(VARIABLE), tls=tls, retry=retry) as client:
        report = _verify(asked, client, tell)
    return json.dumps(report.as_dict(), indent=1) if asked.json else as_text(report), not report.differences


def _verify(asked: Namespace, client: Client, tell: Tell) -> VerifyReport:
    info = client.model_info()
    tokenize = client.tokenize if info.has_tokenizer else None
    given = asked.prompts
    prompts = default_prompts(info, asked.tokens, tokenize) if given is None else read_prompts(given, tokenize)
    run = token_hex(8)  # the salt of this run's caches, which are empty at first
    is_reproducible = _refuses_rejection(client, prompts[0])
    report = VerifyReport(info, is_reproducible)
    wanted, expected = _expected(asked, client, prompts, run, report)
    draw, every = Random(asked.seed), settings(info, with_rejection=not is_reproducible)  # noqa: S311
    for setting in every:
        tell(f"alone: {setting.proposer}, {setting.drafts}")
        for case in _fitting(setting, wanted):  # with a shared cache
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
    """Return the cases that the server supports, and the answers of plain decoding, alone and with empty caches."""
    probe = client.generate(
        prompts[0], temperature=0.0, max_tokens=asked.tokens, ignore_eos=True, cache_salt=run, speculation="off"
    )
    wanted: list[VerifyCase] = []
    expected: Answers = {}
    for number, case in enumerate(cases(prompts, asked.tokens, probe.outputs[0])):
        try:
            expected[case.name] = ask(client, case, {**PLAIN.of(case), "cache_salt": f"{run}-{number}"}, "alone", 0)
        except (errors.UnsupportedError, errors.InvalidRequestError) as error:
            report.skipped.append(f"{case.name}: {error}")
        else:
            wanted.append(case)
    if not wanted:
        raise ValueError(f"the server refuses every request; {report.skipped[0]}")
    return wanted, expected


def _parser() -> argparse.ArgumentParser:
    port = os.environ.get("PILOTFISH_GRPC_PORT", "50051")
    parser = argparse.ArgumentParser(
        prog="pilotfish verify",
        description="Check on a running server that tokens depend only on model, prompt, parameters and seed. "
        "Exit with 0 if all answers are equal, 1 if any differs, 2 if the server cannot be reached.",
        epilog=f"The environment variable {VARIABLE} contains the access token, if the server requires one.",
    )
    parser.add_argument("address", nargs="?", default=f"127.0.0.1:{port}", help="HOST:PORT (default: %(default)s)")
    parser.add_argument("--tls", action="store_true", help="use TLS with the system's CA certificates")
    parser.add_argument("--tls-ca", metavar="PATH", help="use TLS with this CA bundle (PEM)")
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="prompts, one per line, or a .jsonl file of objects with `prompt` or `token_ids`",
    )
    for name, default, what in (
        ("tokens", 16, "maximum number of tokens per answer"),
        ("company", 32, "maximum number of concurrent requests"),
        ("rounds", 1, "number of rounds of concurrent requests"),
    ):
        parser.add_argument(f"--{name}", type=at_least(1), default=default, help=f"{what} (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the request order (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _refuses_rejection(client: Client, prompt: Tokens) -> bool:
    """Whether the server is in reproducible mode: only then does it refuse the rejection rule."""
    try:
        client.generate(prompt, max_tokens=1, verification="rejection")
    except errors.UnsupportedError:
        return True
    return False


def _fitting(setting: VerifySetting, wanted: Sequence[VerifyCase]) -> list[VerifyCase]:
    """Return the cases for which a setting must give the tokens of plain decoding: under rejection the greedy ones."""
    return [case for case in wanted if setting.rule == "coupled" or case.is_greedy]


def company(
    every: Sequence[VerifySetting], wanted: Sequence[VerifyCase], run: str, number: int, draw: Random
) -> Iterator[VerifyJob]:
    """Yield every case under every setting, each in one of the other ways; three rounds cover all of them.

    Most share a cache. Every fourth has its own, so that its prompt is computed concurrently with other requests.
    """
    for i, setting in enumerate(every):
        for j, case in enumerate(_fitting(setting, wanted)):
            way = WAYS[1 + (i + j + number) % (len(WAYS) - 1)]
            salt = run if draw.randrange(4) else f"{run}-{draw.getrandbits(64):x}"
            yield VerifyJob(setting, case, way, salt, draw.randint(1, max(1, (case.options["max_tokens"] or 1) - 1)))


def _answer(client: Client, job: VerifyJob) -> tuple[Output, ...] | RequestFailedError:
    """Send a request; an error of the server counts as a difference."""
    try:
        return ask(client, job.case, {**job.setting.of(job.case), "cache_salt": job.salt}, job.way, job.cut)
    except _GONE:
        raise
    except RequestFailedError as error:
        return error


def as_text(report: VerifyReport) -> str:
    """Format the report: the guarantee, a row per setting, the differences, and the result."""
    info = report.info
    lines = [f"{info.model} on {info.device} in {info.dtype}{', reproducible' * report.is_reproducible}"]
    if report.is_reproducible:
        lines += ["guaranteed: equal tokens, and bitwise equal log-probabilities", ""]
    else:
        within = f"log-probabilities within {report.tolerance:g}"
        lines += [f"guaranteed: equal tokens except for near-ties, and {within}", ""]
    table = [["proposer", "drafts", *WAYS, "tokens", "drafted", "accepted"]]
    for setting, row in report.rows.items():
        ways = [f"{row.equal[way]}/{row.compared[way]}" for way in WAYS]
        table.append([*_name(setting).values(), *ways, *map(str, (row.tokens, row.drafted, row.accepted))])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines += ["  ".join(f"{cell:<{w}}" for cell, w in zip(line, widths, strict=True)).rstrip() for line in table]
    lines += ["", *(f"skipped: {text}" for text in report.skipped)]
    for setting, row in report.rows.items():
        if setting.proposer != PLAIN.proposer and not row.drafted:
            lines.append(f"{setting.proposer} {setting.drafts} drafted nothing, so its row does not test drafts")
    if any(setting.rule == "rejection" for setting in report.rows):
        lines.append("under rejection only greedy answers are compared, because sampled ones depend on the drafts")
    for job, first in report.differences[:_LISTED]:
        lines.append(f"different: {job.setting.proposer} {job.setting.drafts}, {job.way}: {job.case.name}, {first}")
    if more := len(report.differences[_LISTED:]):
        lines.append(f"different: {more} more; --json lists all")
    return "\n".join([*lines, _verdict(report)])


def _verdict(report: VerifyReport) -> str:
    total = sum(sum(row.compared.values()) for row in report.rows.values())
    gap = f"log-probabilities differ by at most {report.largest_gap:.2g}"
    if not report.differences:
        return f"All {total} answers are equal; {gap}."
    ties = sum(first.is_near_tie for _, first in report.differences)
    return f"{len(report.differences)} of {total} answers differ, {ties} of them by near-ties; {gap}."
