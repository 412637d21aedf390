"""What commands read besides the options of `serve`: numbers with a minimum, and files of prompts."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import Any

Tokens = tuple[int, ...]
Tokenize = Callable[[str], Tokens]


def at_least(least: int) -> Callable[[str], int]:
    """Return an argparse type: a whole number of at least `least`."""

    def number(text: str) -> int:
        if int(text) < least:
            raise ArgumentTypeError(f"is {text}; expected at least {least}")
        return int(text)

    return number


def read_prompts(
    path: Path, tokenize: Tokenize | None, render: Callable[[list[Any]], Tokens] | None = None
) -> list[Tokens]:
    """Return the prompts of a file: one text per line; of a .jsonl file, texts and objects.

    Raises ValueError if a line is no prompt, or needs a tokenizer, or a template to `render` messages, and has none.
    """
    lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path} has no prompts; expected one per line")
    is_json = path.suffix == ".jsonl"
    return [_prompt(f"{path}, prompt {i}", line, is_json, tokenize, render) for i, line in enumerate(lines, 1)]


def _prompt(
    where: str, line: str, is_json: bool, tokenize: Tokenize | None, render: Callable[[list[Any]], Tokens] | None
) -> Tokens:
    try:
        entry = json.loads(line) if is_json else line
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    match entry if isinstance(entry, dict) else {"prompt": entry}:
        case {"token_ids": [_, *_] as ids} if all(type(token) is int and token >= 0 for token in ids):
            return tuple(ids)
        case {"messages": [_, *_] as turns}:
            for i, turn in enumerate(turns):
                fields = [turn.get(name) for name in ("role", "content")] if isinstance(turn, dict) else [None]
                if not all(isinstance(text, str) for text in fields):
                    raise ValueError(f"{where}: messages[{i}] needs a role and a content that are strings")
            if render is None:
                raise ValueError(f"{where} has messages, and no chat template renders them here")
            return render(turns)
        case {"prompt": str(text)}:
            if tokenize is None:
                raise ValueError(f"{where} is text, and there is no tokenizer; expected JSON lines with `token_ids`")
            if tokens := tokenize(text):
                return tokens
            raise ValueError(f"{where} is empty; expected at least one token")
    raise ValueError(f"{where} is {line[:80]!r}; expected a text `prompt`, a list `token_ids` or `messages`")
