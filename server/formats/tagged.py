"""Calls whose arguments are written one by one between tags, with values as plain text.

Such formats are ambiguous: a value ends at its end mark followed by a tag, even if both were meant as part of it. The
beginning of an unfinished value is passed on if it is a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import ClassVar

from server.formats.base import ChatFormat, Tool, quoted
from server.formats.reasoning import Parser, Steps
from server.formats.value_rules import STRING, Parameters, ValueEnd


class _TaggedParser(Parser):
    """Reads a call tag by tag. The value of a parameter that is always a string is passed on immediately."""

    _reads_on_at_openings = False

    def __init__(
        self, chat_format: TaggedFormat, tools: Sequence[Tool], *, starts_in_reasoning: bool, has_structure: bool
    ) -> None:
        self._tags = tags = chat_format
        self.begins = (tags.trigger,)
        super().__init__(chat_format, tools, starts_in_reasoning=starts_in_reasoning, has_structure=has_structure)
        self._tools = {f"{tool.name}{tags.around_name[1]}": tool for tool in tools}
        self._heads = (tags.around_name[0],) if tags.around_name[0] else tuple(self._tools)
        self._next_call: int | None = None  # position of another call in the taken text
        self._end_of_broken = re.compile(tags.ends[1])

    def _length_of_broken(self, taken: str) -> int | None:
        return super()._length_of_broken(taken) if self._next_call is None else self._next_call

    def _call(self, marker: str) -> Steps[bool]:
        self._next_call = None
        before_name = self._tags.around_name[0]
        if before_name and not (yield from self._next(before_name)):
            return False
        name = yield from self._next(*self._tools)
        if not name:
            return False
        tag = yield from self._next(*self._tags.after_value)
        if not tag:
            return False
        self._start_call(self._tools[name].name)
        return (yield from self._parameters(Parameters(self._tools[name]), tag))

    def _parameters(self, parameters: Parameters, tag: str) -> Steps[bool]:
        separator = "{"
        while tag == self._tags.around_key[0]:
            name, key_end = yield from self._until(*self._tags.after_key)
            before_value = self._tags.around_value[0]
            if key_end != self._tags.around_key[1] or (before_value and not (yield from self._next(before_value))):
                return False
            tag = yield from self._value_of(_Value(parameters, name, separator, is_indented=self._tags.is_indented))
            separator = ", "
        if not tag:
            return False
        self._add_arguments("{}" if separator == "{" else "}")
        end = self._tags.ends[1]
        if tag != end and not (yield from self._next(end)) and self._scanner.is_cut(end):
            self._scanner.take_all()
        self._complete_call()
        return True

    def _next(self, *tags: str) -> Steps[str]:
        """Take white space and which of `tags` follows; "" if none does."""
        yield from self._space()
        return (yield from self._expect(*tags))

    def _value_of(self, value: _Value) -> Steps[str]:
        """Take a value up to an end mark that a tag follows, and take the tag; "" if there is no such end.

        Without a grammar, a value that contains the end of a call and the beginning of another one has no end either.
        """
        begin, end = self._tags.trigger, self._tags.ends[1]
        others = () if self._is_early else (begin, end)
        has_ended = False
        self._add_arguments(value.begin())
        while True:
            text, mark = self._scanner.until(self._tags.around_value[1], *others)
            if mark is None and self._scanner.is_over:
                self._ran_out = True
                return ""
            self._add_arguments(value.add(text))
            if mark is None:
                yield
                continue
            has_ended |= mark != begin
            gap = yield from self._space()
            if mark == self._tags.around_value[1]:
                tag = yield from self._expect(*self._tags.after_value)
                if tag or self._scanner.is_cut(*self._tags.after_value):
                    self._add_arguments(value.end())
                    return tag
            elif mark == begin and has_ended and (yield from self._sees(*self._heads)):
                self._next_call = len(self._scanner.taken) - len(mark + gap)
                return ""
            self._add_arguments(value.add(mark + gap))


class TaggedFormat(ChatFormat):
    """The tags of a call. The parser ignores white space between tags.

    Args:
        around_name: the tags before and after the name of the function.
        around_key: the tags before and after the name of a parameter.
        around_value: the tags before and after a value.
        ends: the tags after the parameters ("" for none) and after the call.
        is_indented: whether values are on separate lines, so that the line breaks around them are not part of them.
        line: the line break between tags, in Lark.
    """

    around_name: ClassVar[tuple[str, str]]
    around_key: ClassVar[tuple[str, str]]
    around_value: ClassVar[tuple[str, str]]
    ends: ClassVar[tuple[str, str]]
    is_indented: ClassVar[bool]
    line: ClassVar[str]
    reads = _TaggedParser

    @property
    def after_key(self) -> tuple[str, ...]:
        """The end of a key; the other texts make the call malformed."""
        return (self.around_key[1], "\n", *filter(None, (self.trigger, self.around_value[0], *self.after_value)))

    @property
    def after_value(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.around_key[0], *self.ends)))

    def _sequence(self, *, several: bool) -> str:
        one = f"{self.line if self.around_name[0] else ''} call {self.literal(self.ends[1])}"
        return f"{one} ({self.line} {self.literal(self.trigger)} {one})*" if several else one

    def _call(self, tool: Tool, shared: dict[str, str]) -> str:
        """Return the call as the chat templates write it, from the function's name to the end of the parameters."""
        parameters = Parameters(tool)
        parts = [self.literal(self.around_name[0]), quoted(tool.name), self.literal(self.around_name[1]), self.line]
        parts += [
            f"({self._parameter(parameters, name, shared)}){'' if is_required else '*' if name is None else '?'}"
            for name, is_required in parameters.declared().items()
        ]
        return " ".join([*parts, f"{self.literal(self.ends[0])} {self.line}" if self.ends[0] else ""])

    def _parameter(self, parameters: Parameters, name: str | None, shared: dict[str, str]) -> str:
        """Return a parameter in Lark; None stands for any name."""
        if name is not None and (self.around_key[1] in name or name != name.strip()):
            parameters.refuse(f"has a parameter named {name!r}")
        key = quoted(name) if name is not None else r"/[^<>\s]+/"
        before = f"{self.line} {self.literal(self.around_value[0])}" if self.around_value[0] else ""
        mark, line_break = self.around_value[1], "\n" if self.is_indented else ""
        end = ValueEnd(
            line_break=line_break,
            mark=mark,
            token=self.literal(mark) if mark in self.special else None,
            followers=self.after_value,
        )
        value = shared.setdefault(parameters.rule(name, end), f"value_{len(shared)}")
        begin = f"{self.literal(self.around_key[0])} {key} {self.literal(self.around_key[1])}"
        return f"{begin} {before} {self.literal(line_break)} {value} {self.line}"


