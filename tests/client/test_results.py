"""Laws of the results that need no server."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from client import Delta, Piece
from client.convert import finished
from pilotfish.v1 import generation_pb2 as pb


def delta(text: str, lengths: list[int], from_draft: list[bool]) -> Delta:
    return Delta(
        index=0, text=text, token_ids=tuple(lengths), from_draft=tuple(from_draft), text_lengths=tuple(lengths)
    )


def test_pieces_follow_tokens():
    # The middle token brought the first byte of "ü" only, so it brought no text.
    got = list(delta("deü f", [2, 0, 1], [True, True, False]).pieces())
    assert got == [Piece("de", True), Piece("ü", False), Piece(" f", None)]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.text(max_size=4), st.booleans()), max_size=6), st.text(max_size=4))
def test_pieces_join_to_the_text(tokens, rest):
    text = "".join(part for part, _ in tokens) + rest
    cut = delta(text, [len(part) for part, _ in tokens], [draft for _, draft in tokens])
    assert "".join(piece.text for piece in cut.pieces()) == text


def test_a_reason_from_a_newer_server_keeps_its_number():
    assert finished(pb.Finished(finish_reason=99)).finish_reason == "99"
