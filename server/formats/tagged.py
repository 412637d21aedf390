"""Calls whose arguments stand one by one between tags, with values as plain text: what such formats share.

A text in which the mark behind a value and the tag that can follow it stand inside of the value cannot be told from one
in which the value ends there. What comes of a value that is cut off is passed on if it is a string.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from server.formats.base import ChatFormat, Parser, Tool, quoted
from server.formats.reasoning import Step, TextParser
from server.formats.value_rules import ValueEnd, value_rules
from server.formats.values import STRING, Parameters

# What a schema may say of all arguments together. They are written one by one, so this cannot be held.
_UNWRITABLE = (
    *("anyOf", "oneOf", "allOf", "not", "if", "const", "enum", "patternProperties", "propertyNames", "minProperties"),
    *("maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """How a call is written. To the parser, white space between tags means nothing.

    Args:
        begin: what begins a call.
        name: what stands before and after the name of the function.
        key: what stands before and after the name of a parameter.
        value: what stands before and after a value.
        end: what ends the parameters, if anything does, and what ends the call.
        is_indented: whether a value has lines of its own: line breaks around it are not part of it.
        line: the line break between tags, in Lark.
    """

    begin: str
    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    end: tuple[str, str]
    is_indented: bool
    line: str

    @property
    def after_value(self) -> tuple[str, ...]:
        """What can follow a value."""
        return tuple(filter(None, (self.key[0], *self.end)))


class TaggedFormat(ChatFormat):
    """A format whose calls have these tags."""

    tags: ClassVar[Tags]

    def parser(self, tools: Sequence[Tool], *, starts_in_reasoning: bool = False) -> Parser:
        """Make a parser of one output."""
        if not tools:
            return TextParser(self, starts_in_reasoning=starts_in_reasoning)
        return _TaggedParser(self, tools, starts_in_reasoning=starts_in_reasoning)

    def rest(self, tools: Sequence[Tool], *, several: bool) -> str:
        """As the chat templates write calls: parameters in the order of the schema."""
        calls = [f"call_{i}" for i in range(len(tools))]
        begin, before_name = self.literal(self.tags.begin), "line " if self.tags.name[0] else ""
        return "\n".join([
            f"rest: function (line {begin} function)*" if several else "rest: function",
            f"function: {before_name}({' | '.join(calls)}) {self._lark(self.tags.end[1])}",
            f"line: {self.tags.line}",
            *(rule for call, tool in zip(calls, tools, strict=True) for rule in self._call_rules(call, tool)),
        ])  # fmt: skip

    def _call_rules(self, rule: str, tool: Tool) -> Iterator[str]:
        parameters, tags = Parameters(tool), self.tags
        schema = parameters.schema
        if found := next((key for key in _UNWRITABLE if key in schema), None):
            parameters.refuse(f"has {found}")
        names = dict.fromkeys([*schema.get("properties", {}), *schema.get("required", ())])
        parts = [f"{rule}_{i}{'' if name in schema.get('required', ()) else '?'}" for i, name in enumerate(names)]
        if "properties" not in schema and schema.get("additionalProperties") is not False:
            parts.append(f"{rule}_any*")
            yield from self._parameter_rules(parameters, None, f"{rule}_any")
        head = f"{self._lark(tags.name[0])} {quoted(tool.name)} {self._lark(tags.name[1])}"
        tail = f"{self._lark(tags.end[0])} line" if tags.end[0] else ""
        yield f"{rule}: {head} line {' '.join(parts)} {tail}"
        for i, name in enumerate(names):
            yield from self._parameter_rules(parameters, name, f"{rule}_{i}")

    def _parameter_rules(self, parameters: Parameters, name: str | None, rule: str) -> Iterator[str]:
        """Rules of a parameter; with None of one that has any name."""
        tags = self.tags
        if name is not None and (tags.key[1] in name or name != name.strip()):
            parameters.refuse(f"has a parameter named {name!r}")
        key = quoted(name) if name is not None else r"/[^<>\s]+/"
        before = f"line {self._lark(tags.value[0])}" if tags.value[0] else ""
        line_break = "\n" if tags.is_indented else ""
        end = ValueEnd(
            line_break=line_break,
            mark=tags.value[1],
            token=self._lark(tags.value[1]) if tags.value[1] in self.special else None,
            followers=tags.after_value,
        )
        yield (
            f"{rule}: {self._lark(tags.key[0])} {key} {self._lark(tags.key[1])} {before}"
            f" {self._lark(line_break)} {rule}_value line"
        )
        yield from value_rules(parameters, name or "", f"{rule}_value", end)

    def _lark(self, marker: str) -> str:
        return self.literal(marker) if marker else ""


class _TaggedParser(TextParser):
    """Reads a call tag by tag. The value of a parameter that is always a string is passed on as it comes."""

    def __init__(self, chat_format: TaggedFormat, tools: Sequence[Tool], *, starts_in_reasoning: bool) -> None:
        self._tags = chat_format.tags
        super().__init__(chat_format, (self._tags.begin,), starts_in_reasoning=starts_in_reasoning)
        end = self._tags.name[1]
        self._names: dict[str, Step] = {f"{tool.name}{end}": partial(self._take_name, tool) for tool in tools}
        self._tool: Tool | None = None
        self._has_started, self._separator = False, "{"  # what stands before the next parameter
        self._key: list[str] = []

    # From the beginning of a call to its first parameter

    def _open(self, marker: str) -> None:
        self._tool, self._has_started, self._separator = None, False, "{"
        self._step = self._begin_name

    def _begin_name(self) -> bool:
        before = self._tags.name[0]
        return self._go({before: self._read_name}) if before else self._read_name()

    def _read_name(self) -> bool:
        return self._go(self._names)

    def _take_name(self, tool: Tool) -> bool:
        self._tool, self._step = tool, self._read_tag
        return True

    def _cut_call(self) -> None:
        if self._tool is None:
            self._no_call()
        elif not self._has_started:
            self._start_call(self._tool.name)

    def _read_tag(self) -> bool:
        return self._go(self._steps())

    def _steps(self) -> dict[str, Step]:
        between, last = self._tags.end
        steps: dict[str, Step] = {self._tags.key[0]: self._begin_key, last: self._end_both}
        return steps | ({between: self._end_arguments} if between else {})

    def _start(self) -> None:
        if not self._has_started:
            assert self._tool is not None, "a call without a name"
            self._has_started, self._parameters = True, Parameters(self._tool)
            self._start_call(self._tool.name)
        self._raw = []

    # A parameter

    def _begin_key(self) -> bool:
        self._start()
        self._key, self._step = [], self._read_key
        return True

    def _read_key(self) -> bool:
        text, marker = self._scanner.until(self._tags.key[1])
        self._key.append(text)
        if marker is None:
            return False
        self._step = self._begin_value if not self._tags.value[0] else self._read_value_tag
        return True

    def _read_value_tag(self) -> bool:
        return self._go({self._tags.value[0]: self._begin_value})

    def _begin_value(self) -> bool:
        name = "".join(self._key)
        self._value = _Value(self._parameters, name, self._separator, is_indented=self._tags.is_indented)
        self._separator, self._raw, self._step = ", ", [], self._read_value
        self._add_arguments(self._value.begin())
        return True

    def _read_value(self) -> bool:
        text, marker = self._scanner.until(self._tags.value[1])
        self._add_arguments(self._value.add(text))
        if marker is not None:
            self._raw, self._step = [marker], self._end_value
        return marker is not None

    def _end_value(self) -> bool:
        """Read on: the mark ends the value before another tag or the end of the text; else it is part of the value."""
        if not self._skip_space() or (found := self._accept(*self._steps())) is None:
            return False
        if found or self._is_cut(*self._steps()):
            self._add_arguments(self._value.end())
            self._step = self._steps().get(found, self._content)
        else:
            self._add_arguments(self._value.add("".join(self._raw)))
            self._step = self._read_value
        self._raw = []
        return True

    # The end of a call

    def _end_arguments(self) -> bool:
        self._start()
        self._add_arguments("{}" if self._separator == "{" else "}")
        self._step = lambda: self._close(self._tags.end[1])
        return True

    def _end_both(self) -> bool:
        self._end_arguments()
        return self._end_call()


class _Value:
    """Writes the value of a parameter as JSON: a string as it comes, another value when it has ended."""

    def __init__(self, parameters: Parameters, name: str, separator: str, *, is_indented: bool) -> None:
        self._parameters, self._name, self._is_indented = parameters, name, is_indented
        self._key = f"{separator}{json.dumps(name, ensure_ascii=False)}: "
        self._is_string = parameters.types(name) == STRING
        self._parts: list[str] = []
        self._has_begun, self._line_break = False, ""  # a line break that may be the last one

    def begin(self) -> str:
        """What stands before the value, if that is a string."""
        return f'{self._key}"' if self._is_string else ""

    def add(self, text: str) -> str:
        """More of the text; return what is certain."""
        if text and self._is_indented:
            if not self._has_begun:
                text = text.removeprefix("\n")
            text = self._line_break + text
            self._line_break = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
            self._has_begun = True
        if self._is_string:
            return json.dumps(text, ensure_ascii=False)[1:-1]
        self._parts.append(text)
        return ""

    def end(self) -> str:
        """What remains of the value, which has ended."""
        return '"' if self._is_string else self._key + self._parameters.json_of(self._name, "".join(self._parts))
