"""Converts text to token ids and back, one token at a time. Knows a tokenizer, and no model, request or network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.decoders import DecodeStream
from tokenizers.models import BPE

from engine.errors import InvalidRequest, ModelError

TOKENIZER_FILE = "tokenizer.json"
_SHORT = 2000  # characters or tokens: converting more takes longer than a millisecond


class Codec:
    """A checkpoint's tokenizer. Special tokens have no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # A checkpoint may ask for padding or truncation, which are for training and wrong for a single prompt.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.tokenizer = tokenizer
        self._longest = _longest_token(tokenizer)

    @classmethod
    def load(cls, source: str | Path, revision: str | None = None) -> Codec | None:
        """Load the tokenizer of a local folder or hub id; None if there is none: then only token ids can be served."""
        path = find_file(source, TOKENIZER_FILE, revision)
        if path is None:
            return None
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ModelError(f"cannot read the tokenizer {path}: {error}") from error

    def encode(self, text: str, *, bare: bool = False) -> tuple[int, ...]:
        """Token ids of a prompt, with the special tokens that the tokenizer adds, or without them if `bare`."""
        if len(text) <= _SHORT:
            return tuple(self.tokenizer.encode(text, add_special_tokens=not bare).ids)
        # A batch of one, because only batches are encoded without the interpreter's lock.
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=not bare)
        return tuple(encoding.ids)

    def require_room(self, field: str, text: str, most: int) -> None:
        """Refuse a text that is certainly longer than `most` tokens, without encoding it.

        Raises:
            InvalidRequest: `field` is too long.
        """
        if self._longest is None or 4 * len(text) <= most * self._longest:  # a character has at most 4 bytes
            return
        size, limit = len(text.encode(errors="surrogatepass")), most * self._longest
        if size > limit:
            problem = f"has {size} bytes, which are more than {most} tokens; the limit is {limit} bytes"
            raise InvalidRequest.of(field, problem)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of all of these tokens; bytes that are not UTF-8 become U+FFFD."""
        tokens = list(ids)
        if len(tokens) <= _SHORT:
            return self.tokenizer.decode(tokens, skip_special_tokens=True)
        (text,) = self.tokenizer.decode_batch([tokens], skip_special_tokens=True)
        return text


def _longest_token(tokenizer: Tokenizer) -> int | None:
    """Most bytes of text that one token stands for; None where that is not known.

    It is known of byte-pair encodings that have a token for every byte: each byte of a text is part of one token, and
    tokens are spelt with at least one character or byte for each. What is done before must not shorten the text.
    """
    model, vocabulary = tokenizer.model, tokenizer.get_vocab(with_added_tokens=False)
    added = tokenizer.get_added_tokens_decoder().values()
    try:
        steps = [*_steps(tokenizer.normalizer), *_steps(tokenizer.pre_tokenizer)]
    except Exception:  # noqa: BLE001  # a part that is written in Python; the library raises bare Exception
        return None
    is_of_bytes = any(step["type"] == "ByteLevel" for step in steps)
    every = pre_tokenizers.ByteLevel.alphabet() if is_of_bytes else [f"<0x{byte:02X}>" for byte in range(256)]
    is_complete = isinstance(model, BPE) and (is_of_bytes or model.byte_fallback) and vocabulary.keys() >= set(every)
    # A token that takes the white space around it has no longest text.
    if not is_complete or not all(map(_keeps_length, steps)) or any(token.lstrip or token.rstrip for token in added):
        return None
    normal = (lambda text: text) if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str
    spelt = max(map(len, vocabulary)) if is_of_bytes else max(len(token.encode()) for token in vocabulary)
    return max([spelt, *(len(normal(token.content).encode()) for token in added)])


def _steps(part: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, in the words of tokenizer.json."""
    waiting, found = [] if part is None else [json.loads(part.__getstate__())], []
    while waiting:
        step = waiting.pop()
        inner = step.get("normalizers", step.get("pretokenizers"))
        waiting += inner or []
        found += [step] if inner is None else []
    return found


def _keeps_length(step: Mapping[str, Any]) -> bool:
    """Whether what the step returns has at least as many bytes as what it was given."""
    match step:
        case {"type": "ByteLevel" | "Digits" | "Metaspace" | "Prepend"}:
            return True
        case {"type": "Split" | "Punctuation", "behavior": behavior}:
            return bool(behavior != "Removed")
        case {"type": "Replace", "pattern": {"String": before}, "content": after}:
            return len(after.encode()) >= len(before.encode())
    return False


def find_file(source: str | Path, name: str, revision: str | None = None) -> Path | None:
    """The path of one file of a local folder or hub id; None if there is no file of that name."""
    folder = Path(source)
    if folder.is_dir():
        path = folder / name
        return path if path.is_file() else None
    try:
        return Path(hf_hub_download(str(source), name, revision=revision))
    except EntryNotFoundError:
        return None
    except (OSError, ValueError) as error:  # no such repository, no network, no valid name
        raise ModelError(f"{source} is no local folder, and no such checkpoint came from the hub: {error}") from error


