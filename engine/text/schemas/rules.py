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

from engine.text.schemas.branches import Branches
from engine.text.schemas.keywords import JSON, Branch, Document, Keywords, Schema, values_of
from engine.text.schemas.numbers import Bound, NumberSet
from engine.text.schemas.patterns import escaped, json_text, texts
from engine.text.schemas.terminals import Texts, is_empty

MAX_WHITESPACE = 64  # so that a small model cannot write spaces for ever
_MAX_STATES = 2_000  # of an object whose properties are counted
_MAX_CLASSES = 64  # of the names that match some of the patterns
_QUESTION, _NAME = 100, 4  # parts: what it costs to ask whether a terminal is empty, and whether a name fits
_STRING = f'/"{JSON.any}*"/'
_SPACES = rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE}}}"
_OPTIONS = {"x-guidance": {"whitespace_pattern": _SPACES}}  # as ours, so that the library joins the lexers
_HEAD = f'%llguidance {{"ignore_once": true}}\n%ignore /{_SPACES}/\n'

log = logging.getLogger(__name__)


def schema_rule(schema: Schema, root: Schema | None = None, *, lenient: bool = False) -> str:
    """A JSON Schema as the right-hand side of a Lark rule.

    Args:
        schema: what `documents.parsed` has read.
        root: the document that references are looked up in; None: the schema itself.
        lenient: a keyword that would be refused is ignored, with a line in the log.

    Raises:
        ValueError: the schema is wrong, cannot be followed exactly, or no document is valid under it.
    """
    keywords = Keywords(Document(schema if root is None else root), is_lenient=lenient)
    text = _SchemaRules(keywords).text(schema)
    for keyword, problem in keywords.ignored.items():
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
        if rest == NumberSet(low=low, high=high, step=Fraction(rest.get("multipleOf", 1))).library_schema():
            return True
    raise ValueError("x-guidance in a schema is not supported")


class _Unsatisfiable(Exception):
    """A rule that another one counted on matches nothing: all is written again."""


