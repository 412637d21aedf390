"""The requests of `pilotfish verify`, how it sends them, and how it compares the answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from random import Random
from typing import Literal

from grpc import StatusCode

from client import Client, Delta, Event, Finished, GenerateOptions, ModelInfo, Output, errors
from client.options import SpeculationMode, Verification
from server.commands.arguments import Tokenize, Tokens

_TEXTS = (
    "def mean(values):\n    total = 0\n    for value in values:\n",
    "One, two, three. One, two, three. One, two,",
    "class Stack:\n    def push(self, item):\n        self.items.append(item)\n\n    def pop(self):\n",
)
_LENGTHS = (5, 23, 61)  # of prompts without a tokenizer
_BEYOND = 51  # tokens by which the longest prompt exceeds a step's budget, so that it is processed in chunks
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
        draw = Random(0)  # noqa: S311  # to be repeated, not to be secret
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
                with suppress(StopIteration):  # everything had arrived
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
    if len(got.logprobs) != len(got.token_ids):
        numbers = str(len(got.token_ids)), str(len(got.logprobs))
        return FirstDifference("number of log-probabilities", index, None, *numbers)
    pairs = [(one.logprob, other.logprob) for one, other in zip(want.logprobs[:at], got.logprobs, strict=False)]
    odd = next((i for i, (one, other) in enumerate(pairs) if not abs(one - other) <= tolerance), None)
    if want.token_ids != got.token_ids:
        is_near_tie = is_greedy and odd is None and _is_near_tie(want, got, at, tolerance)
        return FirstDifference("token", index, at, _token(want, at), _token(got, at), is_near_tie)
    if odd is not None:
        one, other = pairs[odd]
        return FirstDifference("log-probability", index, odd, repr(one), repr(other))
    for what, mine, theirs in (
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
