r"""A JSON Schema as rules of Lark. Knows what the keywords mean, and nothing of tokens.

A rule is made for each set of schemas that apply to one value together, so that references, `allOf` and siblings need
no merging: of an object with the schemas A and B, the property `p` has the schemas that A and B have for `p`.

Every valid document can be written, in these forms: no white space around it, and at most `MAX_WHITESPACE` characters
of it in a row; properties in the order of the schema, then others; of the control characters \b \f \n \r \t alone, and
no escape where a character needs none; numbers with bounds, `multipleOf` or values without exponent, integers without
decimals, values of `const` and `enum` without zeros at the end; dates without the year 0, times without the second 60,
mail addresses without quotes. A keyword that cannot be followed exactly is refused.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import combinations
from typing import Any, NoReturn

from engine.text.schemas.documents import Document, Schema
from engine.text.schemas.formats import patterns_of
from engine.text.schemas.numbers import Bound, Numbers, checked
from engine.text.schemas.patterns import Alphabet, escaped, json_text, searched, texts
from engine.text.schemas.terminals import Texts, is_empty

MAX_WHITESPACE = 64  # so that a small model cannot write spaces for ever
_MAX_SIZE = 2**32 - 2  # of what a keyword counts: the library counts in 32 bits
MAX_PARTS = 20_000  # schemas and branches that are looked at; each takes some 20 us
_MAX_STATES = 2_000  # of an object whose properties are counted
_MAX_CLASSES = 64  # of the names that match some of the patterns
_REFUSED = (
    "contains", "dependencies", "dependentRequired", "dependentSchemas", "if", "not", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties", "uniqueItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_SINCE = {"contains": 6, "if": 7, "propertyNames": 6}  # the draft before which a keyword meant nothing
_ASSERTIONS = frozenset({
    "additionalItems", "additionalProperties", "exclusiveMaximum", "exclusiveMinimum", "format", "items", "maxItems",
    "maxLength", "maxProperties", "maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf",
    "pattern", "patternProperties", "prefixItems", "properties", "required", "type",
})  # fmt: skip
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_WITH_INTEGERS = frozenset({*_TYPES, "integer"})
_VALUES = object()  # a key of our own schemas: the values of one type that `const` or `enum` has

_JSON = Alphabet(is_json=True)
_STRING = f'/"{_JSON.any}*"/'
_SPACES = rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE}}}"
_OPTIONS = {"x-guidance": {"whitespace_pattern": _SPACES}}  # as ours, so that the library joins the lexers
_HEAD = f'%llguidance {{"ignore_once": true}}\n%ignore /{_SPACES}/\n'

log = logging.getLogger(__name__)

Branch = list[Schema]  # schemas that apply together, without those that combine others


def schema_rule(schema: Schema, root: Schema | None = None, *, lenient: bool = False) -> str:
    """A JSON Schema as the right-hand side of a Lark rule.

    Args:
        schema: what `documents.parsed` has read.
        root: the document that references are looked up in; None: the schema itself.
        lenient: a keyword that would be refused is ignored, with a line in the log.

    Raises:
        ValueError: the schema is wrong, cannot be followed exactly, or no document is valid under it.
    """
    rules = _Rules(Document(schema if root is None else root), lenient=lenient)
    text = rules.text(schema)
    for keyword, problem in rules.dropped.items():
        log.warning("a schema that is not strict is not enforced in full: %s %s", keyword, problem)
    return text


def is_library_schema(schema: Schema) -> bool:
    """Whether it is one of those that the library is to compile. ValueError: it has options of the library's own."""
    if not isinstance(schema, dict) or "x-guidance" not in schema:
        return False
    rest = {key: value for key, value in schema.items() if key != "x-guidance"}
    numbers = [value for key, value in rest.items() if key != "type"]
    if schema["x-guidance"] == _OPTIONS["x-guidance"] and all(isinstance(number, Decimal) for number in numbers):
        low, high = (Bound(rest[key]) if key in rest else None for key in ("minimum", "maximum"))
        if rest == Numbers(low=low, high=high, step=Fraction(rest.get("multipleOf", 1))).library_schema():
            return True
    raise ValueError("x-guidance in a schema is not supported")