class _SchemaRules:
    def __init__(self, keywords: Keywords) -> None:
        self._keywords, self._branches = keywords, Branches(keywords)
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
        try:
            start = self.value([schema])
            self._check_one_ofs()
        except _Unsatisfiable:
            self._clear()
            return self.text(schema)
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

    def _check_one_ofs(self) -> None:
        """`oneOf` is `anyOf` where no value satisfies two of its schemas."""
        done = set[int]()
        while waiting := self._branches.one_ofs.keys() - done:
            for key in waiting:
                done.add(key)
                schema, (rest, *options) = self._branches.one_ofs[key]
                for (i, one), (j, other) in combinations(enumerate(options), 2):
                    if self.value([rest, one, other]) is not None:
                        self._keywords.refuse("oneOf", f"has schemas that may be valid together: {i} and {j}", schema)
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
            self._branches.keep(list(apply.values()))
            self._names[key] = f"v{len(self._names)}"
            self._open.add(key)
            found = self._alternatives(self._branches.of(apply.values()))
            self._open.discard(key)
            if found is None:
                self._nowhere = self._nowhere or next(
                    filter(None, map(self._keywords.document.place, apply.values())), ""
                )
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
            for kind in self._keywords.types(branch):
                self._branches.count()
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

    def _null(self, branch: Branch) -> str | None:
        return "/null/"

    def _boolean(self, branch: Branch) -> str | None:
        values = values_of(branch, [True, False])
        return f"/{'|'.join(json.dumps(value) for value in values)}/" if values else None

    def _number(self, branch: Branch) -> str | None:
        found = NumberSet()
        for part in branch:
            further = self._keywords.numbers(part)
            try:
                found &= further
            except ValueError as problem:
                self._keywords.refuse("multipleOf", str(problem), part)
        try:
            return found.terminal()
        except ValueError as endings:
            try:
                return self._rule(f"%json {json.dumps(found.library_schema() | _OPTIONS)}")
            except ValueError as problem:
                self._keywords.refuse("multipleOf", f"{endings}; {problem}", *branch[:1])
                return found.without_step().terminal()

    # --------------------------------------------------------------------------------------------------- strings

    def _string(self, branch: Branch) -> str | None:
        low, high = self._keywords.sizes(branch, "minLength", "maxLength")
        values = values_of(branch, None)
        if high is not None and low > high:
            return None
        found = list(dict.fromkeys(self._keywords.patterns(branch)))
        if None in found:
            return None
        if values is not None:
            values = [value for value in values if low <= len(value) <= (len(value) if high is None else high)]
            if not values:
                return None
            found.insert(0, texts(values, JSON))
        elif low or high is not None:
            found.append(f"{JSON.any}{{{low},{'' if high is None else high}}}")
        terminal = " & ".join(f'/"{one}"/' for one in found) or _STRING
        return None if len(found) > 1 and self._is_empty(terminal) else terminal

    def _is_empty(self, terminal: str) -> bool:
        self._branches.count(_QUESTION)
        return is_empty(terminal)

    # ---------------------------------------------------------------------------------------------------- arrays

    def _array(self, branch: Branch) -> str | None:
        low, high = self._keywords.sizes(branch, "minItems", "maxItems")
        tuples = [self._keywords.items(part) for part in branch]
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
        low, high = self._keywords.sizes(branch, "minProperties", "maxProperties")
        required = dict.fromkeys(name for part in branch for name in self._keywords.required(part))
        named = dict.fromkeys(name for part in branch for name in self._keywords.read(part, "properties", dict, {}))
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
                quoted = json.dumps(f'"{taken[-1]}"', ensure_ascii=False)
                members.append((f'{quoted} ":" {value}', name in required))
        others = self._others(branch, taken)
        return self._members(members, others, low, high, branch)

    def _of_property(self, branch: Branch, name: str) -> Iterator[Schema]:
        """All schemas that apply to a property."""
        for part in branch:
            properties = self._keywords.read(part, "properties", dict, {})
            found = [properties[name]] if name in properties else []
            patterns = self._keywords.read(part, "patternProperties", dict, {})
            found += [schema for pattern, schema in patterns.items() if self._fits(name, pattern, part)]
            yield from found or [part.get("additionalProperties", True)]

    def _fits(self, name: str, pattern: str, part: Schema) -> bool:
        terminal = self._keywords.name_terminal(pattern, part)
        if terminal not in self._names_in and terminal is not None:
            self._names_in[terminal] = Texts(terminal)
        self._branches.count(_NAME)
        return terminal is not None and f'"{json_text(name)}"' in self._names_in[terminal]

    def _others(self, branch: Branch, taken: Sequence[str]) -> str | None:
        """A rule of one member whose name is not declared; None if there must be none."""
        found, without = list[str](), f' & ~/"(?:{"|".join(escaped(name) for name in taken)})"/' if taken else ""
        for names, matched in self._classes(branch):
            value = self.value(self._of_class(branch, matched))
            if value is not None and not (matched and self._is_empty(names + without)):
                found.append(f'{self._terminal(names + without)} ":" {value}')
        return self._rule(" | ".join(found)) if found else None

    def _classes(self, branch: Branch) -> list[tuple[str, frozenset[str]]]:
        """Terminals of names, each with the patterns that its names match: no name is in two of them."""
        found = [(_STRING, frozenset[str]())]
        patterns = {p: part for part in branch for p in self._keywords.read(part, "patternProperties", dict, {})}
        for pattern, part in patterns.items():
            terminal = self._keywords.name_terminal(pattern, part)
            if terminal is None:
                continue
            inside = [(f"{names} & {terminal}", matched | {pattern}) for names, matched in found]
            inside = [(names, matched) for names, matched in inside if not self._is_empty(names)]
            found = [(f"{names} & ~{terminal}", matched) for names, matched in found] + inside
            if len(found) > _MAX_CLASSES:
                raise ValueError(f"patternProperties has more than {_MAX_CLASSES} classes of names")
        return found

    def _of_class(self, branch: Branch, matched: frozenset[str]) -> Iterator[Schema]:
        for part in branch:
            patterns = self._keywords.read(part, "patternProperties", dict, {})
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
            self._keywords.refuse(
                "maxProperties" if high else "minProperties", "makes too many ways to count", *branch[:1]
            )
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
            self._keywords.refuse(
                "minProperties", "is not supported where it needs two names that are not declared", *branch[:1]
            )
            least = 0
        return _repeated(others, least, most, is_first=not written)


_WORD = re.compile(r"[A-Za-z]\w*")
_COMMA = '"," '


def _repeated(item: str, low: int, high: int | None, *, is_first: bool) -> str:
    """Items, as many as are allowed, with a comma before each of them, or before each but the first."""
    most = "" if high is None else high
    if high is not None and high <= 0:
        return ""
    if not is_first:
        return f"({_COMMA}{item}){{{max(0, low)},{most}}}"
    further = f"({_COMMA}{item}){{{max(0, low - 1)},{'' if high is None else high - 1}}}" if high != 1 else ""
    return f"{item} {further}" if low > 0 else f"({item} {further})?"
