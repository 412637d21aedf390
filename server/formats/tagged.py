"""Calls whose arguments are written one by one between tags, with values as plain text.

Such formats are ambiguous: a value ends at its end mark followed by a tag, even if both were meant as part of it. The
beginning of an unfinished value is passed on if it is a string.

A lexer takes the longest match. So a string must not begin like JSON that would be valid in its place, and it ends
where its end mark is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from pilotfish.engine.text.schemas.keywords import WITH_INTEGERS, Branch, parsed
from pilotfish.engine.text.schemas.patterns import escaped
from pilotfish.engine.text.schemas.rules import SchemaRules
from pilotfish.server.formats.base import ChatFormat, Tool, quoted
from pilotfish.server.formats.json_text import value_in
from pilotfish.server.formats.reasoning import Parser, Steps

_FORMAT = "this model's format of calls"
STRING = frozenset({"string"})
SPACE = " \t\r\n"
_PYTHON = {"True": "true", "False": "false", "None": "null"}  # templates render past calls with these words
# Keywords about all arguments together, which cannot be enforced because arguments are written one by one.
_UNWRITABLE = ("minProperties", "maxProperties", "patternProperties")
_SPACE = r"[ \t\r\n]*"
_WRITTEN = {  # texts that are not strings if this type is allowed, too
    "object": r"\{(?s:.*)",
    "array": r"\[(?s:.*)",
    "integer": rf"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+\-]?[0-9]+)?{_SPACE}",  # as all numbers
    "boolean": f"([tT]rue|[fF]alse){_SPACE}",
    "null": f"(null|None){_SPACE}",
}


class _TaggedParser(Parser):
    """Reads a call tag by tag. The value of a parameter that is always a string is passed on immediately."""

    _reads_on_at_openings = False

    def __init__(self, chat_format: TaggedFormat, tools: Sequence[Tool], **how: bool) -> None:
        self._tags = tags = chat_format
        self.begins = (tags.trigger,)
        super().__init__(chat_format, tools, **how)
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
            tag = yield from self._value_of(_Value(parameters, name, separator, self._tags.line_break))
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
        line_break: around a value, but no part of it; may be empty.
        line: the line break between tags, in Lark.
    """

    around_name: ClassVar[tuple[str, str]]
    around_key: ClassVar[tuple[str, str]]
    around_value: ClassVar[tuple[str, str]]
    ends: ClassVar[tuple[str, str]]
    line_break: ClassVar[str]
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
        value = shared.setdefault(parameters.rule(name, self), f"value_{len(shared)}")
        begin = f"{self.literal(self.around_key[0])} {key} {self.literal(self.around_key[1])}"
        return f"{begin} {before} {self.literal(self.line_break)} {value} {self.line}"


class _Value:
    """Writes the value of a parameter as JSON: a string incrementally, another value when it is complete."""

    def __init__(self, parameters: Parameters, name: str, separator: str, line_break: str) -> None:
        self._parameters, self._name, self._line_break = parameters, name, line_break
        self._key = f"{separator}{json.dumps(name, ensure_ascii=False)}: "
        self._is_string = parameters.types(name) == STRING
        self._parts: list[str] = []
        self._has_begun, self._held = False, ""  # a held-back line break, which may be the last one

    def begin(self) -> str:
        """Return the JSON before the value, if that is a string."""
        return f'{self._key}"' if self._is_string else ""

    def add(self, text: str) -> str:
        """Add text; return the JSON that is certain."""
        if text and self._line_break:
            text = self._held + (text if self._has_begun else text.removeprefix(self._line_break))
            self._has_begun, self._held = True, self._line_break if text.endswith(self._line_break) else ""
            text = text.removesuffix(self._line_break)
        if self._is_string:
            return json.dumps(text, ensure_ascii=False)[1:-1]
        self._parts.append(text)
        return ""

    def end(self) -> str:
        """Return the rest of the complete value."""
        return '"' if self._is_string else self._key + self._parameters.json_of(self._name, "".join(self._parts))


