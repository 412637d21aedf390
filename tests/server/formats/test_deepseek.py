"""DeepSeek's models, in both variants."""

from __future__ import annotations

import pytest

from pilotfish.server.formats.base import ReasoningMarks, Tool
from pilotfish.server.formats.deepseek import DeepSeekFormat
from tests.server.formats.laws import FREE, Calls, Family, Spelling, called, dumped, some_calls
from tests.server.formats.walks import Call, Masks, Reading, markers_of, plain_masks, read

BEGIN, CALL, SEPARATOR, CALL_END, END = markers_of(DeepSeekFormat)
EOS = DeepSeekFormat.turns[1]
TOKENS = Masks(dict.fromkeys([*markers_of(DeepSeekFormat), EOS], True))
A = '{"a": 1}'


def write_v3(calls: Calls) -> str:
    """As the chat templates of V3 and R1 write calls."""
    parts = (f"{CALL}function{SEPARATOR}{name}\n```json\n{dumped(given)}\n```{CALL_END}" for name, given in calls)
    return BEGIN + "\n".join(parts) + END


def write_v31(calls: Calls) -> str:
    """As the chat templates of V3.1 write calls."""
    return BEGIN + "".join(f"{CALL}{name}{SEPARATOR}{dumped(given)}{CALL_END}" for name, given in calls) + END


IN_TOKENS, IN_TEXT = some_calls("\n```"), some_calls(BEGIN, CALL_END, "```", EOS)
DEEPSEEK = Family(
    name="deepseek",
    spellings=[
        Spelling(
            f"deepseek-{variant}{end}",
            DeepSeekFormat(masks.ids, ReasoningMarks(), variant=variant),
            masks,
            write,
            calls,
        )
        for end, masks, calls in (("", TOKENS, IN_TOKENS), ("-text", plain_masks(), IN_TEXT))
        for variant, write in (("v3", write_v3), ("v3.1", write_v31))
    ],
    readings={
        f"{CALL}get{SEPARATOR}{A}": called(A),
        f"{BEGIN}\n{CALL}get{SEPARATOR} {A}\n{CALL_END}\n{END}\n": called(A),
        f"{CALL}function{SEPARATOR}get\n```json\n{A}\n```": called(A),
        f"{BEGIN}{CALL}get{SEPARATOR}{CALL_END}{CALL}get{SEPARATOR}{A}}}{CALL_END}{END}": called("{}", A),
        **dict.fromkeys(
            (f"{CALL}function{SEPARATOR}get{CALL_END}", f"{CALL}function{SEPARATOR}get\n```json\n```{CALL_END}"),
            called("{}"),
        ),
        **{
            f"{BEGIN}{CALL}get{SEPARATOR}{broken}{CALL_END}{CALL}get{SEPARATOR}{A}{CALL_END}{END}": called(
                A, content=f"{BEGIN}{CALL}get{SEPARATOR}{broken}{CALL_END}"
            )
            for broken in ('{"a": 1', '{"a": "x}', '{"a": 1}]', "x")
        },
    },
    cut={
        f"{BEGIN}{CALL}get{SEPARATOR}{A}{CALL_END}{CALL}ge": called(A),
        f"{CALL}function{SEPARATOR}get\n```json\n{A}\n``": called(A),
        **dict.fromkeys((f"{CALL}get{SEPARATOR}", f"{CALL}function{SEPARATOR}get\n```js", f"{BEGIN}"), called()),
    },
    contents=(
        *(BEGIN, END, f"{BEGIN} x", f"{BEGIN}{CALL}other{SEPARATOR}{{}}{CALL_END}{END}", f"{CALL}get_y{SEPARATOR}{{}}"),
        *(f"{CALL}function{SEPARATOR}get\n{{}}", f"{CALL}get{SEPARATOR}3{CALL_END}", f"{CALL}get {SEPARATOR}{{}}"),
        *(f"{CALL}function{SEPARATOR}{{}}", f"{BEGIN}{CALL}get", f"{CALL}function{SEPARATOR}get"),
    ),
    broken=(write_v31([("get", {})]), CALL),
    hostile=("function", "```json\n", f"{CALL}get{SEPARATOR}"),
    repeated=(f"{CALL}function{SEPARATOR}get\n", f"{CALL}get{SEPARATOR} ", f"{BEGIN} "),
)


@pytest.mark.parametrize("spelling", DEEPSEEK.spellings, ids=lambda spelling: spelling.name)
def test_a_function_may_have_the_name_function(spelling: Spelling) -> None:
    text = spelling.write([("function", {}), ("get", {"a": 1})])
    expected = Reading("", "", [Call("function", "{}"), Call("get", A)])
    assert read(spelling.format, [Tool("function"), *FREE], text) == expected