class Decoder:
    """Decodes token by token. Bytes of an unfinished character are held back until the character is complete.

    With a byte-level tokenizer the result is exactly that of decoding all tokens at once. Byte-fallback decoders can
    change text that was already returned, for example `A` next to a byte that later proves invalid. Then decoding
    starts again at the token that caused the change, independently of the chunks.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._stream = DecodeStream(skip_special_tokens=True)
        self._shown: list[int] = []  # the tokens of the last returned piece: some decoders need them as context
        self._held: list[int] = []  # the tokens since then

    def push(self, token: int) -> str:
        """Take a token and return the text that it completes, often the text of the token itself."""
        piece = self._step(token)
        self._held.append(token)
        if piece:
            self._shown, self._held = self._held, []
        return piece

    def _step(self, token: int) -> str:
        try:
            return self._stream.step(self._codec.tokenizer, token) or ""
        except Exception as error:  # the tokenizers library raises bare Exception
            if "Invalid prefix" not in str(error):
                raise
        pending = self.flush()
        self._shown, self._stream = [], DecodeStream(skip_special_tokens=True)
        return pending + (self._stream.step(self._codec.tokenizer, token) or "")

    def flush(self) -> str:
        """Return the text of the tokens that are still held back; a truncated character becomes U+FFFD."""
        before, after = self._codec.decode(self._shown), self._codec.decode(self._shown + self._held)
        text = after.removeprefix(before) if after.startswith(before) else self._codec.decode(self._held)
        self._held = []
        return text


class StopMatcher:
    """Tracks how much of one stop string the text ends with (Knuth, Morris and Pratt): one step per character.

    For the stop string "abab" and the text "xaba", `matched` is 3.
    """

    def __init__(self, stop: str) -> None:
        assert stop, "an empty stop string matches everywhere"
        self.stop = stop
        self.matched = 0
        self._fallback = _borders(stop)

    def push(self, char: str) -> bool:
        """Take a character; returns whether the text now ends with the whole stop string."""
        assert self.matched < len(self.stop), "the text ended with the match"
        self.matched = _extend(self.stop, self._fallback, self.matched, char)
        return self.matched == len(self.stop)

    def go_on(self) -> None:
        """Treat a whole match as ordinary text; its end may be the beginning of the next match."""
        if self.matched == len(self.stop):
            self.matched = self._fallback[-1]


def _extend(stop: str, fallback: list[int], matched: int, char: str) -> int:
    while matched and stop[matched] != char:
        matched = fallback[matched - 1]
    return matched + (stop[matched] == char)


def _borders(stop: str) -> list[int]:
    """For each prefix, its longest proper prefix that is also its suffix: "abab" -> [0, 0, 1, 2]."""
    borders = [0]
    for char in stop[1:]:
        borders.append(_extend(stop, borders, borders[-1], char))
    return borders


@dataclass(frozen=True, slots=True)
class TextPiece:
    """The result of pushing tokens: the text that can be returned after each kept token, and the stop string if any."""

    texts: tuple[str, ...]
    stop: str | None = None

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.texts)

    @property
    def num_tokens(self) -> int:
        """The number of kept tokens; it is smaller than the number of pushed tokens only after a stop string."""
        return len(self.texts)


class OutputText:
    """The text of one output, cut where a stop string completes, as if tokens came one by one.

    The joined pieces and the final `flush` are the decoded tokens up to the stop string. Only text that may still
    change is held back: bytes of an unfinished character, and the longest end of the text that begins a stop string.
    A token that ends the output by its id has no text and is not pushed. A stop string that completes within the first
    `min_tokens` tokens is ordinary text.
    """

    def __init__(self, codec: Codec, stop: Iterable[str] = (), min_tokens: int = 0) -> None:
        self._decoder, self._tokens_too_early = Decoder(codec), min_tokens
        self._matchers = tuple(map(StopMatcher, stop))
        self._held = ""
        self._stopped = False

    def push(self, token_ids: Iterable[int]) -> TextPiece:
        """Take tokens, up to the one that completes a stop string, if any."""
        assert not self._stopped, "nothing follows a stop string"
        texts = []
        for token in token_ids:
            self._held += self._decoder.push(token)
            self._tokens_too_early -= 1
            stop = self._match()
            texts.append(self._release())
            if stop is not None:
                return TextPiece(tuple(texts), stop)
        return TextPiece(tuple(texts))

    def flush(self) -> str:
        """Return the text that was held back, after the last token. A truncated character completes no stop string."""
        text = "" if self._stopped else self._held + self._decoder.flush()
        self._held = ""
        return text

    def _match(self) -> str | None:
        """Read the new characters; the stop string that completes first (ties: list order) cuts the text."""
        if not self._matchers:
            return None
        unread = self._num_held()
        for end, char in enumerate(self._held[unread:], unread + 1):
            completed = [matcher.stop for matcher in self._matchers if matcher.push(char)]
            if completed and self._tokens_too_early >= 0:
                self._go_on()
            elif completed:
                self._held, self._stopped = self._held[: end - len(completed[0])], True
                return completed[0]
        return None

    def _go_on(self) -> None:
        for matcher in self._matchers:
            matcher.go_on()

    def _release(self) -> str:
        shown = len(self._held) - (0 if self._stopped else self._num_held())
        text, self._held = self._held[:shown], self._held[shown:]
        return text

    def _num_held(self) -> int:
        return max((matcher.matched for matcher in self._matchers), default=0)