class _Value:
    """Writes the value of a parameter as JSON: a string incrementally, another value when it is complete."""

    def __init__(self, parameters: Parameters, name: str, separator: str, *, is_indented: bool) -> None:
        self._parameters, self._name, self._is_indented = parameters, name, is_indented
        self._key = f"{separator}{json.dumps(name, ensure_ascii=False)}: "
        self._is_string = parameters.types(name) == STRING
        self._parts: list[str] = []
        self._has_begun, self._line_break = False, ""  # a held-back line break, which may be the last one

    def begin(self) -> str:
        """Return the JSON before the value, if that is a string."""
        return f'{self._key}"' if self._is_string else ""

    def add(self, text: str) -> str:
        """Add text; return the JSON that is certain."""
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
        """Return the rest of the complete value."""
        return '"' if self._is_string else self._key + self._parameters.json_of(self._name, "".join(self._parts))


class GlmFormat(TaggedFormat):
    r"""Calls of GLM 4.5 and later: pairs of a key and a value, one call after another.

    `<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>`; GLM 4.7 writes no line breaks.
    """

    name = "glm"
    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    trigger = "<tool_call>"
    turns = ("<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "<|endoftext|>")
    around_name = ("", "")
    around_key = ("<arg_key>", "</arg_key>")
    around_value = ("<arg_value>", "</arg_value>")
    ends = ("", "</tool_call>")
    is_indented = False
    line = r'"\n"?'


class QwenCoderFormat(TaggedFormat):
    r"""Calls of Qwen3-Coder and Qwen 3.5: parameters as XML, one call after another.

    `<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>`
    """

    name = "qwen_coder"
    markers = ("<tool_call>", "</tool_call>")
    trigger = "<tool_call>"
    turns = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    around_name = ("<function=", ">")
    around_key = ("<parameter=", ">")
    around_value = ("", "</parameter>")
    ends = ("</function>", "</tool_call>")
    is_indented = True
    line = r'"\n"'
