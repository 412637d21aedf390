"""Calls of gpt-oss, whose answers are messages: each has a header with its channel and its recipient, and a body.

`<|channel|>analysis<|message|>...<|end|>` is reasoning, `<|start|>assistant<|channel|>final<|message|>...` content. So
is a message of the channel `commentary`, unless a function is its recipient, which may also stand before the channel:
`<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>`. The prompt ends
with `<|start|>assistant`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from pilotfish.engine.text.stops import Asides, StopStrings
from pilotfish.server.formats.base import ChatFormat, ReasoningMarks, Tool, Trimmed, arguments_rule, without
from pilotfish.server.formats.reasoning import Parser, Steps

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_END, _RETURN, _CALL = "<|end|>", "<|return|>", "<|call|>"
_MARKERS = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, _END, _RETURN, _CALL)
_ANALYSIS, _NAMESPACE, _RECIPIENT = "analysis", "functions.", "to="
_HEADER_WORDS = ("assistant", _ANALYSIS, "commentary", "final", "json")
_ANSWERS = ("final", f"final {_CONSTRAIN}json")
_ANYTHING = "/(?s:.*)/"


class _HarmonyParser(Parser):
    """Reads messages. Markers are never content; messages of one kind are joined by line breaks."""

    _end_of_broken = re.compile("|".join(map(re.escape, (_END, _RETURN, _CALL))))

    def __init__(self, chat_format: ChatFormat, tools: Sequence[Tool], **how: bool) -> None:
        super().__init__(chat_format, tools, **how)
        self._thoughts, self._answer = _Messages(leading=True), _Messages(leading=False)
        self._text = self._answer

    def _run(self) -> Steps[None]:
        header = _ANALYSIS if self._starts_in_reasoning else ""
        marker = _MESSAGE if header else (yield from self._beginning())
        while marker:
            if marker == _MESSAGE:
                marker = yield from self._body(header.split())
                header = ""
            elif marker in (_START, _CHANNEL, _CONSTRAIN):
                header, marker = yield from self._header()
            else:
                marker = yield from self._pass_on(self._write)

    def _beginning(self) -> Steps[str | None]:
        """Read the text before the first marker: the recipient, or content."""
        space = yield from self._space()
        if (yield from self._sees(_RECIPIENT)):
            return _START
        self._write(space)
        return (yield from self._pass_on(self._write))

    def _header(self) -> Steps[tuple[str, str | None]]:
        """Read a header and the marker after it. Without a body it is a call, or content if it is malformed."""
        parts: list[str] = []
        while (marker := (yield from self._pass_on(parts.append))) in (_CHANNEL, _CONSTRAIN):
            parts.append(" ")
        header = "".join(parts)
        is_over = marker == _CALL or (marker is None and not self._is_cut)
        if is_over and (name := self._called(header.split())):
            self._start_call(name)
            self._add_arguments("{}")
            self._complete_call()
            self._scanner.forget()
        elif marker != _MESSAGE and not all(map(_is_header_word, header.split())):
            self._write(header)
        return header, marker

    def _body(self, header: Sequence[str]) -> Steps[str | None]:
        is_reasoning, name = _ANALYSIS in header, self._called(header)
        if name:
            is_reasoning = False
            self._scanner.mark()
            self._ran_out = False
            if not (yield from self._whole_call(name)) and not self._is_unfinished():
                self._scanner.rewind()
            self._scanner.forget()
        (self._thoughts if is_reasoning else self._answer).begin()
        marker = yield from self._pass_on(self._write_reasoning if is_reasoning else self._write)
        self.is_reasoning = False
        return marker

    def _whole_call(self, name: str) -> Steps[bool]:
        if not (yield from self._call_of(name, *_MARKERS, has_end=False)):
            return False
        yield from self._braces()
        is_whole = bool((yield from self._sees(*_MARKERS))) or self._scanner.is_cut(*_MARKERS)
        if is_whole:
            self._complete_call()
        return is_whole

    def _called(self, header: Sequence[str]) -> str:
        """Return the function that is the recipient of a message; "" if there is none."""
        recipients = (word.removeprefix(_RECIPIENT) for word in header if word.startswith(_RECIPIENT))
        name = next(recipients, "").removeprefix(_NAMESPACE)
        return name if name in self._names else ""

    def _pass_on(self, write: Callable[[str], None]) -> Steps[str | None]:
        """Write the text before the next marker, and take and return the marker; None at the end of the text."""
        while True:
            text, marker = self._scanner.until(*_MARKERS)
            write(text)
            if marker or self._scanner.is_over:
                return marker
            yield

    def _write(self, text: str) -> None:
        self._add_content(self._answer.add(text))

    def _write_reasoning(self, text: str) -> None:
        self._add_reasoning(self._thoughts.add(text))


class HarmonyFormat(ChatFormat):
    """The messages of gpt-oss. The markers must be tokens."""

    name = "harmony"
    reads = _HarmonyParser

    def __init__(self, special: Mapping[str, int] | None = None, *_: object) -> None:
        super().__init__(special, ReasoningMarks(f"{_CHANNEL}{_ANALYSIS}{_MESSAGE}", _END))

    def asides(self, tools: Sequence[Tool], *, starts_in_reasoning: bool = False) -> Asides:
        """Return all but the bodies of messages to the user: headers, reasoning, calls, and with tools commentary."""
        headers = _ANSWERS if tools else (*_ANSWERS, "commentary")
        bodies = StopStrings(f"{header}{_MESSAGE}" for header in headers)
        return Asides((_RECIPIENT,), bodies, StopStrings(_MARKERS), bodies, is_open=starts_in_reasoning)

    def _sequence(self, *, several: bool) -> str:
        """Return calls as the chat template writes them, after the beginning of the first message."""
        return f"call ({self.literal(f'{_END}{_START}assistant')} call)*" if several else "call"

    def _call(self, tool: Tool, shared: dict[str, str]) -> str:
        head = f"{_CHANNEL}commentary {_RECIPIENT}{_NAMESPACE}{tool.name} {_CONSTRAIN}json{_MESSAGE}"
        return f"{self.literal(head)} {arguments_rule(tool)}"

    def calls(self, tools: Sequence[Tool], *, several: bool) -> str:
        """Return calls, in the first message of the answer or a later one."""
        role = self.literal(f"{_START}assistant")
        return f"calls: role? rest\nrole: {role}\n{self.rest(tools, several=several)}"

    def auto(self, tools: Sequence[Tool], *, several: bool, unlike: str | None = None) -> str:
        """Return a final message, or calls with an optional message to the user before them."""
        preamble = f"role? {self.literal(f'{_CHANNEL}commentary{_MESSAGE}')} TEXT {self.literal(_END)}"
        return "\n".join([
            "auto: role? final | preamble? calls",
            f"final: {self.literal(_FINAL)} TEXT",
            f"preamble: {preamble}",
            # Other tokens must not spell the markers: the parser would read an unconstrained call.
            f"TEXT: {_ANYTHING}{without(*_MARKERS)}",
            self.calls(tools, several=several),
        ])  # fmt: skip

    def prefix(self, *, has_reasoned: bool) -> str:
        return self.literal(f"{_START}assistant{_FINAL}" if has_reasoned else _FINAL)


_FINAL = f"{_CHANNEL}final{_MESSAGE}"


def _is_header_word(word: str) -> bool:
    """Whether a word is a header's word, or the beginning of one."""
    return word.startswith(_RECIPIENT) or any(known.startswith(word) for known in (*_HEADER_WORDS, _RECIPIENT))


class _Messages(Trimmed):
    """The text of all messages of one kind, each on a new line."""

    _break = ""

    def begin(self) -> None:
        self.end(keep=False)
        self._break = "" if self._is_empty else "\n"

    def add(self, text: str) -> str:
        if more := super().add(text):
            more, self._break = self._break + more, ""
        return more
