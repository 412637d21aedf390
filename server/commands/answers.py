"""Comparison of two answers to the same request, for `pilotfish verify`."""

from __future__ import annotations

from dataclasses import dataclass

from pilotfish.client import Finished, Output


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first difference of two answers: `what` differs in `output`, at token `position` if it concerns a token."""

    what: str
    output: int
    position: int | None
    expected: str
    found: str
    is_near_tie: bool = False

    def __str__(self) -> str:
        where = f"output {self.output}" + ("" if self.position is None else f", token {self.position}")
        return f"{where}: {self.what} expected {self.expected}, found {self.found}{' (a near-tie)' * self.is_near_tie}"


def first_difference(
    expected: tuple[Output, ...], found: tuple[Output, ...], tolerance: float, *, is_greedy: bool
) -> FirstDifference | None:
    """Compare two answers; log-probabilities may differ by `tolerance`."""
    if len(expected) != len(found):
        return FirstDifference("number of outputs", 0, None, str(len(expected)), str(len(found)))
    pairs = zip(expected, found, strict=True)
    differences = (_difference(want, got, tolerance, is_greedy=is_greedy) for want, got in pairs)
    return next((difference for difference in differences if difference is not None), None)


def largest_gap(expected: tuple[Output, ...], found: tuple[Output, ...]) -> float:
    """Return the largest difference of log-probabilities within the common prefix."""
    gaps = [
        abs(before.logprob - after.logprob)
        for want, got in zip(expected, found, strict=False)
        for before, after, _ in zip(want.logprobs, got.logprobs, range(_num_equal(want, got)), strict=False)
    ]
    return max(gaps, default=0.0)


def _difference(want: Output, got: Output, tolerance: float, *, is_greedy: bool) -> FirstDifference | None:
    index, at = want.index, _num_equal(want, got)
    pairs = [(one.logprob, other.logprob) for one, other in zip(want.logprobs[:at], got.logprobs, strict=False)]
    odd = next((i for i, (one, other) in enumerate(pairs) if not abs(one - other) <= tolerance), None)
    if want.token_ids != got.token_ids:
        is_near_tie = is_greedy and odd is None and _is_near_tie(want, got, at, tolerance)
        return FirstDifference("token", index, at, _token(want, at), _token(got, at), is_near_tie)
    if odd is not None:
        one, other = pairs[odd]
        return FirstDifference("log-probability", index, odd, repr(one), repr(other))
    for what, mine, theirs in (
        ("number of log-probabilities", len(got.token_ids), len(got.logprobs)),
        ("text", want.text, got.text),
        ("end", _end(want.finished), _end(got.finished)),
        ("seed", want.finished.seed, got.finished.seed),
    ):
        if mine != theirs:
            return FirstDifference(what, index, None, repr(mine), repr(theirs))
    return None


def _is_near_tie(want: Output, got: Output, at: int, tolerance: float) -> bool:
    """Whether both tokens were equally likely in plain decoding, up to rounding."""
    if tolerance == 0 or at >= min(len(want.token_ids), len(got.token_ids)):
        return False
    chosen = want.logprobs[at]
    others = (one.logprob for one in chosen.top if one.token_id == got.token_ids[at])
    return any(abs(chosen.logprob - other) <= tolerance for other in others)


def _num_equal(want: Output, got: Output) -> int:
    """Return the length of the common prefix."""
    shorter = min(len(want.token_ids), len(got.token_ids))
    return next((i for i in range(shorter) if want.token_ids[i] != got.token_ids[i]), shorter)


def _token(output: Output, at: int) -> str:
    return str(output.token_ids[at]) if at < len(output.token_ids) else "the end"


def _end(finished: Finished) -> tuple[str, int | None, str | None, int]:
    return finished.finish_reason, finished.stop_token_id, finished.stop_string, finished.usage.completion_tokens
