"""Text to token ids and back, one token at a time. Knows a tokenizer and nothing of models, requests or networks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from engine.errors import ModelError

TOKENIZER_FILE = "tokenizer.json"


class Codec:
    """A checkpoint's tokenizer. Special tokens have no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # A checkpoint may ask for padding or truncation, which fit training and never one prompt.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, source: str | Path, revision: str | None = None) -> Codec | None:
        """The tokenizer of a local folder or hub id; None if the checkpoint has none and so serves token ids alone."""
        path = find_file(source, TOKENIZER_FILE, revision)
        if path is None:
            return None
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ModelError(f"cannot read the tokenizer {path}: {error}") from error

    def encode(self, text: str, *, bare: bool = False) -> tuple[int, ...]:
        """Token ids of a prompt, with the special tokens that the tokenizer puts around one; bare: without those."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=not bare).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of all of these tokens; bytes that are no UTF-8 become U+FFFD."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)


def find_file(source: str | Path, name: str, revision: str | None = None) -> Path | None:
    """One file of a local folder or hub id; None if it has none of that name."""
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
    """Token by token to text. Bytes of an unfinished character wait for the rest of it.

    A byte-level tokenizer gives exactly what decoding all tokens at once would give. Byte-fallback
    decoders can revise text that is already out, for example `A` once it turns out to stand beside an
    invalid byte; then decoding starts anew at the token that did it, whatever the chunks were.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._stream = DecodeStream(skip_special_tokens=True)
        self._shown: list[int] = []  # the tokens of the last piece: some decoders look back at them
        self._held: list[int] = []  # the tokens since then

    def push(self, token: int) -> str:
        """The text that this token completed, often that of the token itself."""
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
        """The text of the tokens still held back; a truncated character becomes U+FFFD."""
        before, after = self._codec.decode(self._shown), self._codec.decode(self._shown + self._held)
        text = after.removeprefix(before) if after.startswith(before) else self._codec.decode(self._held)
        self._held = []
        return text


class StopMatcher:
    """How much of one stop string the text ends with, after Knuth, Morris and Pratt: one step per character.

    For the stop string "abab" and the text "xaba", `matched` is 3.
    """

    def __init__(self, stop: str) -> None:
        assert stop, "an empty stop string matches everywhere"
        self.stop = stop
        self.matched = 0
        self._fallback = _borders(stop)

    def push(self, char: str) -> bool:
        """Whether the text, with this character, ends with the whole stop string."""
        assert self.matched < len(self.stop), "the text ended with the match"
        self.matched = _extend(self.stop, self._fallback, self.matched, char)
        return self.matched == len(self.stop)

    def go_on(self) -> None:
        """Take a whole match for text like any other; its end may begin the next one."""
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
    """What pushing some tokens brought: the text that each kept token made safe to show, and what stopped it."""

    texts: tuple[str, ...]
    stop: str | None = None

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)

    @property
    def num_tokens(self) -> int:
        """How many of the pushed tokens count; fewer than were pushed only if a stop string completed."""
        return len(self.texts)


class OutputText:
    """The text of one output, cut where a stop string completes, as if tokens came one by one.

    Joined pieces and the final `flush` are the decoded tokens up to the stop string. Held back is only
    what may still change: bytes of an unfinished character, and the longest end of the text that begins
    some stop string. A token that ends the output by its id is not pushed: it has no text. A stop string that
    completes within the first `min_tokens` tokens is text like any other.
    """

    def __init__(self, codec: Codec, stop: Iterable[str] = (), min_tokens: int = 0) -> None:
        self._decoder, self._tokens_too_early = Decoder(codec), min_tokens
        self._matchers = tuple(map(StopMatcher, stop))
        self._held = ""
        self._stopped = False

    def push(self, token_ids: Iterable[int]) -> TextPiece:
        """Take tokens up to the one that completes a stop string."""
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
        """What was held back, once no more tokens come. A truncated character completes no stop string."""
        text = "" if self._stopped else self._held + self._decoder.flush()
        self._held = ""
        return text

    def _match(self) -> str | None:
        """Read the new characters: the stop string completing earliest, ties by list order, cuts the text."""
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
