r"""A JSON Schema as rules of Lark.

There is a rule for each set of schemas that apply to one value together, so that references, `allOf` and siblings need
no merging: for an object with the schemas A and B, the property `p` has the schemas of `p` in A and in B.

Every valid document can be generated, in this form: no white space around it, and at most `MAX_WHITESPACE` characters
of it in a row; properties in the order of the schema, then others; only the control characters \b \f \n \r \t, and no
unnecessary escapes; numbers with bounds, `multipleOf` or values without exponent, integers without decimals, values of
`const` and `enum` without trailing zeros; dates without the year 0, times without the second 60, mail addresses without
quotes. A keyword that cannot be enforced exactly is refused.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from itertools import combinations
from typing import TypeVar

from llguidance import LLMatcher, LLTokenizer

from pilotfish.engine.text.matcher import first_line, parser_limits
from pilotfish.engine.text.schemas.branches import Branches
from pilotfish.engine.text.schemas.keywords import JSON, TEXT, Branch, Document, Keywords, Schema, values_of
from pilotfish.engine.text.schemas.numbers import SPACES, NumberSet
from pilotfish.engine.text.schemas.patterns import Alphabet, texts

_LIMITS = parser_limits(initial_lexer_fuel=300_000)  # about 20 ms: a schema may need hundreds of such tests
_NO_WAY_ON = "NoExtensionBias"  # the library's report if neither a byte nor the end is possible
_MAX_STATES = 2_000  # of an object whose properties are counted
_MAX_CLASSES = 64  # of the names that match some of the patterns
_QUESTION, _NAME = 100, 4  # cost in parts of testing whether a terminal is empty, and whether a name matches
_NAME_CHAR, _NAME_END = r'[^\x00-\x1f:,{}\[\]"<>]', r'[^\s\x00-\x1f:,{}\[\]"<>]'
_BARE_NAME = f"{_NAME_END}(?:{_NAME_CHAR}*{_NAME_END})?"  # a rule that needs no parentheses
_HEAD = f'%llguidance {{"ignore_once": true}}\n%ignore /{SPACES}/\n'

_T = TypeVar("_T")
log = logging.getLogger(__name__)


class _Unsatisfiable(Exception):
    """A rule that another one uses matches nothing: all rules are generated again."""


@dataclass(slots=True)
class PlainText:
    """A value written as its text if it is a string, else as JSON.

    Args:
        strings: terminals of unquoted strings.
        others: terminals of other values.
        json: the right-hand side of a rule of non-terminal values; "": there are none.
        kinds: their types.
    """

    strings: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    json: str = ""
    kinds: set[str] = field(default_factory=set)


class SchemaRules:
    """Generates the rules of schemas in one document.

    Args:
        root: the result of `keywords.parsed`, in which references are resolved.
        lenient: ignore unsupported keywords, with a log line.
        quote: a token around strings, in Lark. Then documents are not JSON: names are unquoted if possible and sorted,
        and there is no white space. Empty: JSON.
    """

    def __init__(self, root: Schema, *, lenient: bool = False, quote: str = "") -> None:
        self.keywords = Keywords(Document(root), is_lenient=lenient, alphabet=TEXT if quote else JSON)
        self.branches = Branches(self.keywords)
        self._alphabet, self._quote = self.keywords.alphabet, quote
        self._nowhere = ""  # the JSON pointer of the first unsatisfiable schema
        self._names_in: dict[str, LLMatcher] = {}
        self._empty: set[tuple[int, ...]] = set()  # sets of schemas that no value satisfies
        self._apart: set[int] = set()  # schemas with `oneOf` that were checked

    def _clear(self) -> None:
        self._names: dict[tuple[int, ...], str | None] = {}
        self._open: set[tuple[int, ...]] = set()
        self._assumed: set[tuple[int, ...]] = set()
        self._lines: dict[str, str] = {}  # by their names
        self._shared: dict[str, str] = {}  # names by their content
        self._terminals: dict[str, str] = {}

    def text(self, *schemas: Schema) -> str:
        """The values that satisfy the root schema, as the right-hand side of a Lark rule.

        Raises:
            ValueError: a schema is invalid, cannot be enforced exactly, or is unsatisfiable.
        """
        return self._complete(lambda: self._nested(self.value(schemas)))

    def plain(self, *schemas: Schema) -> PlainText:
        """The same values without JSON quotes around strings. Raises ValueError as `text`."""
        return self._complete(lambda: self._plain(self.branches.of(schemas)))

    def _plain(self, branches: list[Branch]) -> PlainText:
        found, rules = PlainText(), list[str]()
        for branch in branches:
            for kind in self.keywords.types(branch):
                body = self._terminal_of(branch, TEXT) if kind == "string" else getattr(self, f"_{kind}")(branch)
                if body is None:
                    continue
                if body.startswith("/"):
                    (found.strings if kind == "string" else found.others).append(body)
                else:
                    rules.append(body)
                    found.kinds.add(kind)
        if rules or not (found.strings or found.others):
            found.json = self._nested(self._rule(" | ".join(rules)) if rules else None)
        return found

    def _complete(self, make: Callable[[], _T]) -> _T:
        """Generate all rules, until none uses one that matches nothing."""
        while True:
            self._clear()
            try:
                found = make()
                self._check_one_ofs()
                break
            except _Unsatisfiable:
                continue
        for keyword, problem in self.keywords.ignored.items():
            log.warning("non-strict schema is only partially enforced: %s %s", keyword, problem)
        self.keywords.ignored.clear()
        return found

    def _nested(self, start: str | None) -> str:
        """The rules that a document needs, as a nested grammar, without those for comparing schemas."""
        if start is None:
            raise ValueError(f"the schema is unsatisfiable: no value is allowed at {self._nowhere or '#'}")
        bodies = self._lines | {name: body for body, name in self._terminals.items()}
        found, waiting = dict[str, None](), [start]
        while waiting:
            name = waiting.pop()
            if name in found:
                continue
            found[name] = None
            waiting += [word for word in _WORD.findall(bodies[name]) if word in bodies]
        head, rules = "" if self._quote else _HEAD, "".join(f"{name}: {bodies[name]}\n" for name in found)
        return f"%lark {{\n{head}start: {start}\n{rules}}}"

    def _check_one_ofs(self) -> None:
        """Check that no value satisfies two schemas of a `oneOf`, which then equals `anyOf`."""
        while waiting := self.branches.one_ofs.keys() - self._apart:
            for key in waiting:
                self._apart.add(key)
                schema, (rest, *options) = self.branches.one_ofs[key]
                for (i, one), (j, other) in combinations(enumerate(options), 2):
                    if self.value([rest, one, other]) is not None:
                        self.keywords.refuse("oneOf", f"has schemas that may be valid together: {i} and {j}", schema)
                        return

    # ---------------------------------------------------------------------------------------------------- values

    def value(self, schemas: Iterable[Schema]) -> str | None:
        """The name of the rule or terminal of values that satisfy all of these schemas; None if there are none."""
        apply = {id(schema): schema for schema in schemas if schema is not True}
        key = tuple(apply)
        if key in self._empty:
            return None
        if key in self._open:
            self._assumed.add(key)
        if key not in self._names:
            self.branches.keep(list(apply.values()))
            self._names[key] = f"v{len(self._names)}"
            self._open.add(key)
            found = self._alternatives(self.branches.of(apply.values()))
            self._open.discard(key)
            if found is None:
                self._nowhere = self._nowhere or next(
                    filter(None, map(self.keywords.document.place, apply.values())), ""
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
            for kind in self.keywords.types(branch):
                self.branches.count()
                found = getattr(self, f"_{kind}")(branch)
                if found is not None:
                    (leaves if found.startswith("/") else rules)[found] = None
        if leaves:
            rules[self._terminal(" | ".join(leaves))] = None
        if not rules:
            return None
        return next(iter(rules)) if leaves and len(rules) == 1 else self._rule(" | ".join(rules))

    def _rule(self, body: str, name: str | None = None) -> str:
        """The name of a rule; `name`: the required name, which others already use."""
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
            further = self.keywords.numbers(part)
            try:
                found &= further
            except ValueError as problem:
                self.keywords.refuse("multipleOf", str(problem), part)
        try:
            return found.terminal()
        except ValueError as endings:
            try:
                return self._rule(f"%json {json.dumps(found.library_schema())}")
            except ValueError as problem:
                self.keywords.refuse("multipleOf", f"{endings}; {problem}", *branch[:1])
                is_integer = found.step is not None and found.step.denominator == 1
                return replace(found, step=Fraction(1) if is_integer else None).terminal()

    # --------------------------------------------------------------------------------------------------- strings

    def _string(self, branch: Branch) -> str | None:
        found = self._terminal_of(branch, self._alphabet)
        return found if found is None or not self._quote else f"{self._quote} {self._terminal(found)} {self._quote}"

    def _terminal_of(self, branch: Branch, alphabet: Alphabet) -> str | None:
        """A terminal of the strings of a branch."""
        low, high = self.keywords.sizes(branch, "minLength", "maxLength")
        values = values_of(branch, None)
        if high is not None and low > high:
            return None
        patterns = dict.fromkeys(self.keywords.patterns(branch, alphabet))
        if None in patterns:
            return None
        found = [*filter(None, patterns)]
        if values is not None:
            values = [value for value in values if low <= len(value) <= (len(value) if high is None else high)]
            if not values:
                return None
            found.insert(0, texts(values, alphabet))
        elif low or high is not None or not found:
            found.append(f"{alphabet.any}{{{low},{'' if high is None else high}}}")
        terminal = " & ".join(map(alphabet.terminal, found))
        return None if len(found) > 1 and self._is_empty(terminal) else terminal

    def _is_empty(self, terminal: str) -> bool:
        """Whether a terminal matches nothing. Raises ValueError if it is invalid or too costly."""
        self.branches.count(_QUESTION)
        matcher = _matcher(terminal)
        matcher.compute_bitmask()
        if matcher.is_error() and matcher.get_error().startswith(_NO_WAY_ON):
            return True
        _check(matcher)
        return False

    # ---------------------------------------------------------------------------------------------------- arrays

    def _array(self, branch: Branch) -> str | None:
        low, high = self.keywords.sizes(branch, "minItems", "maxItems")
        tuples = [self.keywords.items(part) for part in branch]
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
        low, high = self.keywords.sizes(branch, "minProperties", "maxProperties")
        required = dict.fromkeys(name for part in branch for name in self.keywords.required(part))
        named = dict.fromkeys(name for part in branch for name in self.keywords.read(part, "properties", dict, {}))
        members, values = list[tuple[str, bool]](), dict[str, str | None]()
        for name in {**required, **named}:  # the required ones first: if one has no value, the object has none
            values[name] = self.value(self.of_property(branch, name))
            if values[name] is None and name in required:
                return None
        names = [*{**named, **required}]
        for name in sorted(names, key=str.lower) if self._quote else names:
            if (value := values[name]) is not None:
                members.append((f"{self._name(name)} {value}", name in required))
        others = self._others(branch, names)
        return self._members(members, others, low, high, branch)

    def _name(self, name: str) -> str:
        """The name of a member, and the colon, in Lark."""
        written = json.dumps(self._alphabet.string(name), ensure_ascii=False)
        if not self._quote:
            return f'{written} ":"'
        if re.fullmatch(_BARE_NAME, name):
            return f'{written[:-1]}:"'
        return f'{self._quote} {written if name else ""} {self._quote} ":"'

    def of_property(self, branch: Branch, name: str, matched: AbstractSet[str] | None = None) -> Iterator[Schema]:
        """All schemas that apply to a property; `matched`: the patterns that match its undeclared name."""
        for part in branch:
            properties = self.keywords.read(part, "properties", dict, {}) if matched is None else {}
            found = [properties[name]] if name in properties else []
            for pattern, schema in self.keywords.read(part, "patternProperties", dict, {}).items():
                if self._fits(name, pattern, part) if matched is None else pattern in matched:
                    found.append(schema)
            yield from found or [part.get("additionalProperties", True)]

    def _fits(self, name: str, pattern: str, part: Schema) -> bool:
        """Whether a name matches a pattern. Raises ValueError if the pattern is too costly."""
        terminal = self.keywords.name_terminal(pattern, part)
        self.branches.count(_NAME)
        if terminal is None:
            return False
        if terminal not in self._names_in:
            self._names_in[terminal] = _matcher(terminal)
        matcher, tokens = self._names_in[terminal].deep_copy(), list(self._alphabet.string(name).encode())
        found = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        _check(matcher)
        return found

    def _others(self, branch: Branch, taken: Sequence[str]) -> str | None:
        """A rule of one undeclared member; None if undeclared members are forbidden."""
        found, without = list[str](), ""
        if taken:
            without = f" & ~{self._alphabet.terminal(texts(taken, self._alphabet))}"
        for names, matched in self._classes(branch):
            value = self.value(self.of_property(branch, "", matched))
            if value is not None and not (matched and self._is_empty(names + without)):
                found.append(f'{self._terminal(names + without)} ":" {value}')
        return self._rule(" | ".join(found)) if found else None

    def _classes(self, branch: Branch) -> list[tuple[str, frozenset[str]]]:
        """Disjoint terminals of names, each with the patterns that its names match."""
        found = [(self._alphabet.terminal(_BARE_NAME if self._quote else f"{JSON.any}*"), frozenset[str]())]
        patterns = {p: part for part in branch for p in self.keywords.read(part, "patternProperties", dict, {})}
        for pattern, part in patterns.items():
            terminal = self.keywords.name_terminal(pattern, part)
            if terminal is None:
                continue
            inside = [(f"{names} & {terminal}", matched | {pattern}) for names, matched in found]
            inside = [(names, matched) for names, matched in inside if not self._is_empty(names)]
            found = [(f"{names} & ~{terminal}", matched) for names, matched in found] + inside
            if len(found) > _MAX_CLASSES:
                raise ValueError(f"patternProperties has more than {_MAX_CLASSES} classes of names")
        return found

    def _members(
        self, members: Sequence[tuple[str, bool]], others: str | None, low: int, high: int | None, branch: Branch
    ) -> str | None:
        """An object with these members, required or optional, followed by others.

        `states[n]` is the rule for the rest after n, or at least n, members.
        """
        if low <= sum(is_required for _, is_required in members):
            low = 0
        most = max(1, min(len(members), max(low, high or 0)))
        if len(members) * most > _MAX_STATES and most > 1:
            self.keywords.refuse(
                "maxProperties" if high else "minProperties", "needs too many rules to count properties", *branch[:1]
            )
            low, high, most = 0, None, 1
        states = [self._last(n, others, low, high, branch) for n in range(most + 1)]
        for member, is_required in reversed(members):
            after = [states[min(n + 1, most)] if high is None or n < high else None for n in range(most + 1)]
            states = [self._state(n, member, None if is_required else states[n], after[n]) for n in range(most + 1)]
        return None if states[0] is None else f'"{{" {states[0]} "}}"'

    def _state(self, written: int, member: str, skipped: str | None, taken: str | None) -> str | None:
        if taken is None:
            return skipped
        taken = f"{_COMMA if written else ''}{member} {taken}"
        if skipped is None:
            return self._rule(taken) if len(taken) > 2000 else taken
        return self._rule(f"{taken} | {skipped}") if skipped else f"{self._rule(taken)}?"

    def _last(self, written: int, others: str | None, low: int, high: int | None, branch: Branch) -> str | None:
        """The rest after the declared members: undeclared ones, as many as required and allowed."""
        least, most = max(0, low - written), None if high is None else high - written
        if most is not None and (most < 0 or least > most):
            return None
        if others is None:
            return "" if not least else None
        if least > 1:  # a repeated name counts as one property
            self.keywords.refuse("minProperties", "is not supported if it requires two undeclared names", *branch[:1])
            least = 0
        return _repeated(others, least, most, is_first=not written)


_WORD = re.compile(r"[A-Za-z]\w*")
_COMMA = '"," '


def _repeated(item: str, low: int, high: int | None, *, is_first: bool) -> str:
    """Items within the allowed numbers, with a comma before each, or before each but the first."""
    most = "" if high is None else high
    if high is not None and high <= 0:
        return ""
    if not is_first:
        return f"({_COMMA}{item}){{{max(0, low)},{most}}}"
    further = f"({_COMMA}{item}){{{max(0, low - 1)},{'' if high is None else high - 1}}}" if high != 1 else ""
    return f"{item} {further}" if low > 0 else f"({item} {further})?"


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


def _matcher(terminal: str) -> LLMatcher:
    source = LLMatcher.grammar_from_lark(f"start: T\nT: {terminal}\n")
    matcher = LLMatcher(_bytes(), source, log_level=0, limits=_LIMITS)
    _check(matcher)
    return matcher


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise ValueError(first_line(matcher.get_error()))