class _Unsatisfiable(Exception):
    """A rule that another one counted on matches nothing: all is written again."""


class _Rules:
    def __init__(self, document: Document, *, lenient: bool) -> None:
        self._document, self._lenient = document, lenient
        self.dropped: dict[str, str] = {}
        self._parts = 0
        self._branches_of: dict[int, list[Branch]] = {}
        self._kept: list[Any] = []  # keys are ids, so what they name must stay
        self._one_ofs: dict[int, tuple[Schema, list[Schema]]] = {}
        self._nowhere = ""  # the first place where no value is valid
        self._names_in: dict[str, Texts] = {}
        self._empty: set[tuple[int, ...]] = set()  # sets of schemas that no value satisfies
        self._clear()

    def _clear(self) -> None:
        self._names: dict[tuple[int, ...], str | None] = {}
        self._open: set[tuple[int, ...]] = set()
        self._assumed: set[tuple[int, ...]] = set()
        self._lines: dict[str, str] = {}  # by their names
        self._shared: dict[str, str] = {}  # names by what they stand for
        self._terminals: dict[str, str] = {}

    def text(self, schema: Schema) -> str:
        """All rules, in the braces of a grammar within another one."""
        while True:
            try:
                start = self.value([schema])
                self._check_one_ofs()
                break
            except _Unsatisfiable:
                self._clear()
        if start is None:
            raise ValueError(f"no document is valid under the schema: nothing is at {self._nowhere or '#'}")
        return f"%lark {{\n{_HEAD}start: {start}\n{self._reachable(start)}}}"

    def _reachable(self, start: str) -> str:
        """The rules that a document needs: not those that were made to compare schemas."""
        bodies = self._lines | {name: body for body, name in self._terminals.items()}
        found, waiting = dict[str, None](), [start]
        while waiting:
            name = waiting.pop()
            if name in found:
                continue
            found[name] = None
            waiting += [word for word in _WORD.findall(bodies[name]) if word in bodies]
        return "".join(f"{name}: {bodies[name]}\n" for name in found)

    # -------------------------------------------------------------------------------------------- refusing

    def _refuse(self, keyword: str, problem: str, part: Schema = None) -> None:
        """Refuse a keyword that cannot be followed; if lenient, go on without it."""
        if not self._lenient:
            self._fail(f"{keyword} {problem}", part)
        self.dropped.setdefault(keyword, problem)

    def _fail(self, problem: str, part: Schema) -> NoReturn:
        place = self._document.place(part)
        raise ValueError(f"{problem}{f', at {place}' if place else ''}")

    def _count(self, number: int = 1) -> None:
        self._parts += number
        if self._parts > MAX_PARTS:
            raise ValueError("schema too large")

    def _read(self, part: Schema, keyword: str, kind: type, default: Any) -> Any:
        """The value of a keyword, if it is of its type."""
        value = part.get(keyword, default)
        if value is not default and not isinstance(value, kind):
            self._fail(f"{keyword} has {str(value)[:40]!r}; expected {_KINDS[kind]}", part)
        return value

    def _size(self, part: Schema, keyword: str) -> int | None:
        value = self._read(part, keyword, Decimal, None)
        if value is None:
            return None
        if not 0 <= value <= _MAX_SIZE or value != value.to_integral_value():
            self._fail(f"{keyword} has {str(value)[:40]}; expected an integer from 0 to {_MAX_SIZE}", part)
        return int(value)

    # ------------------------------------------------------------------------------ schemas that apply together

    def _branches(self, schemas: Iterable[Schema], around: tuple[int, ...] = ()) -> list[Branch]:
        """The ways to satisfy all of these schemas: one of the branches is to be satisfied."""
        found: list[Branch] = [[]]
        for schema in schemas:
            further = self._branches_of_one(schema, around)
            self._count(len(found) * len(further))
            found = [[*one, *other] for one in found for other in further]
        return found

    def _branches_of_one(self, schema: Schema, around: tuple[int, ...]) -> list[Branch]:
        if schema is True or schema is False:
            return [[]] if schema else []
        if not isinstance(schema, dict):
            self._fail(f"{str(schema)[:40]!r} is no schema; expected an object, true or false", None)
        if id(schema) in around:
            self._fail("$ref refers to itself", schema)
        if id(schema) not in self._branches_of:
            self._kept.append(schema)
            self._branches_of[id(schema)] = self._split(schema, (*around, id(schema)))
        return self._branches_of[id(schema)]

    def _split(self, schema: dict[str, Any], around: tuple[int, ...]) -> list[Branch]:
        self._count()
        if "$ref" in schema and self._document.draft <= 7:  # which ignores all keywords beside it
            return self._branches([self._document.resolved(schema, schema["$ref"])], around)
        for keyword in _REFUSED:
            if keyword in schema and self._document.draft >= _SINCE.get(keyword, 0) and schema[keyword] is not False:
                self._refuse(keyword, "is not supported", schema)
        own = "properties" if "properties" in schema else next((key for key in schema if key in _ASSERTIONS), None)
        found: list[Branch] = [[]]
        for keyword, value in schema.items():
            if keyword == own:
                further = [[schema]]
            elif keyword in ("allOf", "anyOf", "oneOf"):
                further = self._combined(schema, keyword, around)
            elif keyword == "$ref":
                further = self._branches([self._document.resolved(schema, value)], around)
            elif keyword in ("const", "enum"):
                values = [value] if keyword == "const" else self._read(schema, keyword, list, [])
                further = [[self._keep(one)] for one in _constants(values)]
            else:
                continue
            self._count(len(found) * len(further))
            found = [[*one, *other] for one in found for other in further]
        return found

    def _combined(self, schema: dict[str, Any], keyword: str, around: tuple[int, ...]) -> list[Branch]:
        options = self._read(schema, keyword, list, [])
        if not options:
            self._fail(f"{keyword} is empty", schema)
        if keyword == "allOf":
            return self._branches(options, around)
        if keyword == "oneOf" and not self._lenient:
            rest = {key: value for key, value in schema.items() if key != "oneOf"}
            self._one_ofs.setdefault(id(schema), (schema, [self._keep(rest), *options]))
        return [branch for option in options for branch in self._branches_of_one(option, around)]

    def _keep(self, schema: Schema) -> Schema:
        self._kept.append(schema)
        return schema

    def _check_one_ofs(self) -> None:
        """`oneOf` is `anyOf` where no value satisfies two of its schemas."""
        done = set[int]()
        while waiting := self._one_ofs.keys() - done:
            for key in waiting:
                done.add(key)
                schema, (rest, *options) = self._one_ofs[key]
                for (i, one), (j, other) in combinations(enumerate(options), 2):
                    if self.value([rest, one, other]) is not None:
                        self._refuse("oneOf", f"has schemas that may be valid together: {i} and {j}", schema)
                        return

    # ---------------------------------------------------------------------------------------------------- values

    def value(self, schemas: Iterable[Schema]) -> str | None:
        """The name of the rule or the terminal of values that satisfy all of these schemas; None if there are none."""
        apply = {id(schema): schema for schema in schemas if schema is not True}
        key = tuple(apply)
        if key in self._empty:
            return None
        if key in self._open:
            self._assumed.add(key)
        if key not in self._names:
            self._kept.append(list(apply.values()))
            self._names[key] = f"v{len(self._names)}"
            self._open.add(key)
            found = self._alternatives(self._branches(apply.values()))
            self._open.discard(key)
            if found is None:
                self._nowhere = self._nowhere or next(filter(None, map(self._document.place, apply.values())), "")
            if key in self._assumed:
                if found is None:
                    self._empty.add(key)
                    raise _Unsatisfiable
                self._rule(found, self._names[key])
            else:
                self._names[key] = found
        return self._names[key]

    def _alternatives(self, branches: list[Branch]) -> str | None:
        leaves, rules = dict[str, None](), dict[str, None]()
        for branch in branches:
            for kind in self._types(branch):
                self._count()
                found = getattr(self, f"_{kind}")(branch)
                if found is not None:
                    (leaves if found.startswith("/") else rules)[found] = None
        if leaves:
            rules[self._terminal(" | ".join(leaves))] = None
        if not rules:
            return None
        return next(iter(rules)) if leaves and len(rules) == 1 else self._rule(" | ".join(rules))

    def _rule(self, body: str, name: str | None = None) -> str:
        """The name of a rule; `name`: it has to be this one, which others use already."""
        if name is None and body in self._shared:
            return self._shared[body]
        name = name or f"s{len(self._lines)}"
        self._lines[name] = body
        return self._shared.setdefault(body, name) and name

    def _terminal(self, body: str) -> str:
        return self._terminals.setdefault(body, f"T{len(self._terminals)}")

    def _types(self, branch: Branch) -> Iterator[str]:
        """The types of the values of a branch; an integer is a number with another condition."""
        allowed = set(_WITH_INTEGERS)
        for part in branch:
            given = part.get("type")
            names = given if isinstance(given, list) else [given]
            if "type" in part and not all(isinstance(name, str) and name in _WITH_INTEGERS for name in names):
                self._fail(f"type has {str(given)[:40]!r}, which is no type", part)
            if "type" in part:
                allowed &= {*names, "integer"} if "number" in names else set(names)
        return (kind for kind in _TYPES if kind in allowed or (kind == "number" and "integer" in allowed))

    def _null(self, branch: Branch) -> str | None:
        return "/null/"

    def _boolean(self, branch: Branch) -> str | None:
        values = _values(branch, [True, False])
        return f"/{'|'.join(json.dumps(value) for value in values)}/" if values else None

    def _number(self, branch: Branch) -> str | None:
        found = Numbers()
        for part in branch:
            found &= self._numbers(part)
        try:
            return found.terminal()
        except ValueError as endings:
            try:
                schema = found.library_schema()
            except ValueError as problem:
                raise ValueError(f"{endings}; {problem}") from None
            return self._rule(f"%json {json.dumps(schema | _OPTIONS)}")

    def _numbers(self, part: Schema) -> Numbers:
        """The numbers that a schema allows."""
        low, high = (self._bound(part, *keywords) for keywords in _BOUNDS)
        step = self._decimal(part, "multipleOf")
        if step is not None and not step:
            self._fail("multipleOf is 0", part)
        values = part.get(_VALUES)
        names = part.get("type")
        is_integer = names == "integer" or (isinstance(names, list) and "integer" in names and "number" not in names)
        found = Numbers(low=low, high=high, step=Fraction(abs(step)) if step else None)
        found &= Numbers(step=Fraction(1) if is_integer else None, values=None if values is None else frozenset(values))
        return found

    def _decimal(self, part: Schema, keyword: str) -> Decimal | None:
        value: Decimal | None = self._read(part, keyword, Decimal, None)
        try:
            return None if value is None else checked(value)
        except ValueError as problem:
            self._fail(f"{keyword} {problem}", part)

    def _bound(self, part: Schema, inclusive: str, exclusive: str) -> Bound | None:
        value = self._decimal(part, inclusive)
        if isinstance(part.get(exclusive), bool):  # draft 4
            return None if value is None else Bound(value, part[exclusive])
        other = self._decimal(part, exclusive)
        if value is None or other is None:
            return None if value is other else Bound(value, False) if other is None else Bound(other, True)
        is_open = other >= value if inclusive == "minimum" else other <= value
        return Bound(other if is_open else value, is_open)

    # --------------------------------------------------------------------------------------------------- strings

    def _string(self, branch: Branch) -> str | None:
        low, high = self._sizes(branch, "minLength", "maxLength")
        values = _values(branch, None)
        if high is not None and low > high:
            return None
        found = list(dict.fromkeys(self._patterns(branch)))
        if None in found:
            return None
        if values is not None:
            values = [value for value in values if low <= len(value) <= (len(value) if high is None else high)]
            if not values:
                return None
            found.insert(0, texts(values, _JSON))
        elif low or high is not None:
            found.append(f"{_JSON.any}{{{low},{'' if high is None else high}}}")
        terminal = " & ".join(f'/"{one}"/' for one in found) or _STRING
        return None if len(found) > 1 and is_empty(terminal) else terminal

    def _sizes(self, branch: Branch, least: str, most: str) -> tuple[int, int | None]:
        lows = [size for part in branch if (size := self._size(part, least)) is not None]
        highs = [size for part in branch if (size := self._size(part, most)) is not None]
        return max(lows, default=0), min(highs, default=None)

    def _patterns(self, branch: Branch) -> Iterator[str | None]:
        """Regexes of all patterns and formats of a string."""
        for part in branch:
            if (pattern := self._read(part, "pattern", str, None)) is not None:
                try:
                    yield searched(pattern, _JSON)
                except ValueError as problem:
                    self._refuse("pattern", f"is refused: {problem}", part)
            if (name := self._read(part, "format", str, None)) is not None:
                try:
                    yield from [searched(pattern, _JSON) for pattern in patterns_of(name)]
                except ValueError as problem:
                    self._refuse("format", str(problem), part)

    # ---------------------------------------------------------------------------------------------------- arrays

    def _array(self, branch: Branch) -> str | None:
        low, high = self._sizes(branch, "minItems", "maxItems")
        tuples = [self._items(part) for part in branch]
        places = max((len(first) for first, _ in tuples), default=0)
        firsts, others = list[str](), None
        for i in range(places):
            item = self.value([first[i] if i < len(first) else rest for first, rest in tuples])
            if item is None or (high is not None and len(firsts) >= high):
                high = len(firsts) if high is None else min(high, len(firsts))
                break
            firsts.append(item)
        if high is None or high > len(firsts):
            others = self.value([rest for _, rest in tuples])
            if others is None:
                high = len(firsts)
        if high is not None and low > high:
            return None
        return f'"[" {self._listed(firsts, others, low, high)} "]"'

    def _items(self, part: Schema) -> tuple[Sequence[Schema], Schema]:
        """The schemas of the first items, and of all others."""
        items = part.get("items", True)
        if isinstance(items, list):
            return items, part.get("additionalItems", True)
        if self._document.draft <= 2019 and _VALUES not in part:
            return [], items
        return self._read(part, "prefixItems", list, []), items

    def _listed(self, firsts: Sequence[str], others: str | None, low: int, high: int | None) -> str:
        """Items with commas between them."""
        tail, size = "", len(firsts)
        if others is not None:
            tail = _repeated(others, low - size, None if high is None else high - size, is_first=not size)
        for i in reversed(range(size)):
            tail = f"{_COMMA if i else ''}{firsts[i]} {tail}"
            if i >= low:
                tail = self._rule(tail) + "?"
        return tail

    # --------------------------------------------------------------------------------------------------- objects

    def _object(self, branch: Branch) -> str | None:
        low, high = self._sizes(branch, "minProperties", "maxProperties")
        required = dict.fromkeys(name for part in branch for name in self._required(part))
        named = dict.fromkeys(name for part in branch for name in self._read(part, "properties", dict, {}))
        members, taken = list[tuple[str, bool]](), list[str]()
        values = dict[str, str | None]()
        for name in {**required, **named}:  # the required ones first: one that has no value is the end
            values[name] = self.value(self._of_property(branch, name))
            if values[name] is None and name in required:
                return None
        for name in {**named, **required}:
            value = values[name]
            taken.append(json_text(name))
            if value is not None:
                members.append((f'{_quoted(taken[-1])} ":" {value}', name in required))
        others = self._others(branch, taken)
        return self._members(members, others, low, high, branch)

    def _required(self, part: Schema) -> list[str]:
        names: list[str] = self._read(part, "required", list, [])
        if wrong := [name for name in names if not isinstance(name, str)]:
            self._fail(f"required has {str(wrong[0])[:40]!r}; expected names", part)
        return names

    def _of_property(self, branch: Branch, name: str) -> Iterator[Schema]:
        """All schemas that apply to a property."""
        for part in branch:
            properties = self._read(part, "properties", dict, {})
            found = [properties[name]] if name in properties else []
            patterns = self._read(part, "patternProperties", dict, {})
            found += [schema for pattern, schema in patterns.items() if self._fits(name, pattern, part)]
            yield from found or [part.get("additionalProperties", True)]

    def _fits(self, name: str, pattern: str, part: Schema) -> bool:
        terminal = self._name_terminal(pattern, part)
        if terminal not in self._names_in and terminal is not None:
            self._names_in[terminal] = Texts(terminal)
        return terminal is not None and f'"{json_text(name)}"' in self._names_in[terminal]

    def _name_terminal(self, pattern: str, part: Schema) -> str | None:
        """The names that match a pattern of `patternProperties`."""
        try:
            regex = searched(pattern, _JSON)
        except ValueError as problem:
            self._refuse("patternProperties", f"is refused: {problem}", part)
            return None
        return None if regex is None else f'/"{regex}"/'

    def _others(self, branch: Branch, taken: Sequence[str]) -> str | None:
        """A rule of one member whose name is not declared; None if there must be none."""
        found, without = list[str](), f' & ~/"(?:{"|".join(escaped(name) for name in taken)})"/' if taken else ""
        for names, matched in self._classes(branch):
            value = self.value(self._of_class(branch, matched))
            if value is not None and not (matched and is_empty(names + without)):
                found.append(f'{self._terminal(names + without)} ":" {value}')
        return self._rule(" | ".join(found)) if found else None

    def _classes(self, branch: Branch) -> list[tuple[str, frozenset[str]]]:
        """Terminals of names, each with the patterns that its names match: no name is in two of them."""
        found = [(_STRING, frozenset[str]())]
        patterns = {p: part for part in branch for p in self._read(part, "patternProperties", dict, {})}
        for pattern, part in patterns.items():
            terminal = self._name_terminal(pattern, part)
            if terminal is None:
                continue
            inside = [(f"{names} & {terminal}", matched | {pattern}) for names, matched in found]
            inside = [(names, matched) for names, matched in inside if not is_empty(names)]
            found = [(f"{names} & ~{terminal}", matched) for names, matched in found] + inside
            if len(found) > _MAX_CLASSES:
                raise ValueError(f"patternProperties has more than {_MAX_CLASSES} classes of names")
        return found

    def _of_class(self, branch: Branch, matched: frozenset[str]) -> Iterator[Schema]:
        for part in branch:
            patterns = self._read(part, "patternProperties", dict, {})
            found = [schema for pattern, schema in patterns.items() if pattern in matched]
            yield from found or [part.get("additionalProperties", True)]

    def _members(
        self, members: Sequence[tuple[str, bool]], others: str | None, low: int, high: int | None, branch: Branch
    ) -> str | None:
        """An object with these members, each of which may be required, and others behind them.

        `states[n]` is what may follow where n members are written, or at least as many.
        """
        if low <= sum(is_required for _, is_required in members):
            low = 0
        most = max(1, min(len(members), max(low, high or 0)))
        if len(members) * most > _MAX_STATES and most > 1:
            self._refuse("maxProperties" if high else "minProperties", "makes too many ways to count", *branch[:1])
            low, high, most = 0, None, 1
        states = [self._last(n, others, low, high, branch) for n in range(most + 1)]
        for member, is_required in reversed(members):
            states = [
                self._state(n, member, states[n] if not is_required else None, self._after(states, n, high))
                for n in range(most + 1)
            ]
        return None if states[0] is None else f'"{{" {states[0]} "}}"'

    def _after(self, states: Sequence[str | None], written: int, high: int | None) -> str | None:
        if high is not None and written >= high:
            return None
        return states[min(written + 1, len(states) - 1)]

    def _state(self, written: int, member: str, skipped: str | None, taken: str | None) -> str | None:
        if taken is None:
            return skipped
        taken = f"{_COMMA if written else ''}{member} {taken}"
        if skipped is None:
            return self._rule(taken) if len(taken) > 2000 else taken
        return self._rule(f"{taken} | {skipped}") if skipped else f"{self._rule(taken)}?"

    def _last(self, written: int, others: str | None, low: int, high: int | None, branch: Branch) -> str | None:
        """What follows the declared members: others, as many as are needed and allowed."""
        least, most = max(0, low - written), None if high is None else high - written
        if most is not None and (most < 0 or least > most):
            return None
        if others is None:
            return "" if not least else None
        if least > 1:  # a name that comes twice is one property to a reader
            self._refuse(
                "minProperties", "is not supported where it needs two names that are not declared", *branch[:1]
            )
            least = 0
        return _repeated(others, least, most, is_first=not written)


