"""Values of arguments that are written as plain text: how they are read, and Lark rules for them.

A lexer takes the longest match. So a string must not begin like JSON that would be valid in its place, and it ends
where its end mark is complete.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from engine.text.schemas.keywords import WITH_INTEGERS, Branch, parsed
from engine.text.schemas.rules import SchemaRules
from server.formats.base import Tool, pattern, quoted
from server.formats.json_text import value_in

_FORMAT = "this model's format of calls"
STRING = frozenset({"string"})
SPACE = " \t\r\n"
_PYTHON = {"True": "true", "False": "false", "None": "null"}  # templates show the calls of the past with these words
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueEnd:
    """The end of a value."""

    line_break: str  # before the mark; may be empty
    mark: str  # the text of the mark
    token: str | None  # the mark in Lark if it is a token, which no text contains
    followers: Sequence[str]  # the mark ends the value only before one of these

    @property
    def lark(self) -> str:
        return quoted(self.line_break + self.mark) if self.token is None else f"{quoted(self.line_break)} {self.token}"


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

    def rule(self, name: str | None, end: ValueEnd) -> str:
        """Return the right-hand side of a Lark rule for a value and its end. Raises ValueError if there is none."""
        types = self.types(name or "")
        value = self._rules.plain(*self._rules.of_property(self._branch, name or ""))
        lines = ["start: text | json" if value.json else "start: text"]
        if not (value.strings or value.others):
            lines[0] = "start: json"
        else:
            banned = [_SPACE + _WRITTEN[kind] for kind in sorted(types & _WRITTEN.keys())]
            banned += [r"[\-0-9](?s:.*)"] if "number" in value.kinds else []  # the lexer cannot distinguish them
            exclusions = "".join(f" & ~/{regex}/" for regex in [*banned, *_early_ends(end)])
            texts = " | ".join([*(string + exclusions for string in value.strings), *value.others])
            if end.token is not None:
                lines += [f"TEXT: ({texts}) {quoted(end.line_break)}" if end.line_break else f"TEXT: {texts}"]
                lines += [f"text: TEXT {end.token}"]
            else:
                lines += [f"TEXT: {texts}", f"text[suffix={quoted(end.line_break + end.mark)}]: TEXT"]
        if value.json:
            lines.append(f"json: {value.json} {end.lark}")
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


def _early_ends(end: ValueEnd) -> Iterator[str]:
    """Yield regexes of texts that contain their end, or that the parser would end earlier."""
    yield rf"(?s:.*){pattern(end.line_break + end.mark)}(?s:.*)"
    if end.line_break:
        yield rf"(?s:.*){pattern(end.mark)}{_SPACE}({'|'.join(map(pattern, end.followers))})(?s:.*)"
