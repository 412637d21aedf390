"""The law of `engine.text.stops`: an answer is cut where a reading of the whole text would cut it, however it comes."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pilotfish.engine.text.codec import OutputText
from pilotfish.engine.text.stops import Asides, StopStrings
from tests.engine.text.test_codec import CODEC, in_chunks

BEGIN, END, CALL, OVER = "<t>", "</t>", "<c>", "</c>"
PARTS = ["<", "t", ">", "a", "b", "\n", " ", "€", BEGIN, END, CALL, OVER, "/"]
texts = st.lists(st.sampled_from(PARTS), max_size=14).map("".join)
stops = st.lists(st.lists(st.sampled_from(PARTS), min_size=1, max_size=3).map("".join), min_size=1, max_size=3)
KINDS = st.tuples(*[st.booleans()] * 4)  # marks its reasoning, begins in it, calls, calls end


def asides(marks: bool, is_open: bool, calls: bool, resumes: bool) -> Asides:
    return Asides(
        leading=(BEGIN,) if marks and not is_open else (),
        closes=StopStrings([END] if marks else []),
        opens=StopStrings([CALL] if calls else []),
        resumes=StopStrings([OVER] if resumes else []),
        is_open=marks and is_open,
    )


def answers(text: str, marks: bool, is_open: bool, calls: bool, resumes: bool) -> list[tuple[int, int]]:
    """Where the parts of the text are that are answer, as half-open ranges."""
    found, at, mark = [], 0, ""
    if marks and (is_open or text.lstrip().startswith(BEGIN)):
        at, mark = (0 if is_open else text.index(BEGIN) + len(BEGIN)), END
    while True:
        if mark:
            end = text.find(mark, at)
            if end < 0 or (mark == OVER and not resumes):
                return found
            at = end + len(mark)
            at += len(text[at:]) - len(text[at:].lstrip())
        begin = text.find(CALL, at) if calls else -1
        found.append((at, len(text) if begin < 0 else begin))
        if begin < 0:
            return found
        at, mark = begin + len(CALL), OVER


def cut(text: str, stop: list[str], kind: tuple[bool, bool, bool, bool]) -> tuple[str, str | None]:
    """The text up to the stop string that ends first within the answer, and that stop string."""
    ends = [
        (i + len(one), order, i)
        for start, end in answers(text, *kind)
        for order, one in enumerate(stop)
        for i in range(start, end - len(one) + 1)
        if text.startswith(one, i)
    ]
    if not ends:
        return text, None
    _, order, begin = min(ends)
    return text[:begin], stop[order]


@settings(max_examples=200)
@given(st.data(), texts, stops, KINDS)
@example(None, "<t>a</t>\n\nbab", ["a", "\n"], (True, False, False, False))
@example(None, "a</t>b", [">b", "a"], (True, True, False, False))  # would begin in the end of the reasoning
@example(None, "\n<t>a</t>b", ["\n"], (True, False, False, False))
@example(None, "\n<t", ["\n"], (True, False, False, False))  # only the end of the text tells
@example(None, "b<c>a</c>\na", ["<", "a"], (False, False, True, True))
@example(None, "b<ca", ["<"], (False, False, True, False))
def test_an_answer_is_cut_where_the_whole_text_would_be(
    data: st.DataObject | None, text: str, stop: list[str], kind: tuple[bool, bool, bool, bool]
) -> None:
    tokens = list(CODEC.encode(text, bare=True))
    for parts in ([[token] for token in tokens], [tokens], None if data is None else in_chunks(data, tokens)):
        output, shown = OutputText(CODEC, StopStrings(stop), asides=asides(*kind)), ""
        for part in parts or ():
            shown += "".join(output.push(part))
            if output.stop is not None:
                break
        shown += output.flush()
        assert parts is None or (shown, output.stop) == cut(text, stop, kind)