_WORD = re.compile(r"[A-Za-z]\w*")
_COMMA = '"," '
_KINDS = {dict: "an object", list: "an array", str: "a string", Decimal: "a number"}
_BOUNDS = (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))


def _repeated(item: str, low: int, high: int | None, *, is_first: bool) -> str:
    """Items, as many as are allowed, with a comma before each of them, or before each but the first."""
    most = "" if high is None else high
    if high is not None and high <= 0:
        return ""
    if not is_first:
        return f"({_COMMA}{item}){{{max(0, low)},{most}}}"
    further = f"({_COMMA}{item}){{{max(0, low - 1)},{'' if high is None else high - 1}}}" if high != 1 else ""
    return f"{item} {further}" if low > 0 else f"({item} {further})?"


def _quoted(text: str) -> str:
    return json.dumps(f'"{text}"', ensure_ascii=False)


def _values(branch: Branch, default: list[Any] | None) -> list[Any] | None:
    """The values of one type that all parts allow, in their order."""
    sets = [part[_VALUES] for part in branch if _VALUES in part]
    if not sets:
        return default
    return [value for value in sets[0] if all(value in other for other in sets[1:])]


def _constants(values: Sequence[Any]) -> Iterator[Schema]:
    """Schemas one of which each of these values has: all of a simple type together."""
    simple: dict[str, dict[Any, None]] = {}
    for value in values:
        if value is None:
            simple["null"] = {}
        elif isinstance(value, bool):
            simple.setdefault("boolean", {})[value] = None
        elif isinstance(value, Decimal):
            simple.setdefault("number", {})[checked(value)] = None
        elif isinstance(value, str):
            simple.setdefault("string", {})[value] = None
    for kind, found in simple.items():
        yield {"type": kind, _VALUES: found}
    for value in values:
        if isinstance(value, list):
            items, size = [{"const": item} for item in value], Decimal(len(value))
            yield {"type": "array", "items": items, "additionalItems": False, "minItems": size, "maxItems": size}
        elif isinstance(value, dict):
            properties = {name: {"const": one} for name, one in value.items()}
            yield {
                "type": "object", "properties": properties, "required": list(value), "additionalProperties": False,
            }  # fmt: skip
