"""The requests of `pilotfish verify`, and how it asks and compares.

Prompts of unequal length, one case per kind of parameters, and who drafts; whole answers, streams and resumed streams,
and their first difference.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Literal, Self

import grpc

from client import Client, Delta, Event, Finished, GenerateOptions, ModelInfo, Output, errors
from client.connection import Connection
from client.options import SpeculationMode, Verification, build_request
from client.resume import Patience, ResumableStream
from pilotfish.v1.generation_pb2_grpc import InferenceServiceStub

Tokens = tuple[int, ...]
Tokenize = Callable[[str], Tokens]

_TEXTS = (
    "def mean(values):\n    total = 0\n    for value in values:\n",
    "One, two, three. One, two, three. One, two,",
    "class Stack:\n    def push(self, item):\n        self.items.append(item)\n\n    def pop(self):\n",
)
_LENGTHS = (5, 23, 61)  # of prompts without a tokenizer
_BEYOND = 51  # tokens by which the longest prompt exceeds what a step feeds: it comes in chunks
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
    """A request whose answer depends on nothing but itself."""

    name: str
    prompt: Tokens
    options: GenerateOptions

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the likeliest one, so that a near-tie shows in the log-probabilities."""
        return not self.options.get("temperature")


@dataclass(frozen=True, slots=True)
class VerifySetting:
    """Who drafts, and how many tokens; `num_draft_tokens` is None where the mode decides."""

    proposer: str
    mode: SpeculationMode
    num_draft_tokens: int | None = None
    rule: Verification = "coupled"

    @property
    def drafts(self) -> str:
        """Return the name of the setting beside its proposer, as in "K=4"."""
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


def read_prompts(path: Path, tokenize: Tokenize | None) -> list[Tokens]:
    """Return the prompts of a file: one text per line; of a .jsonl file, objects with `prompt` or `token_ids`.

    Raises ValueError if a line is no prompt, or is text where the server has no tokenizer.
    """
    lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path} has no prompts; expected one per line")
    is_json = path.suffix == ".jsonl"
    return [_prompt(f"{path}, prompt {i + 1}", line, is_json, tokenize) for i, line in enumerate(lines)]


def _prompt(where: str, line: str, is_json: bool, tokenize: Tokenize | None) -> Tokens:
    entry = json.loads(line) if is_json else {"prompt": line}
    text, ids = (entry.get("prompt"), entry.get("token_ids")) if isinstance(entry, dict) else (None, None)
    if isinstance(ids, list) and ids and all(type(token) is int and token >= 0 for token in ids):
        return tuple(ids)
    if not isinstance(text, str):
        raise ValueError(  # noqa: TRY004  # the file is wrong, not our code
            f"{where} is {line[:80]!r}; expected an object with a text `prompt` or a list `token_ids`"
        )
    if tokenize is None:
        raise ValueError(f"{where} is text, and the server has no tokenizer; expected JSON lines with `token_ids`")
    if not (tokens := tokenize(text)):
        raise ValueError(f"{where} is empty; expected at least one token")
    return tokens


