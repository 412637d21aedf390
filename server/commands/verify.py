"""`pilotfish verify`: checks on a running server that tokens depend only on model, prompt, parameters and seed.

It uses the public protocol only. The expected answer is that of plain decoding without concurrent requests. The same
request is then sent with every proposer and several numbers of drafts: alone, concurrently, as a stream, and as a
stream that is interrupted and resumed. Requests are sent in an order in which every beginning covers settings and ways
evenly, until all are sent or the time is over.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from random import Random
from secrets import token_hex
from typing import Literal

from grpc import StatusCode

from pilotfish.client import (
    Client,
    Delta,
    Event,
    Finished,
    GenerateOptions,
    ModelInfo,
    Output,
    RequestFailedError,
    Retry,
    Tls,
    errors,
)
from pilotfish.client.options import SpeculationMode, Verification
from pilotfish.client.terminal.settings import VARIABLE
from pilotfish.server.commands.answers import FirstDifference, first_difference, largest_gap
from pilotfish.server.commands.arguments import Tokenize, Tokens, at_least, read_prompts
from pilotfish.server.commands.progress import Progress, Stopped, TimeBudget

_TEXTS = (
    "def mean(values):\n    total = 0\n    for value in values:\n",
    "One, two, three. One, two, three. One, two,",
    "class Stack:\n    def push(self, item):\n        self.items.append(item)\n\n    def pop(self):\n",
)
_LENGTHS = (5, 23, 61)  # of prompts without a tokenizer
_BEYOND = 51  # tokens by which the longest prompt exceeds a step's budget, to test chunked prefill
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class VerifyCase:
    """A request whose answer must not depend on other requests."""

    name: str
    prompt: Tokens
    options: GenerateOptions

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the most likely one, so that near-ties can be detected by the log-probabilities."""
        return not self.options.get("temperature")

    @property
    def cost(self) -> float:
        """The expected work, in decoded tokens; a prompt token takes a small part of that."""
        return (self.options.get("n") or 1) * (self.options["max_tokens"] or 1) + len(self.prompt) / 16


@dataclass(frozen=True, slots=True)
class VerifySetting:
    """A proposer and a number of drafts; `num_draft_tokens` is None if the mode decides."""

    proposer: str
    mode: SpeculationMode
    num_draft_tokens: int | None = None
    rule: Verification = "coupled"

    @property
    def drafts(self) -> str:
        """Return the number of drafts as text, for instance "K=4"."""
        number = self.mode if self.num_draft_tokens is None else f"K={self.num_draft_tokens}"
        return number if self.rule == "coupled" else f"{number}, {self.rule}"

    def of(self, case: VerifyCase) -> GenerateOptions:
        own: GenerateOptions = {"speculation": self.mode, "proposer": self.proposer, "verification": self.rule}
        if self.num_draft_tokens is not None:
            own["num_draft_tokens"] = self.num_draft_tokens
        return {**case.options, **own}


PLAIN = VerifySetting("none", "off")


def settings(info: ModelInfo, *, with_rejection: bool) -> list[VerifySetting]:
    """Return plain decoding, and every proposer with several numbers of drafts, with AUTO and under rejection."""
    limit = info.speculation.num_draft_tokens
    numbers = sorted({number for number in (1, 2, 4, 8, limit) if 0 < number <= limit})
    found = [PLAIN]
    for name in info.proposers:
        if name == PLAIN.proposer:
            continue
        found += [VerifySetting(name, "fixed", number) for number in numbers]
        found.append(VerifySetting(name, "auto"))
        if with_rejection and limit:
            found.append(VerifySetting(name, "fixed", limit, "rejection"))
    return found


