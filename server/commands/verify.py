"""`pilotfish verify`: checks on a running server that tokens depend only on model, prompt, parameters and seed.

It uses the public protocol only. The expected answer is that of plain decoding without concurrent requests. The same
request is then sent with every proposer and several numbers of drafts: alone, concurrently, as a stream, and as a
stream that is interrupted and resumed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
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
from pilotfish.client.terminal import VARIABLE
from pilotfish.server.commands.arguments import Tokenize, Tokens, at_least, read_prompts

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
        return client.generate(case.prompt, deadline=_DEADLINE, **options).outputs
    events: list[Event] = []
    left = cut if way == "resumed" else math.inf  # tokens until the interruption
    with closing(client.stream(case.prompt, deadline=_DEADLINE, **options)) as stream:
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


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first difference of two answers: `what` differs in `output`, at token `position` if it concerns a token."""

    what: str
    output: int
    position: int | None
    expected: str
    found: str
    is_near_tie: bool = False

    def __str__(self) -> str:
        where = f"output {self.output}" + ("" if self.position is None else f", token {self.position}")
        return f"{where}: {self.what} expected {self.expected}, found {self.found}{' (a near-tie)' * self.is_near_tie}"


def first_difference(
    expected: tuple[Output, ...], found: tuple[Output, ...], tolerance: float, *, is_greedy: bool
) -> FirstDifference | None:
    """Compare two answers; log-probabilities may differ by `tolerance`."""
    if len(expected) != len(found):
        return FirstDifference("number of outputs", 0, None, str(len(expected)), str(len(found)))
    pairs = zip(expected, found, strict=True)
    differences = (_difference(want, got, tolerance, is_greedy=is_greedy) for want, got in pairs)
    return next((difference for difference in differences if difference is not None), None)


def largest_gap(expected: tuple[Output, ...], found: tuple[Output, ...]) -> float:
    """Return the largest difference of log-probabilities within the common prefix."""
    gaps = [
        abs(before.logprob - after.logprob)
        for want, got in zip(expected, found, strict=False)
        for before, after, _ in zip(want.logprobs, got.logprobs, range(_num_equal(want, got)), strict=False)
    ]
    return max(gaps, default=0.0)


def _difference(want: Output, got: Output, tolerance: float, *, is_greedy: bool) -> FirstDifference | None:
    index, at = want.index, _num_equal(want, got)
    pairs = [(one.logprob, other.logprob) for one, other in zip(want.logprobs[:at], got.logprobs, strict=False)]
    odd = next((i for i, (one, other) in enumerate(pairs) if not abs(one - other) <= tolerance), None)
    if want.token_ids != got.token_ids:
        is_near_tie = is_greedy and odd is None and _is_near_tie(want, got, at, tolerance)
        return FirstDifference("token", index, at, _token(want, at), _token(got, at), is_near_tie)
    if odd is not None:
        one, other = pairs[odd]
        return FirstDifference("log-probability", index, odd, repr(one), repr(other))
    for what, mine, theirs in (
        ("number of log-probabilities", len(got.token_ids), len(got.logprobs)),
        ("text", want.text, got.text),
        ("end", _end(want.finished), _end(got.finished)),
        ("seed", want.finished.seed, got.finished.seed),
    ):
        if mine != theirs:
            return FirstDifference(what, index, None, repr(mine), repr(theirs))
    return None


def _is_near_tie(want: Output, got: Output, at: int, tolerance: float) -> bool:
    """Whether both tokens were equally likely in plain decoding, up to rounding."""
    if tolerance == 0 or at >= min(len(want.token_ids), len(got.token_ids)):
        return False
    chosen = want.logprobs[at]
    others = (one.logprob for one in chosen.top if one.token_id == got.token_ids[at])
    return any(abs(chosen.logprob - other) <= tolerance for other in others)


def _num_equal(want: Output, got: Output) -> int:
    """Return the length of the common prefix."""
    shorter = min(len(want.token_ids), len(got.token_ids))
    return next((i for i in range(shorter) if want.token_ids[i] != got.token_ids[i]), shorter)


def _token(output: Output, at: int) -> str:
    return str(output.token_ids[at]) if at < len(output.token_ids) else "the end"


def _end(finished: Finished) -> tuple[str, int | None, str | None, int]:
    return finished.finish_reason, finished.stop_token_id, finished.stop_string, finished.usage.completion_tokens


# ------------------------------------------------------------------------------------------ the command

_LISTED = 50  # differences in the text report; JSON lists all
_GONE = (
    errors.UnavailableError,
    errors.UnauthenticatedError,
    errors.PermissionDeniedError,
    errors.QueueFullError,
    errors.CancelledError,
)

Progress = Callable[[str], None]
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
        """The maximum difference of log-probabilities that rounding may cause (docs/reproducibility.md)."""
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


def run(arguments: Sequence[str], progress: Progress) -> tuple[str, bool]:
    """Return the report as text, and whether all answers are equal; `progress` receives progress messages."""
    asked = _parser().parse_args(arguments)
    tls = Tls(authority=asked.tls_ca) if asked.tls or asked.tls_ca else None
    retry = Retry(resume_attempts=3)  # a refusal to resume a stream is reported instead of retried
    with Client(asked.address, token=os.environ.get(VARIABLE), tls=tls, retry=retry) as client:
        report = _verify(asked, client, progress)
    return json.dumps(report.as_dict(), indent=1) if asked.json else as_text(report), not report.differences


def _verify(asked: Namespace, client: Client, progress: Progress) -> VerifyReport:
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
        progress(f"alone: {setting.proposer}, {setting.drafts}")
        for case in _fitting(setting, wanted):  # with a shared cache
            job = VerifyJob(setting, case, "alone", run)
            report.add(job, expected[case.name], _answer(client, job))
    others = [job for number in range(asked.rounds) for job in company(every, wanted, run, number, draw)]
    draw.shuffle(others)
    together = min(asked.company, info.max_batch_size)
    progress(f"in company: {len(others)} requests, {together} at a time")
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
    total = sum(sum(row.compared.values()) for row in report.rows.values())
    gap = f"log-probabilities differ by at most {report.largest_gap:.2g}"
    ties, wrong = sum(first.is_near_tie for _, first in report.differences), len(report.differences)
    differ = f"{wrong} of {total} answers differ, {ties} of them by near-ties"
    return "\n".join([*lines, f"{differ if wrong else f'All {total} answers are equal'}; {gap}."])
