"""Calls that are read in steps: a generator takes one part of a call after the other, and yields where it waits."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Generator, Sequence
from typing import TypeAlias, TypeVar

from server.formats.base import ChatFormat, JsonEnd, Tool
from server.formats.reasoning import TextParser

_T = TypeVar("_T")
Steps: TypeAlias = Generator[None, None, _T]

_NAME, _ARGUMENTS, _IGNORED = '"name"', ('"arguments"', '"parameters"'), ('"id"', '"type"')


class CallParser(TextParser):
    """Reads calls with a generator. At the end of the text its steps find nothing more, and it ends.

    Args:
        chat_format: whose marks and tokens the text has.
        tools: the functions of which the names are calls.
        openings: the markers of which each may begin a call; without tools none does.
        starts_in_reasoning: whether the mark that begins the reasoning stands before the text.
    """

    def __init__(
        self, chat_format: ChatFormat, tools: Sequence[Tool], openings: Sequence[str], *, starts_in_reasoning: bool
    ) -> None:
        super().__init__(chat_format, openings if tools else (), starts_in_reasoning=starts_in_reasoning)
        self._names = tuple(tool.name for tool in tools)
        escapes = (True, False)
        self._written = {json.dumps(name, ensure_ascii=escape): name for name in self._names for escape in escapes}
        self._steps: Steps[None] = self._run("")

    def _open(self, marker: str) -> None:
        self._steps, self._step = self._run(marker), self._advance

    def _advance(self) -> bool:
        return next((False for _ in self._steps), True)

    def _run(self, marker: str) -> Steps[None]:
        num_before = self._num_calls
        is_read = yield from self._call(marker)
        if self._scanner.is_over and self._num_calls > num_before:
            self._scanner.take(len(self._scanner.held))  # the beginning of something that belongs to the call
            is_read = True
        if is_read:
            self._end_call()
        else:
            self._no_call()

    @abstractmethod
    def _call(self, marker: str) -> Steps[bool]:
        """Read calls after a marker; return whether all that was taken since the last `_start_call` belongs to them."""

    # Steps

    def _expect(self, *markers: str) -> Steps[str]:
        """Take that of `markers` with which the text goes on; "" if with none."""
        while (found := self._accept(*markers)) is None:
            yield
        return found

    def _space(self) -> Steps[None]:
        """Take white space."""
        while not self._skip_space():
            yield

    def _sees(self, marker: str) -> Steps[bool]:
        """Whether the text goes on with `marker`, which stays."""
        while (found := self._scanner.starts_with(marker)) is None:
            yield
        return found

    def _json_arguments(self) -> Steps[None]:
        """Pass on a JSON value as the arguments of the call."""
        end = JsonEnd()
        while (text := (yield from self._value_part(end))) and not end.is_over:
            self._add_arguments(text)
        self._add_arguments(text)

    def _value_part(self, end: JsonEnd) -> Steps[str]:
        """Take more of a JSON value; "" if the text or the value is over."""
        while self._scanner.is_waiting and not end.is_over:
            yield
        return self._scanner.take_value(end)

    def _json_call(self) -> Steps[bool]:
        """Read an object with the name and the arguments of a call; return whether all that was taken belongs to it."""
        name = early = mark = ""
        yield from self._expect("{")
        while key := (yield from self._key()):
            if key == _NAME and not name:
                written = yield from self._expect(*self._written)
                name = self._written.get(written, "")
                if name and early:
                    self._start_call(name)
                    self._add_arguments(early)
                    return (yield from self._rest_of_object())
            elif key in _ARGUMENTS and not early and (yield from self._sees("{")):
                if name:
                    self._start_call(name)
                    yield from self._json_arguments()
                    return (yield from self._rest_of_object())
                early = yield from self._kept_value()
            elif key in _IGNORED:
                yield from self._kept_value()
            else:
                break
            yield from self._space()
            mark = yield from self._expect(",", "}")
            if mark != ",":
                break
        return self._call_without_arguments(name, is_closed=mark == "}")

    def _key(self) -> Steps[str]:
        """Take the name of a member, and the colon; "" if it is none of a call's."""
        yield from self._space()
        key = yield from self._expect(_NAME, *_ARGUMENTS, *_IGNORED)
        yield from self._space()
        colon = yield from self._expect(":")
        yield from self._space()
        return key if colon else ""

    def _kept_value(self) -> Steps[str]:
        """Take a JSON value."""
        first, end = len(self._raw), JsonEnd()
        while text := (yield from self._value_part(end)):
            self._raw.append(text)
        return "".join(self._raw[first:])

    def _call_without_arguments(self, name: str, *, is_closed: bool = False) -> bool:
        """What could not be read on is a call if the text has ended after its name, or the call without arguments."""
        if not name or not (is_closed or self._scanner.is_over):
            return False
        self._start_call(name)
        self._add_arguments("{}" if is_closed else "")
        return True

    def _rest_of_object(self) -> Steps[bool]:
        """Take what follows the arguments in the object of a call."""
        while True:
            yield from self._space()
            mark = yield from self._expect("}", ",")
            if mark == "}":
                self._raw = []
                return True
            if not mark or (yield from self._key()) not in _IGNORED:
                return False
            yield from self._kept_value()