def default_prompts(info: ModelInfo, tokens: int, tokenize: Tokenize | None) -> list[Tokens]:
    """Return prompts of unequal length. The last one exceeds a step's budget if the context allows it."""
    room = max(1, info.max_model_len - 4 * tokens)
    longest = min(info.max_batch_tokens + _BEYOND, room)
    if tokenize is None:
        draw = Random(0)  # noqa: S311  # reproducible, not secret
        lengths = (min(length, room) for length in (*_LENGTHS, longest))
        return [tuple(draw.randrange(info.vocab_size) for _ in range(length)) for length in lengths]
    lines = (
        f"def step_{i}(values):\n    return [value + {i} for value in values]\n\n" for i in range(longest // 8 + 1)
    )
    return [tokenize(text)[:room] for text in _TEXTS] + [tokenize("".join(lines))[:longest]]


def cases(prompts: Sequence[Tokens], tokens: int, answer: Output) -> list[VerifyCase]:
    """Return greedy and sampled cases for each prompt, and one case for each other kind of parameters.

    `answer`: the output of plain greedy decoding for the first prompt; stop strings and tokens are taken from it.
    """
    base: GenerateOptions = {"max_tokens": tokens, "logprobs": True, "seed": 7}
    found: list[VerifyCase] = []
    for number, prompt in enumerate(prompts, start=1):
        greedy: GenerateOptions = {**base, "temperature": 0.0, "top_logprobs": 5, "ignore_eos": True}
        sampled: GenerateOptions = {**base, "temperature": 0.8, "top_p": 0.95, "ignore_eos": True}
        found.append(VerifyCase(f"greedy, prompt {number}", prompt, greedy))
        found.append(VerifyCase(f"sampled, prompt {number}", prompt, {**sampled, "seed": number}))
    for i, (name, options) in enumerate(_kinds(prompts[0], tokens).items()):
        number = i % len(prompts)
        found.append(VerifyCase(f"{name}, prompt {number + 1}", prompts[number], {**base, **options}))
    for name, options in _stops(answer).items():
        found.append(VerifyCase(f"{name}, prompt 1", prompts[0], {**base, **options}))
    return found


def _kinds(prompt: Tokens, tokens: int) -> dict[str, GenerateOptions]:
    """Return other parameters by name; some bias and ban tokens of this prompt."""
    return {
        "top-k and penalties": {
            "temperature": 1.0,
            "top_k": 50,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.3,
        },
        "min-p, bias and ban": {
            "temperature": 1.2,
            "min_p": 0.02,
            "logit_bias": {prompt[0]: 2.0},
            "banned_token_ids": prompt[-1:],
        },
        "three outputs": {"temperature": 0.9, "n": 3, "ignore_eos": True},
        "JSON schema": {"json_schema": _SCHEMA, "max_tokens": 3 * tokens, "top_logprobs": 5},
        "regex": {"regex": r"[a-z]{3,9}(, [a-z]{3,9}){2,5}", "temperature": 0.9},
        "choice": {"choice": ["yes, certainly", "yes, perhaps", "no, never"], "temperature": 1.0},
    }


def _stops(answer: Output) -> dict[str, GenerateOptions]:
    middle, half = answer.token_ids[len(answer.token_ids) // 2], len(answer.text) // 2
    kinds: dict[str, GenerateOptions] = {"stop token": {"stop_token_ids": [middle], "top_logprobs": 5}}
    if stop := answer.text[half : half + 4]:
        kinds["stop string"] = {"stop": [stop], "top_logprobs": 5}
    return kinds


Way = Literal["alone", "in company", "streamed", "resumed"]
WAYS: tuple[Way, ...] = ("alone", "in company", "streamed", "resumed")
_DEADLINE = 300.0  # seconds for one answer


def ask(client: Client, case: VerifyCase, options: GenerateOptions, way: Way, cut: int) -> tuple[Output, ...]:
    """Send a case in this way and return its outputs; a resumed stream is interrupted after `cut` tokens."""
    if way in ("alone", "in company"):
        return client.generate(case.prompt, timeout=_DEADLINE, **options).outputs
    events: list[Event] = []
    left = cut if way == "resumed" else math.inf  # tokens until the interruption
    with closing(client.stream(case.prompt, timeout=_DEADLINE, **options)) as stream:
        for event in stream:
            events.append(event)
            left -= len(event.token_ids) if isinstance(event, Delta) else 0
            if left <= 0:
                left = math.inf
                with suppress(StopIteration):  # the stream was already complete
                    error = errors.UnavailableError(StatusCode.UNAVAILABLE, "interrupted by `verify`")
                    events.append(stream.throw(error))
    ends = {event.index: event for event in events if isinstance(event, Finished)}
    return tuple(_output([e for e in events if isinstance(e, Delta) and e.index == i], ends[i]) for i in sorted(ends))


def _output(deltas: list[Delta], end: Finished) -> Output:
    return Output(
        index=end.index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        from_draft=tuple(draft for delta in deltas for draft in delta.from_draft),
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
        finished=end,
    )


# ------------------------------------------------------------------------------------------ the command

_LISTED = 50  # differences in the text report; JSON lists all
_GONE = (
    errors.UnavailableError,
    errors.UnauthenticatedError,
    errors.PermissionDeniedError,
    errors.QueueFullError,
    errors.CancelledError,
)

# Shares of the time after which no more answers are requested: expected ones, and those to requests that run alone.
_EXPECTED, _ALONE = 0.4, 0.65
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
    late: list[str] = field(default_factory=list)  # cases for which there was no time
    planned: int = 0  # answers to compare
    seconds: float = 0.0
    rows: dict[VerifySetting, VerifyRow] = field(default_factory=dict)
    differences: list[tuple[VerifyJob, FirstDifference]] = field(default_factory=list)
    largest_gap: float = 0.0

    @property
    def tolerance(self) -> float:
        """The maximum difference of log-probabilities that rounding may cause (docs/reproducibility.md)."""
        if self.is_reproducible:
            return 0.0
        return 1e-4 if self.info.dtype == "float32" else 0.1

    @property
    def compared(self) -> int:
        """The number of answers that were compared."""
        return sum(sum(row.compared.values()) for row in self.rows.values())

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
            "no_time": self.late,
            "planned": self.planned,
            "compared": self.compared,
            "seconds": self.seconds,
            "rows": [{**_name(setting), **asdict(row)} for setting, row in self.rows.items()],
            "differences": [
                {**_name(job.setting), "way": job.way, "case": job.case.name, "first": asdict(first)}
                for job, first in self.differences
            ],
            "equal": not self.differences,
        }


def _name(setting: VerifySetting) -> dict[str, str]:
    return {"proposer": setting.proposer, "drafts": setting.drafts}


def run(arguments: Sequence[str], progress: Progress) -> tuple[str, bool]:
    """Return the report as text, and whether all answers are equal."""
    asked, budget = (parsed := _parser().parse_args(arguments)), TimeBudget(parsed.seconds)
    tls = Tls(authority=asked.tls_ca) if asked.tls or asked.tls_ca else None
    retry = Retry(resume_attempts=3)  # a refusal to resume a stream is reported instead of retried
    progress(f"connecting to {asked.address}")
    with Client(asked.address, token=os.environ.get(VARIABLE), tls=tls, retry=retry) as client:
        report = VerifyReport(client.model_info(), is_reproducible=False)
        try:
            _verify(asked, client, report, budget, progress)
        except Stopped as stop:
            report.seconds = budget.elapsed
            stop.kept = f"{report.compared} of {report.planned or 'the'} answers were compared"
            stop.report = _shown(report, asked) if report.compared else ""
            raise
    report.seconds = budget.elapsed
    return _shown(report, asked), not report.differences


def _shown(report: VerifyReport, asked: Namespace) -> str:
    return json.dumps(report.as_dict(), indent=1) if asked.json else as_text(report)


def _verify(asked: Namespace, client: Client, report: VerifyReport, budget: TimeBudget, progress: Progress) -> None:
    tokenize = client.tokenize if report.info.has_tokenizer else None
    given = asked.prompts
    prompts = default_prompts(report.info, asked.tokens, tokenize) if given is None else read_prompts(given, tokenize)
    run = token_hex(8)  # the salt of this run's caches, which are empty at first
    report.is_reproducible = _refuses_rejection(client, prompts[0])
    wanted, expected = _expected(asked, client, prompts, run, report, budget, progress)
    draw, every = Random(asked.seed), settings(report.info, with_rejection=not report.is_reproducible)  # noqa: S311
    alone = spread((VerifyJob(each, case, "alone", run) for each in every for case in _fitting(each, wanted)), draw)
    rounds = range(asked.rounds)
    others = spread((job for number in rounds for job in company(every, wanted, run, number, draw)), draw)
    report.planned = len(alone) + len(others)
    progress.begin("comparing single requests", len(alone), seconds=_ALONE * budget.seconds - budget.elapsed)
    for number, job in enumerate(alone, 1):  # with a shared cache
        if not budget.fits(job.case.cost, _ALONE):
            break
        with budget.spending(job.case.cost):
            report.add(job, expected[job.case.name], _answer(client, job))
        progress.update(number, f"{job.setting.proposer}, {job.setting.drafts}")
    together = min(asked.company, report.info.max_batch_size)
    progress.begin(f"comparing requests, {together} at a time", len(others), seconds=budget.seconds - budget.elapsed)
    for number, (job, found) in enumerate(_concurrently(client, others, together, budget), 1):
        report.add(job, expected[job.case.name], found)
        progress.update(number, f"{job.setting.proposer}, {job.setting.drafts}")


def spread(jobs: Iterable[VerifyJob], draw: Random) -> list[VerifyJob]:
    """Return the jobs in an order in which every beginning has about equally many of each setting and way."""
    groups: dict[tuple[VerifySetting, Way], list[VerifyJob]] = {}
    for job in jobs:
        groups.setdefault((job.setting, job.way), []).append(job)
    for group in groups.values():
        draw.shuffle(group)
    return [job for row in zip_longest(*groups.values()) for job in row if job is not None]


def _concurrently(
    client: Client, jobs: Sequence[VerifyJob], together: int, budget: TimeBudget
) -> Iterator[tuple[VerifyJob, tuple[Output, ...] | RequestFailedError]]:
    """Send requests, `together` at a time, while one more would end in time; yield them with their answers."""
    waiting, latencies = iter(jobs), TimeBudget(budget.seconds - budget.elapsed, budget.clock)
    running: dict[Future[tuple[Output, ...] | RequestFailedError], tuple[VerifyJob, float]] = {}
    with ThreadPoolExecutor(together) as pool:

        def send(number: int) -> None:
            for job in islice(waiting, number if latencies.fits(1.0) else 0):
                running[pool.submit(_answer, client, job)] = job, latencies.elapsed

        try:
            send(together)
            while running:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    job, start = running.pop(future)
                    latencies.learn(1.0, latencies.elapsed - start)
                    yield job, future.result()
                    send(1)
        except BaseException:
            client.close()  # ends the calls of the other threads, for which the pool waits
            raise


def _expected(
    asked: Namespace, client: Client, prompts: Sequence[Tokens], run: str, report: VerifyReport, budget: TimeBudget,
    progress: Progress,
) -> tuple[list[VerifyCase], Answers]:  # fmt: skip
    """Return the cases that the server supports, and the answers of plain decoding, alone and with empty caches.

    The cheapest come first, and those for which there is no time are left out.
    """
    probe: GenerateOptions = {
        "temperature": 0.0,
        "max_tokens": asked.tokens,
        "ignore_eos": True,
        "cache_salt": run,
        "speculation": "off",
    }
    with budget.spending(VerifyCase("", prompts[0], probe).cost):
        answer = client.generate(prompts[0], **probe).outputs[0]
    wanted: list[VerifyCase] = []
    expected: Answers = {}
    every = sorted(cases(prompts, asked.tokens, answer), key=lambda case: case.cost)
    progress.begin("plain decoding", len(every), seconds=_EXPECTED * budget.seconds - budget.elapsed)
    for number, case in enumerate(every):
        progress.update(number, case.name)
        if expected and not budget.fits(case.cost, _EXPECTED):
            report.late.append(case.name)
            continue
        try:
            with budget.spending(case.cost):
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
        ("rounds", 1, "number of rounds of concurrent requests; three cover every way"),
        ("seconds", 45, "time after which no more requests are sent"),
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
    lines += [f"no time for: {name}" for name in report.late]
    for setting, row in report.rows.items():
        if setting.proposer != PLAIN.proposer and not row.drafted:
            lines.append(f"{setting.proposer} {setting.drafts} drafted nothing, so its row does not test drafts")
    if any(setting.rule == "rejection" for setting in report.rows):
        lines.append("under rejection only greedy answers are compared, because sampled ones depend on the drafts")
    for job, first in report.differences[:_LISTED]:
        lines.append(f"different: {job.setting.proposer} {job.setting.drafts}, {job.way}: {job.case.name}, {first}")
    if more := len(report.differences[_LISTED:]):
        lines.append(f"different: {more} more; --json lists all")
    total = report.compared
    if total < report.planned:
        enough = math.ceil(1.2 * report.seconds * report.planned / max(1, total))
        lines.append(f"compared {total} of {report.planned} answers; --seconds {enough} would be enough for all")
    gap = f"log-probabilities differ by at most {report.largest_gap:.2g}"
    ties, wrong = sum(first.is_near_tie for _, first in report.differences), len(report.differences)
    differ = f"{wrong} of {total} answers differ, {ties} of them by near-ties"
    return "\n".join([*lines, f"{differ if wrong else f'All {total} answers are equal'}; {gap}."])