class Parameters:
    """The parameters of a tool, with values as plain text without JSON quotes.

    If a parameter must be a string, the text is the string; if it cannot be one, the text is JSON. Otherwise the text
    is JSON if it is a value of an allowed type, and a string if not. So a string that looks like such a value cannot be
    written.
    """

    def __init__(self, tool: Tool) -> None:
        self._tool, self._root = tool, parsed(tool.parameters)
        self._rules = SchemaRules(self._root, lenient=not tool.strict)
        self._types: dict[str, frozenset[str]] = {}

    def types(self, name: str) -> frozenset[str]:
        """Return the types that a parameter may have; `number` always includes `integer`."""
        if name not in self._types:
            branches, found = self._rules.branches, set[str]()
            try:
                for one in branches.of([self._root]):
                    of_value = branches.of(self._rules.of_property(one, name))
                    found.update(*map(self._rules.keywords.allowed, of_value))
            except (ValueError, RecursionError):  # a schema that is not strict may be invalid
                found.clear()
            self._types[name] = frozenset(found) or WITH_INTEGERS  # a forbidden parameter may have any type
        return self._types[name]

    def json_of(self, name: str, text: str) -> str:
        """Return the JSON of the value that was written as `text`."""
        types, written = self.types(name), text.strip(SPACE)
        value = None if types == STRING else value_in(_PYTHON.get(written, written))
        if value is None or _type_of(json.loads(value)) not in types - STRING:
            return json.dumps(text, ensure_ascii=False)
        return value

    def declared(self) -> Mapping[str | None, bool]:
        """Return whether each parameter is required, in order; None stands for undeclared parameters.

        Raises ValueError if the schema has keywords that cannot be enforced.
        """
        branch, keywords = self._branch, self._rules.keywords
        for part in branch:
            for keyword in filter(part.__contains__, _UNWRITABLE):
                keywords.refuse(keyword, f"is not supported in {_FORMAT}", part)
        found: dict[str | None, bool] = {
            name: False for part in branch for name in keywords.read(part, "properties", dict, {})
        }
        found |= {name: True for part in branch for name in keywords.required(part)}
        is_whole = any("properties" in part or part.get("additionalProperties") is False for part in branch)
        return found if is_whole else found | {None: False}

    def rule(self, name: str | None, tags: TaggedFormat) -> str:
        """Return the right-hand side of a Lark rule for a value and its end. Raises ValueError if there is none."""
        types, line_break, mark = self.types(name or ""), tags.line_break, tags.around_value[1]
        is_token = mark in tags.special  # which no text contains
        end = f"{quoted(line_break)} {tags.literal(mark)}" if is_token else quoted(line_break + mark)
        value = self._rules.plain(*self._rules.of_property(self._branch, name or ""))
        lines = ["start: text | json" if value.json else "start: text"]
        if not (value.strings or value.others):
            lines[0] = "start: json"
        else:
            banned = [_SPACE + _WRITTEN[kind] for kind in sorted(types & _WRITTEN.keys())]
            banned += [r"[\-0-9](?s:.*)"] if "number" in value.kinds else []  # the lexer cannot distinguish them
            # Texts that contain their end, or that the parser would end earlier.
            banned.append(rf"(?s:.*){escaped(line_break + mark)}(?s:.*)")
            if line_break:
                followers = "|".join(map(escaped, tags.after_value))
                banned.append(rf"(?s:.*){escaped(mark)}{_SPACE}({followers})(?s:.*)")
            exclusions = "".join(f" & ~/{regex}/" for regex in banned)
            texts = " | ".join([*(string + exclusions for string in value.strings), *value.others])
            if is_token:
                lines += [f"TEXT: ({texts}) {quoted(line_break)}" if line_break else f"TEXT: {texts}"]
                lines += [f"text: TEXT {tags.literal(mark)}"]
            else:
                lines += [f"TEXT: {texts}", f"text[suffix={end}]: TEXT"]
        if value.json:
            lines.append(f"json: {value.json} {end}")
        return "\n".join(["%lark {", *lines, "}"])

    @property
    def _branch(self) -> Branch:
        branches = self._rules.branches.of([self._root])
        if len(branches) != 1:
            self.refuse("has several lists of parameters")
        return branches[0]

    def refuse(self, problem: str) -> NoReturn:
        raise ValueError(f"the schema of {self._tool.name} {problem}, which {_FORMAT} does not support")


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float):
        return "integer" if value % 1 == 0 else "number"
    return {str: "string", int: "integer", list: "array", dict: "object"}.get(type(value), "null")


class GlmFormat(TaggedFormat):
    r"""Calls of GLM 4.5 and later: pairs of a key and a value, one call after another.

    `<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>`; GLM 4.7 writes no line breaks.
    """

    name = "glm"
    trigger = "<tool_call>"
    turns = ("<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "<|endoftext|>")
    around_name = ("", "")
    around_key = ("<arg_key>", "</arg_key>")
    around_value = ("<arg_value>", "</arg_value>")
    ends = ("", "</tool_call>")
    line_break = ""
    line = r'"\n"?'


class QwenCoderFormat(TaggedFormat):
    r"""Calls of Qwen3-Coder and Qwen 3.5: parameters as XML, one call after another.

    `<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>`
    """

    name = "qwen_coder"
    trigger = "<tool_call>"
    turns = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    around_name = ("<function=", ">")
    around_key = ("<parameter=", ">")
    around_value = ("", "</parameter>")
    ends = ("</function>", "</tool_call>")
    line_break = "\n"
    line = r'"\n"'
