"""Laws of chat formats: what is written is read again, what masks allow is a valid call, and nothing is lost."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings

from pilotfish.server.formats.base import Tool
from tests.server.formats.laws import FREE, WALKED, Calls, Family, Spelling, check_linear, hostile_texts
from tests.server.formats.test_deepseek import DEEPSEEK
from tests.server.formats.test_gemma import GEMMA
from tests.server.formats.test_glm import GLM
from tests.server.formats.test_harmony import HARMONY
from tests.server.formats.test_hermes import HERMES
from tests.server.formats.test_llama import LLAMA
from tests.server.formats.test_mistral import MISTRAL
from tests.server.formats.test_qwen_coder import QWEN_CODER
from tests.server.formats.walks import Call, Reading, cuts, joined, markers_of, pieces_of, read

FAMILIES = (HERMES, QWEN_CODER, GLM, LLAMA, MISTRAL, GEMMA, DEEPSEEK, HARMONY)
SPELLINGS = [(family, spelling) for family in FAMILIES for spelling in family.spellings]

of_every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
NAMES = ("family", "spelling")
of_every_spelling, of_every_plain_spelling = (
    pytest.mark.parametrize(NAMES, pairs, ids=lambda value: value.name if isinstance(value, Spelling) else "")
    for pairs in (SPELLINGS, [pair for pair in SPELLINGS if not pair[0].has_channels])
)
few_or_many = pytest.mark.parametrize("examples", [4, pytest.param(16, marks=pytest.mark.slow)])


def one_of(family: Family) -> Call:
    name, arguments = family.one
    return Call(name, json.dumps(arguments))


def parsed(reading: Reading) -> Calls:
    return [(call.name, json.loads(call.arguments)) for call in reading.calls]


# ------------------------------------------------------------------------------------------------ written, then read


@few_or_many
@of_every_spelling
def test_rendered_calls_are_allowed_and_parsed(family: Family, spelling: Spelling, examples: int) -> None:
    def are_text(calls: Calls) -> bool:
        """Whether values hold no mark that the tokenizer makes one token of, which masks do not take for text."""
        return not any(
            mark in json.dumps(values, ensure_ascii=False) for _, values in calls for mark in spelling.masks.ids
        )

    @settings(max_examples=examples)
    @given(spelling.calls.filter(are_text))
    def holds(calls: Calls) -> None:
        text = spelling.write(calls)
        for rule in ("calls", "auto"):
            assert spelling.allows(rule, family.tools, text)
            assert spelling.allows(rule, family.tools, text, several=False) == (len(calls) == 1)
        found = read(spelling.format, family.tools, text)
        assert (found.reasoning, found.content, parsed(found)) == ("", "", calls)

    holds()


@few_or_many
@of_every_family
def test_calls_of_any_values_are_read(family: Family, examples: int) -> None:
    @settings(max_examples=examples)
    @given(family.wild)
    def holds(calls: Calls) -> None:
        found = read(family.first.format, family.tools, family.first.write(calls))
        assert (found.reasoning, found.content, parsed(found)) == ("", "", calls)

    holds()


@of_every_spelling
def test_every_parser_of_a_family_reads_every_spelling(family: Family, spelling: Spelling) -> None:
    for other in family.spellings:
        text = other.write([family.one, family.one])
        assert read(spelling.format, family.tools, text) == Reading("", "", [one_of(family)] * 2)


UNFOLLOWED = [  # one keyword that is refused each, beside some that hold all the same
    {"tags": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}},
    {"tags": {"type": "array", "items": {"type": "integer"}, "not": {"const": [1]}}},
    {"tags": {"type": "array", "items": {"type": "integer"}}, "id": {"type": "string", "format": "snowflake"}},
    {"tags": {"type": "array", "items": {"type": "integer"}}, "id": {"type": "number", "multipleOf": 0.3}},
    {"tags": {"type": "array", "items": {"type": "integer"}}, "id": {"type": "string", "pattern": "a(?=b)"}},
]


@pytest.mark.parametrize("schema", UNFOLLOWED, ids=lambda schema: json.dumps(schema)[9:60])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_tool_that_is_not_strict_keeps_the_keywords_that_can_be_followed(
    family: Family, schema: dict[str, Any]
) -> None:
    spelling = family.spellings[0]
    parameters = {"type": "object", "properties": schema, "required": ["tags"], "additionalProperties": False}
    lark = f"start: calls\n{spelling.format.calls([Tool('get', parameters=json.dumps(parameters))], several=True)}"
    assert spelling.masks.accepts(lark, spelling.write([("get", {"tags": [1]})]))
    assert not spelling.masks.accepts(lark, spelling.write([("get", {"tags": ["x"]})]))
    assert not spelling.masks.accepts(lark, spelling.write([("get", {"get": "get"})]))
    with pytest.raises(ValueError, match=r"uniqueItems|not|format|multipleOf|pattern"):
        spelling.format.calls([Tool("get", parameters=json.dumps(parameters), strict=True)], several=True)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_parameter_may_refer_to_another_one(family: Family) -> None:
    spelling = family.spellings[0]
    properties = {
        "of": {"type": "integer", "maximum": 9007199254740993},
        "all": {"type": "array", "items": {"$ref": "#/properties/of"}},
        "one": {"anyOf": [{"$ref": "#/properties/all"}, {"type": "null"}]},
    }
    parameters = json.dumps({"type": "object", "properties": properties, "additionalProperties": False})
    lark = f"start: calls\n{spelling.format.calls([Tool('get', parameters=parameters, strict=True)], several=True)}"
    assert spelling.masks.accepts(lark, spelling.write([("get", {"all": [1, 9007199254740993]})]))
    assert spelling.masks.accepts(lark, spelling.write([("get", {"one": [2]})]))
    assert not spelling.masks.accepts(lark, spelling.write([("get", {"one": ["a"]})]))
    assert not spelling.masks.accepts(lark, spelling.write([("get", {"all": [9007199254740994]})]))


WALKS = [  # families take turns, and their spellings, too
    pytest.param(
        family := FAMILIES[(i + i // len(FAMILIES)) % len(FAMILIES)],
        family.spellings[i % len(family.spellings)],
        i,
        marks=pytest.mark.slow if i % 2 else [],
        id=f"{family.name}-{i}",
    )
    for i in range(len(WALKED))
]


@pytest.mark.parametrize(("family", "spelling", "seed"), WALKS)
def test_a_walk_under_the_masks_is_a_valid_call(family: Family, spelling: Spelling, seed: int) -> None:
    """Random tokens that the masks allow, after a while more and more often the ends of values."""
    schema = WALKED[seed]
    tools = [Tool("get", parameters=json.dumps(schema)), Tool("get_x"), Tool("set")]
    lark = f"start: calls\n{spelling.format.calls(tools, several=True)}"
    text = spelling.masks.walk(lark, random.Random(seed), *family.ends)
    found = joined(pieces_of(spelling.format, tools, [text]))
    assert (found.reasoning, found.content) == ("", ""), text
    assert found.calls, text
    for call in found.calls:
        arguments = json.loads(call.arguments)
        assert isinstance(arguments, dict), text
        if call.name == "get":
            jsonschema.validate(arguments, schema)


# -------------------------------------------------------------------------------------------------- read as it comes


@few_or_many
@of_every_family
def test_hostile_texts_are_read_the_same_in_all_cuts(family: Family, examples: int) -> None:
    chat_format, marks = family.first.format, family.first.format.reasoning
    written = [spelling.after_text + spelling.write([family.one]) for spelling in family.spellings]

    @settings(max_examples=examples)
    @given(
        hostile_texts(
            *markers_of(chat_format), *chat_format.turns[:1], marks.begin, marks.end, *written, *family.hostile
        )
    )
    def holds(text: str) -> None:
        for starts_in_reasoning in (False, True):
            read(chat_format, [*family.tools, Tool("function")], text, starts_in_reasoning=starts_in_reasoning)

    holds()


@of_every_spelling
def test_what_is_read_early_is_not_taken_back(family: Family, spelling: Spelling) -> None:
    marks = markers_of(spelling.format) if family.tools is FREE and not spelling.format.special else ()
    values = {"a": [True, "}", {"b": None}, 'x"\\', *marks], "c": -1.5}
    text = spelling.write([("get", values), family.one, ("get_x", {})])
    whole = joined(pieces_of(spelling.format, family.tools, [text]))
    assert [call.name for call in whole.calls] == ["get", "get", "get_x"]
    assert not whole.content
    for length in token_ends(spelling, text):
        begun = joined(pieces_of(spelling.format, family.tools, [text[:length]], is_cut=True, has_structure=True))
        for call, full in zip(begun.calls, whole.calls[: len(begun.calls)], strict=True):
            assert call.name == full.name, text[:length]
            assert full.arguments.startswith(call.arguments), text[:length]


def token_ends(spelling: Spelling, text: str) -> list[int]:
    """The lengths at which a text can be cut: a token comes as a whole."""
    tokens = [found.span() for mark in spelling.format.special for found in re.finditer(re.escape(mark), text)]
    return [at for at in range(len(text) + 1) if not any(start < at < end for start, end in tokens)]


@of_every_spelling
def test_every_character_of_a_string_is_passed_on_at_once_where_calls_have_a_structure(
    family: Family, spelling: Spelling
) -> None:
    text = spelling.write([("get", {"a": "x" * 50})])
    at = text.index("x" * 50)
    parser = spelling.format.parser(family.tools, has_structure=True)
    pieces = [piece for char in text[:at] for piece in parser.push(char)]
    for length in range(51):
        assert joined(pieces).calls == [Call("get", '{"a": "' + "x" * length)]
        assert parser.is_in_call
        pieces += parser.push(text[at + length])
    pieces += [*parser.push(text[at + 51 :]), *parser.finish()]
    assert not parser.is_in_call
    assert parsed(joined(pieces)) == [("get", {"a": "x" * 50})]


# ------------------------------------------------------------------------------------------------- broken, and cut

FIRST, VICTIM, LAST, BEFORE, AFTER = "first", "vic@tim", "last", "Look. ", " Seen."


def conversation(family: Family, spelling: Spelling, inside: str = "") -> tuple[str, range]:
    """A text with three calls, and where the middle one stands in it."""

    def given(word: str) -> tuple[str, dict[str, object]]:
        return family.one[0], dict(family.one[1]) | {"a": word}

    calls = spelling.write([given(FIRST), ("set", {"a": f"{VICTIM}{inside}", "b": 1}), given(LAST)])
    text = calls if family.has_channels else BEFORE * family.is_text_free + calls + AFTER
    first, start, stop = (text.index(family.one[0]), text.index("set"), text.rindex(family.one[0]))
    head = next(n for n in range(first + 1) if n == first or text[first - n - 1] != text[stop - n - 1])
    head -= re.search(r"[<{[]", text[start - head :]).start()
    return text, range(start - head, stop - head)


def mutant(family: Family, spelling: Spelling, rng: random.Random) -> str:
    """A conversation of which one call has a fault: most are in its notation, some in its text."""
    text, place = conversation(family, spelling)
    kind, in_text = rng.randrange(6), text.index(VICTIM) + 3
    if kind == 0:
        return text[:in_text] + rng.choice(["\n", "\t", "\x01", "\x0c", "\\d", "\\", '"', "\\u12"]) + text[in_text:]
    if kind == 1:
        marks = [] if spelling.format.special else [*markers_of(spelling.format)]
        return text[:in_text] + rng.choice([*marks, "{", "}", "<", "[", ", "]) + text[in_text:]
    if kind == 2:
        marks = [
            (text.index(mark, place.start), mark) for mark in markers_of(spelling.format) if mark in text[place.start :]
        ]
        start, mark = rng.choice([(at, mark) for at, mark in marks if at + len(mark) <= place.stop] or [(in_text, "")])
        return text[:start] + mark * rng.choice([0, 2]) + text[start + len(mark) :]
    at = rng.choice([at for at in place if text[at] in "{}[]\"'<>|:,=_`"])
    return text[:at] + text[at] * rng.choice([0, 2]) + text[at + 1 :]


@pytest.mark.parametrize("number", [12, pytest.param(300, marks=pytest.mark.slow)])
@of_every_spelling
def test_a_broken_call_takes_no_good_one_and_no_text_with_it(family: Family, spelling: Spelling, number: int) -> None:
    for seed in range(number):
        rng = random.Random(seed)
        text = mutant(family, spelling, rng)
        found = (
            read(spelling.format, family.tools, text)
            if seed % 10 == 0
            else reading_in_parts(family, spelling, text, rng)
        )
        arguments = [json.loads(call.arguments) for call in found.calls]
        assert all(isinstance(each, dict) for each in arguments), text
        assert [each.get("a") for each in arguments if each.get("a") in (FIRST, LAST)] == [FIRST, LAST], text
        assert len(found.calls) <= 3, text
        kept = found.content + "".join(call.arguments for call in found.calls)
        assert VICTIM[:3] in kept, text
        assert VICTIM[3:] in kept, text
        if not family.has_channels:
            assert found.content.startswith(BEFORE.strip() * family.is_text_free), text
            assert found.content.endswith(AFTER if family.is_text_free else AFTER.strip()), text


def reading_in_parts(family: Family, spelling: Spelling, text: str, rng: random.Random) -> Reading:
    """What is read of a text in whole, and the same in random parts."""
    *_, parts = cuts(text, rng)
    whole, found = (joined(pieces_of(spelling.format, family.tools, some)) for some in ([text], parts))
    assert found == whole, parts
    return whole


@of_every_spelling
def test_a_text_that_is_cut_has_the_calls_and_the_text_before(family: Family, spelling: Spelling) -> None:
    text, _ = conversation(
        family, spelling, "" if spelling.format.special else "<".join(markers_of(spelling.format)[:1])
    )
    whole = joined(pieces_of(spelling.format, family.tools, [text]))
    for length in token_ends(spelling, text):
        found = joined(pieces_of(spelling.format, family.tools, [text[:length]], is_cut=True))
        assert found.calls == whole.calls[: len(found.calls)], text[:length]
        assert whole.content.startswith(found.content.rstrip()), text[:length]
        ended = joined(pieces_of(spelling.format, family.tools, [text[:length]]))
        assert all(isinstance(json.loads(call.arguments), dict) for call in ended.calls), text[:length]


# ---------------------------------------------------------------------------------------------- calls and other text

READINGS = [(family, text, reading) for family in FAMILIES for text, reading in family.readings.items()]
CONTENTS = [(family, text) for family in FAMILIES for text in family.contents]


@pytest.mark.parametrize(("family", "text", "reading"), READINGS, ids=lambda value: getattr(value, "name", None))
def test_a_call_may_be_written_in_several_ways(family: Family, text: str, reading: Reading) -> None:
    chat_format = family.first.format
    assert read(chat_format, family.tools, text) == reading
    if not family.has_channels:
        marks, written = chat_format.reasoning, family.first.write([family.one])
        text = f"\n{marks.begin}\nI see {written}\n{marks.end}\n{text}"
        assert read(chat_format, family.tools, text) == reading._replace(reasoning=f"I see {written}")


CUT = [(family, text, reading) for family in FAMILIES for text, reading in family.cut.items()]


@pytest.mark.parametrize(("family", "text", "reading"), CUT, ids=lambda value: getattr(value, "name", None))
def test_the_beginning_of_a_call_that_is_cut_is_neither_a_call_nor_content(
    family: Family, text: str, reading: Reading
) -> None:
    assert read(family.spellings[-1].format, family.tools, text, is_cut=True) == reading


@pytest.mark.parametrize(("family", "text"), CONTENTS, ids=lambda value: getattr(value, "name", None))
def test_what_looks_like_a_call_and_is_none_is_content(family: Family, text: str) -> None:
    chat_format = family.first.format
    assert read(chat_format, family.tools, text) == Reading("", text, [])
    assert read(chat_format, family.tools, f"Hi\n {text}") == Reading("", f"Hi\n {text}", [])
    call = family.first.write([family.one])
    assert read(chat_format, [], f"{text}{call}") == Reading("", f"{text}{call}", []), "there are no tools"
    if family.first.after_text:
        assert read(chat_format, family.tools, f"Hi {call}") == Reading("", f"Hi {call}", [])


@of_every_plain_spelling
def test_reasoning_content_and_calls_follow_each_other(family: Family, spelling: Spelling) -> None:
    marks, call = spelling.format.reasoning, spelling.after_text + spelling.write([family.one])
    expected = Reading("hm", "Hi \n\n\n Bye ", [one_of(family)] * 2)
    rest = f"\nhm\n{marks.end}\n\nHi \n{call}\n{call}\n Bye "
    assert read(spelling.format, family.tools, marks.begin + rest) == expected
    assert read(spelling.format, family.tools, rest, starts_in_reasoning=True) == expected
    assert read(spelling.format, [], f"{marks.begin}a{marks.end}{call}") == Reading("a", call, [])


@of_every_plain_spelling
def test_tokens_of_turns_are_dropped(family: Family, spelling: Spelling) -> None:
    marks, call = spelling.format.reasoning, spelling.after_text + spelling.write([family.one])
    for turn in spelling.format.turns:
        text = f"{marks.begin}a{turn}{marks.end}b{turn}\n{call}{turn}"
        if turn in spelling.format.special:
            assert read(spelling.format, family.tools, text) == Reading("a", "b", [one_of(family)])
        else:  # spelled by a tokenizer that has no such token
            assert read(spelling.format, family.tools, text).content == f"b{turn}\n{turn}"


@of_every_plain_spelling
def test_a_free_answer_has_calls_in_their_structure(family: Family, spelling: Spelling) -> None:
    begin, trigger = spelling.format.reasoning.begin, spelling.format.trigger or markers_of(spelling.format)[0]
    call, two = spelling.write([family.one]), spelling.write([family.one] * 2)

    def allowed(text: str, **how) -> bool:
        return spelling.allows("auto", family.tools, text, **how)

    for text in (
        "",
        "Hi",
        call,
        two,
        f"a {begin[0]} {begin[1:]}",
        *[f"Hi.\n{two}", f"Hi {trigger[:-1]}"] * family.is_text_free,
    ):
        assert allowed(text, unlike=begin), text
    for text in (begin, f"\n{begin} so", f"{call} and", trigger, f"Hi {trigger}", f"{trigger}{{}}"):
        assert not allowed(text, unlike=begin), text
    if family.is_text_free:
        assert allowed(f"Hi {call}", several=False)
        assert not allowed(f"Hi {two}", several=False)


@pytest.mark.parametrize(
    ("family", "text"),
    [(family, text) for family in FAMILIES for text in family.broken],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_call_without_its_structure_is_not_allowed(family: Family, text: str) -> None:
    for rule in ("calls", "auto"):
        assert not family.first.allows(rule, family.tools, text)


@of_every_family
def test_the_work_is_proportional_to_the_text(family: Family) -> None:
    chat_format = family.first.format
    written = [spelling.write([family.one]) for spelling in family.spellings if spelling.format.special]
    markers = markers_of(chat_format)
    parts = ["a", " ", "<", "{", *markers, *written, *(f"{text}x" for text in written), *family.repeated]
    parts += [f"{text.replace(mark, '', 1)} " for text in written for mark in ("}", '"', "</")]  # broken calls
    for part in dict.fromkeys(parts):
        begin, part = ("", part) if isinstance(part, str) else part
        check_linear(chat_format, family.tools, begin, part)
