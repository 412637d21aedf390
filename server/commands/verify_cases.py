"""The requests of `pilotfish verify`: prompts of unequal length, one case per kind of parameters, and who drafts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from client import GenerateOptions, ModelInfo, Output
from client.options import SpeculationMode, Verification

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
        """Return the options of a case under this setting."""
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

    Raises:
        ValueError: a line is no prompt, or is text where the server has no tokenizer.
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
