"""gpt-oss: messages in channels."""

from __future__ import annotations

import pytest

from pilotfish.server.formats.harmony import HarmonyFormat
from tests.server.formats.laws import FREE, Calls, Family, Spelling, called, dumped, some_calls
from tests.server.formats.walks import Masks, Reading, markers_of, read

TOKENS = Masks(dict.fromkeys(markers_of(HarmonyFormat), True))
FORMAT = HarmonyFormat(TOKENS.ids)
ROLE, ANALYSIS, FINAL = "<|start|>assistant", "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
COMMENTARY, JSON = "<|channel|>commentary", "<|constrain|>json<|message|>"
HEAD = f"{COMMENTARY} to=functions.get {JSON}"
A, ONE = '{"a": 1}', f'{HEAD}{{"a": 1}}'


def write(calls: Calls) -> str:
    """As the model writes calls; the token that ends the output has no text."""
    messages = (f"{COMMENTARY} to=functions.{name} {JSON}{dumped(arguments)}" for name, arguments in calls)
    return f"<|end|>{ROLE}".join(messages)


HEADERS = ["<|start|>assis", f"{ROLE}<|channel|>", f"{COMMENTARY} to=functions.ge", "<|channel|>fin"]
CALLS = some_calls("json", "to=functions.get", "assistant")
HARMONY = Family(
    name="harmony",
    spellings=(Spelling("harmony", FORMAT, TOKENS, write, CALLS),),
    has_channels=True,
    wild=some_calls("<|call|>", "<|message|>", "<|end|>"),
    hostile=(ROLE, ANALYSIS, FINAL, COMMENTARY, " to=functions.get", "to=", HEAD, "json"),
    readings={
        f"{ROLE}{ONE}<|call|>": called(A),
        f" to=functions.get{COMMENTARY} json<|message|>{A}<|call|>": called(A),
        f"{ROLE} to=functions.get{COMMENTARY} json<|message|>{A}": called(A),
        f"{COMMENTARY} to=functions.get<|message|>{A}\n<|end|>": called(A),
        f"{COMMENTARY} to=get<|constrain|>json<|message|> {A}": called(A),
        f"<|channel|>analysis to=functions.get code<|message|>{A}": called(A),
        f"{COMMENTARY} to=functions.get{COMMENTARY} {JSON}{A}": called(A),
        # Arguments may be missing, and a brace may be there too often; a broken call takes no other one with it.
        **dict.fromkeys(
            (HEAD, f'{HEAD}""<|call|>', f"{COMMENTARY} to=functions.get<|call|>", f"{ROLE} to=functions.get"),
            called("{}"),
        ),
        f"{ONE}}}<|call|>": called(A),
        **{
            f"{HEAD}{broken}<|end|>{ROLE}{ONE}": called(A, content=broken)
            for broken in ('{"a": 1', '{"a": "x}', '{"a": 1} x', "x")
        },
        # A preamble is content before the call; messages of one kind are lines.
        f"{ANALYSIS}hm<|end|>{ROLE}{COMMENTARY}<|message|>plan:\n<|end|>{ROLE}{ONE}<|call|>": called(
            A, content="plan:", reasoning="hm"
        ),
        (
            f"{ANALYSIS}a <|end|>{ROLE}{ANALYSIS} b<|end|>"
            f"{ROLE}{COMMENTARY}<|message|>plan\n<|end|>{ROLE}{FINAL}Hi<|return|>"
        ): Reading("a\nb", "plan\nHi", []),
        # A header that ends early is no content.
        **dict.fromkeys(HEADERS, called()),
    },
    cut=dict.fromkeys([*HEADERS, HEAD, f"{COMMENTARY} to=functions.get", f'{HEAD}{{"a'], called()),
    broken=(f"{COMMENTARY}<|message|>plan<|end|>", f"{HEAD}3", "Hi", f"{FINAL}Hi<|end|>"),
    repeated=("to=", ANALYSIS, f"{ONE}<|call|>", HEAD, "<|channel|>x "),
)


def test_channels_are_reasoning_and_content() -> None:
    text = f"{ANALYSIS} hm\n<|end|>{ROLE}{FINAL}Hi\n"
    assert read(FORMAT, FREE, text) == Reading("hm", "Hi\n", [])
    inside = text.removeprefix(ANALYSIS)
    assert read(FORMAT, [], inside, starts_in_reasoning=True) == Reading("hm", "Hi\n", [])


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (" Hi", " Hi"),
        ("to", "to"),
        (f"{COMMENTARY} to=functions.other {JSON}{{}}<|call|>", "{}"),
        (f"{HEAD}x", "x"),
        (f"{ONE} x<|end|>", f"{A} x"),
        ("<|start|>x", "x"),
        ("<|channel|>x y", "x y"),
        ("<|message|>x<|return|>y", "xy"),
    ],
)
def test_text_that_is_no_call_is_content(text: str, content: str) -> None:
    assert read(FORMAT, FREE, text).content == content


def test_without_tools_the_bodies_of_calls_are_content() -> None:
    assert read(FORMAT, [], f"{ONE}<|call|>") == Reading("", '{"a": 1}', [])


@pytest.mark.parametrize("text", [f"{FINAL}Hi", f"{COMMENTARY}<|message|>plan<|end|>{ROLE}{HEAD}{{}}", f"{HEAD}{{}}"])
def test_a_free_answer_is_a_final_message_or_calls(text: str) -> None:
    for begin in ("", ROLE):
        assert HARMONY.first.allows("auto", FREE, begin + text)


@pytest.mark.parametrize("has_reasoned", [False, True])
def test_the_header_precedes_structured_content(has_reasoned: bool) -> None:
    start = f'start: {FORMAT.prefix(has_reasoned=has_reasoned)} "yes"'
    assert TOKENS.accepts(start, f"{ROLE * has_reasoned}{FINAL}yes")
    assert read(FORMAT, [], f"{ROLE * has_reasoned}{FINAL}yes") == Reading("", "yes", [])


def test_the_marks_of_reasoning_are_those_of_the_channel() -> None:
    assert FORMAT.reasoning is not None
    assert TOKENS.accepts(f"start: {FORMAT.literal(FORMAT.reasoning.begin)}", ANALYSIS)
