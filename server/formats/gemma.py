"""Calls of Gemma 4 and FunctionGemma: arguments in a notation of their own, whose strings stand between marks.

Gemma 4: `<|tool_call>call:f{city:<|"|>Paris<|"|>,days:[1,2]}<tool_call|>`. FunctionGemma:
`<start_function_call>call:f{city:<escape>Paris<escape>,days:[1,2]}<end_function_call>`. One call follows another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from engine.text.schemas.keywords import Document, parsed
from engine.text.schemas.rules import schema_rule
from server.formats.base import ChatFormat, ReasoningMarks, Tool, pattern, quoted
from server.formats.reasoning import CallParser, Steps


class _Marks(NamedTuple):
    begin: str
    end: str
    quote: str


_MARKS: dict[str, _Marks] = {
    "functiongemma": _Marks("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": _Marks("<|tool_call>", "<tool_call|>", '<|"|>'),
}
_WORD = "call:"
_AS_JSON = {"None": "null", "True": "true", "False": "false"}  # as the chat templates write them
_QUOTES = {marks.begin: marks.quote for marks in _MARKS.values()}
_KEY_ENDS = (*":,{}[]", *(mark for marks in _MARKS.values() for mark in marks))  # of one without quotes
_ENDS = {marks.begin: marks.end for marks in _MARKS.values()}


class _GemmaParser(CallParser):
    """Writes arguments as JSON. It also reads JSON."""

    begins = tuple(_QUOTES)
    _end_of_broken = re.compile("|".join(map(re.escape, _ENDS.values())))
    _reads_on_at_openings = False

    def _call(self, marker: str) -> Steps[bool]:
        yield from self._space()
        word = yield from self._expect(_WORD)
        name = yield from self._expect(*self._names)
        if not (word and name and (yield from self._expect("{"))):
            return False
        self._start_call(name)
        return (yield from self._members(_QUOTES[marker])) and (yield from self._ended(_ENDS[marker]))

    def _members(self, quote: str) -> Steps[bool]:
        """Write the arguments after their opening brace; return whether they were complete."""
        self._add_arguments("{")
        closing, separator = ["}"], ""
        while closing:
            yield from self._space()
            if (yield from self._expect(closing[-1])):
                self._add_arguments(closing.pop())
                separator = ", "
                continue
            if separator and not (yield from self._expect(",")):
                return False
            yield from self._space()
            before = separator
            if closing[-1] == "}":
                key = yield from self._key_of(quote)
                if not key:
                    return False
                before += f"{key}: "
            separator = ", "
            opening = yield from self._expect("{", "[", quote)
            if opening == quote:
                self._add_arguments(f'{before}"')
                if not (yield from self._string(quote)):
                    return False
            elif opening:
                self._add_arguments(before + opening)
                closing.append("}" if opening == "{" else "]")
                separator = ""
            elif not (value := (yield from self._scalar())):
                return False
            else:
                self._add_arguments(before + value)
        return True

    def _key_of(self, quote: str) -> Steps[str]:
        """Take the name of a member, and the colon; return the name as JSON, "" if it is none."""
        if (yield from self._expect(quote)):
            text, end = yield from self._until(quote)
            name = json.dumps(text, ensure_ascii=False) if end else ""
        elif (yield from self._sees('"')):
            name = yield from self._value()
        else:
            text, end = yield from self._until(*_KEY_ENDS)
            name = json.dumps(text.strip(), ensure_ascii=False) if text.strip() and end == ":" else ""
            yield from self._space()
            return name
        yield from self._space()
        colon = yield from self._expect(":")
        yield from self._space()
        return name if colon else ""

    def _string(self, quote: str) -> Steps[bool]:
        """Write a string after its opening mark; return whether it was complete."""
        while True:
            text, mark = self._scanner.until(quote)
            self._add_arguments(json.dumps(text, ensure_ascii=False)[1:-1] + ('"' if mark else ""))
            if mark or self._scanner.is_over:
                self._ran_out |= not mark
                return mark is not None
            yield

    def _scalar(self) -> Steps[str]:
        """Take a number, a JSON string or one of the constants; return it as JSON, "" if it is none."""
        if constant := (yield from self._expect(*_AS_JSON)):
            return _AS_JSON[constant]
        return (yield from self._value())


class GemmaFormat(ChatFormat):
    """What Gemma writes. A variant is the model, functiongemma or gemma4. The markers have to be tokens."""

    name = "gemma"
    reads = _GemmaParser
    markers = (*_MARKS["functiongemma"], *_MARKS["gemma4"])
    turns = (
        *("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_function_response>", "<end_function_response>"),
        *("<|turn>", "<turn|>", "<|tool_response>", "<tool_response|>"),
    )

    def __init__(
        self, special: Mapping[str, int] | None = None, reasoning: ReasoningMarks | None = None, variant: str = "gemma4"
    ) -> None:
        super().__init__(special, reasoning, variant)
        self._marks = _MARKS[variant]
        self.trigger = self._marks.begin

    def rest(self, tools: Sequence[Tool], *, several: bool) -> str:
        """As the chat templates write calls, with the properties in the order of their names."""
        begin, end, quote = map(self.literal, self._marks)
        return "\n".join([
            f"rest: call ({begin} call)*" if several else "rest: call",
            f"call: ({' | '.join(f'call_{i}' for i in range(len(tools)))}) {end}",
            *(f"call_{i}: {quoted(_WORD + tool.name)} call_{i}_arguments" for i, tool in enumerate(tools)),
            *(argument_rules(f"call_{i}_arguments", tool, quote) for i, tool in enumerate(tools)),
        ])  # fmt: skip


_Schema = Mapping[str, Any]

_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"})
_ANNOTATIONS |= {"$comment", "$schema", "$id", "$defs", "definitions"}
_SIMPLE = {"type": ["number", "boolean", "null"]}
_NOT_BARE = frozenset(':,{}[]"<>')
_NAME_END = r'[^\s\x00-\x1f:,{}\[\]"<>]'
_ANY_NAME = rf'/{_NAME_END}([^\x00-\x1f:,{{}}\[\]"<>]*{_NAME_END})?/'


def argument_rules(name: str, tool: Tool, quote: str) -> str:
    """Lark rules of which the one of this name matches the arguments of a tool; the names of others begin with it.

    `quote` is the mark around strings, in Lark. Raises ValueError if the schema is wrong.
    """
    root = parsed(tool.parameters)
    return _Converter(name, root, quote, lenient=not tool.strict).rules({"type": "object"} | root)


class _Converter:
    """Writes a rule for every part of a schema that more than one rule needs."""

    def __init__(self, name: str, root: _Schema, quote: str, *, lenient: bool) -> None:
        self._name, self._root, self._quote, self._lenient = name, root, quote, lenient
        self._document = Document(root)
        self._references: dict[str, str] = {}
        self._lines: list[str] = []

    def rules(self, schema: _Schema) -> str:
        top = self._value(schema)
        return "\n".join([f"{self._name}: {top}", *self._lines])

    def _rule(self, body: str) -> str:
        name = f"{self._name}_{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name

    def _value(self, schema: Any) -> str:
        keywords = schema.keys() - _ANNOTATIONS if isinstance(schema, dict) else set()
        if schema is True or (isinstance(schema, dict) and not keywords):
            return self._reference("")
        if keywords == {"$ref"}:
            return self._reference(schema["$ref"])
        if keywords == {"anyOf"}:
            return _one_of(map(self._value, schema["anyOf"]))
        if keywords == {"enum"} or (keywords == {"enum", "type"} and _has_strings(schema)):
            return _one_of(map(self._constant, schema["enum"]))
        return self._typed(schema, keywords)

    def _typed(self, schema: Any, keywords: AbstractSet[str]) -> str:
        kind = schema["type"] if "type" in keywords else None
        if isinstance(kind, list) and len(kind) > 1:
            return _one_of(self._value(schema | {"type": one}) for one in kind)
        if kind == "string" and keywords <= {"type", "minLength", "maxLength"}:
            return self._string(schema)
        if kind == "array" and keywords <= {"type", "items", "minItems", "maxItems"}:
            return self._array(schema)
        if kind == "object" and keywords <= {"type", "properties", "required", "additionalProperties"}:
            return self._object(schema)
        return self._json(schema)

    def _json(self, schema: Any) -> str:
        return schema_rule(schema, self._root, lenient=self._lenient)

    def _reference(self, reference: str) -> str:
        """The rule of what a reference names; of any value for ""."""
        if reference not in self._references:
            rule = self._references[reference] = f"{self._name}_ref_{len(self._references)}"
            body = self._value(self._document.resolved(None, reference)) if reference else self._anything(rule)
            self._lines.append(f"{rule}: {body}")
        return self._references[reference]

    def _anything(self, rule: str) -> str:
        array, members = _listed(rule), _listed(f'{_ANY_NAME} ":" {rule}')
        return f'{self._string({})} | {schema_rule(_SIMPLE)} | "[" {array} "]" | "{{" {members} "}}"'

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quote} {quoted(value) if value else ''} {self._quote}"
        return self._json({"const": value})

    def _string(self, schema: _Schema) -> str:
        fewest, most = int(schema.get("minLength", 0)), schema.get("maxLength", "")
        text = f"/(?s:.{{{fewest},{most and int(most)}}})/" if fewest or most != "" else "/(?s:.*)/"
        return f"{self._quote} {text} {self._quote}"

    def _array(self, schema: _Schema) -> str:
        fewest, most = int(schema.get("minItems", 0)), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        item = self._rule(self._value(schema.get("items", True)))
        further = f"{{{max(0, fewest - 1)},{'' if most is None else int(most) - 1}}}"
        items = item if most == 1 else f'{item} ("," {item}){further}'
        return f'"[" {items} "]"' if fewest else f'"[" ({items})? "]"'

    def _object(self, schema: _Schema) -> str:
        """The members in the order of their names, as in the chat templates, and then others."""
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not properties.keys() >= set(required):
            return self._json(schema)
        after, firsts = self._others(schema)
        is_empty = not required
        for name in sorted(properties, key=str.lower, reverse=True):
            member = self._rule(f"{self._name_of(name)} {self._value(properties[name])}")
            first = f"{member} {after}"
            firsts = [first] if name in required else [first, *firsts]
            after = self._rule(f'("," {member}){"" if name in required else "?"} {after}')
        members = f"({' | '.join(firsts)}){'?' if is_empty else ''}" if firsts else ""
        return f'"{{" {members} "}}"'

    def _others(self, schema: _Schema) -> tuple[str, list[str]]:
        """What matches undeclared members after others, and the ways in which they stand alone."""
        allowed = schema.get("additionalProperties", True)
        if allowed is False:
            return "", []
        declared = "|".join(map(pattern, schema.get("properties", {})))
        terminal = f"{self._name}_{len(self._lines)}".upper()
        self._lines.append(f"{terminal}: {_ANY_NAME}{f' & ~/({declared})/' if declared else ''}")
        other = self._rule(f'{terminal} ":" {self._value(allowed)}')
        after = self._rule(f'("," {other})*')
        return after, [f"{other} {after}"]

    def _name_of(self, name: str) -> str:
        is_bare = name and name == name.strip() and _NOT_BARE.isdisjoint(name)
        return quoted(f"{name}:") if is_bare else f'{self._constant(name)} ":"'


def _one_of(choices: Iterable[str]) -> str:
    return f"({' | '.join(choices)})"


def _listed(item: str) -> str:
    return f'({item} ("," {item})*)?'


def _has_strings(schema: _Schema) -> bool:
    return schema["type"] == "string" and all(isinstance(value, str) for value in schema["enum"])