def default_prompts(info: ModelInfo, tokens: int, tokenize: Tokenize | None) -> list[Tokens]:
    """Return prompts of unequal length. If the context has room, the last is longer than a step, so it is split."""
    room = max(1, info.max_model_len - 4 * tokens)
    longest = min(info.max_batch_tokens + _BEYOND, room)
    if tokenize is None:
        draw = Random(0)  # noqa: S311  # to be repeated, not to be secret
        return [_arbitrary(draw, min(length, room), info.vocab_size) for length in (*_LENGTHS, longest)]
    lines = (
        f"def step_{i}(values):\n    return [value + {i} for value in values]\n\n" for i in range(longest // 8 + 1)
    )
    return [tokenize(text)[:room] for text in _TEXTS] + [tokenize("".join(lines))[:longest]]


def _arbitrary(draw: Random, length: int, vocab_size: int) -> Tokens:
    return tuple(draw.randrange(vocab_size) for _ in range(length))


def cases(prompts: Sequence[Tokens], tokens: int, answer: Output) -> list[VerifyCase]:
    """Return greedy and sampled decoding of each prompt, and each other kind of parameters with one of the prompts.

    `answer`: what plain greedy decoding gives for the first prompt. The stop strings and tokens are part of it.
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
    """Other parameters by name; some bias and ban tokens of this prompt."""
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


class VerifyClient:
    """Asks one server. Threads may share it."""

    def __init__(self, connection: Connection) -> None:
        address, token, tls = connection.address, connection.token, connection.tls
        self.client = Client(address, token=token, tls=tls, retry=connection.retry)
        self._channel, self._metadata = connection.channel(), connection.metadata
        self._inference = InferenceServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.client.close()
        self._channel.close()

    def ask(self, case: VerifyCase, options: GenerateOptions, way: Way, cut: int) -> tuple[Output, ...]:
        """Return all outputs of a case, received in this way; a resumed stream is cut after `cut` tokens."""
        if way == "streamed":
            with closing(self.client.stream(case.prompt, deadline=_DEADLINE, **options)) as events:
                return outputs_of(list(events))
        if way == "resumed":
            return outputs_of(self._resumed(case, options, cut))
        return self.client.generate(case.prompt, deadline=_DEADLINE, **options).outputs

    def _resumed(self, case: VerifyCase, options: GenerateOptions, cut: int) -> list[Event]:
        """Receive a stream until there are `cut` tokens, cancel the call, and continue it with another one."""
        stream = ResumableStream(build_request(case.prompt, options), Patience(None, _DEADLINE))
        events: list[Event] = []
        try:
            self._receive(stream, events, cut)
            if not stream.is_complete:
                self._receive(stream, events, None)
        except grpc.RpcError as failure:
            raise errors.from_grpc(failure) from None
        return events

    def _receive(self, stream: ResumableStream, events: list[Event], cut: int | None) -> None:
        call = self._inference.GenerateStream(stream.next_request(), timeout=stream.timeout, metadata=self._metadata)
        num_tokens = 0
        try:
            for message in call:
                event = stream.take(message)
                events.append(event)
                num_tokens += len(event.token_ids) if isinstance(event, Delta) else 0
                if cut is not None and num_tokens >= cut:
                    return
        finally:
            call.cancel()  # has no effect on a call that has ended


def outputs_of(events: list[Event]) -> tuple[Output, ...]:
    """Return the outputs that the events of a stream make up, by index."""
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
    """Where two answers part: `what` differs in `output`, at token `position` if it is about one token."""

    what: str
    output: int
    position: int | None
    expected: str
    found: str
    is_near_tie: bool = False


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
    """Return by how much the log-probabilities of equal beginnings differ at most."""
    gaps = [
        abs(before.logprob - after.logprob)
        for want, got in zip(expected, found, strict=False)
        for before, after, _ in zip(want.logprobs, got.logprobs, range(_num_equal(want, got)), strict=False)
    ]
    return max(gaps, default=0.0)


def _difference(want: Output, got: Output, tolerance: float, *, is_greedy: bool) -> FirstDifference | None:
    index, at = want.index, _num_equal(want, got)
    if len(got.logprobs) != len(got.token_ids):
        numbers = str(len(got.token_ids)), str(len(got.logprobs))
        return FirstDifference("number of log-probabilities", index, None, *numbers)
    odd = next((i for i in range(at) if not abs(_logprob(want, i) - _logprob(got, i)) <= tolerance), None)
    if want.token_ids != got.token_ids:
        is_near_tie = is_greedy and odd is None and _is_near_tie(want, got, at, tolerance)
        return FirstDifference("token", index, at, _token(want, at), _token(got, at), is_near_tie)
    if odd is not None:
        return FirstDifference("log-probability", index, odd, f"{_logprob(want, odd)!r}", f"{_logprob(got, odd)!r}")
    for what, mine, theirs in (
        ("text", want.text, got.text),
        ("end", _end(want.finished), _end(got.finished)),
        ("seed", want.finished.seed, got.finished.seed),
    ):
        if mine != theirs:
            return FirstDifference(what, index, None, repr(mine), repr(theirs))
    return None


def _is_near_tie(want: Output, got: Output, at: int, tolerance: float) -> bool:
    """Whether plain decoding found both tokens as likely as each other, but for rounding."""
    if tolerance == 0 or at >= min(len(want.token_ids), len(got.token_ids)):
        return False
    chosen = want.logprobs[at]
    others = (one.logprob for one in chosen.top if one.token_id == got.token_ids[at])
    return any(abs(chosen.logprob - other) <= tolerance for other in others)


def _num_equal(want: Output, got: Output) -> int:
    """The length of the beginning that both have in common."""
    shorter = min(len(want.token_ids), len(got.token_ids))
    return next((i for i in range(shorter) if want.token_ids[i] != got.token_ids[i]), shorter)


def _logprob(output: Output, at: int) -> float:
    return output.logprobs[at].logprob


def _token(output: Output, at: int) -> str:
    return str(output.token_ids[at]) if at < len(output.token_ids) else "the end"


def _end(finished: Finished) -> tuple[str, int | None, str | None, int]:
    return finished.finish_reason, finished.stop_token_id, finished.stop_string, finished.usage.completion_tokens
