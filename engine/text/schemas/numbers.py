"""Sets of numbers as regexes of Lark, by exact decimal arithmetic. Knows no schema.

A bounded number is written without exponent; zeros at the end of its decimals, and the minus of -0, are free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction

INTEGER = "(?:0|[1-9][0-9]*)"
_DECIMALS = r"(?:\.[0-9]+)?"
_ANY_NUMBER = f"-?{INTEGER}{_DECIMALS}(?:[eE][+\\-]?[0-9]+)?"
MAX_EXPONENT, MAX_DIGITS = 400, 100  # of a bound: its regex grows with its digits
_MAX_ENDINGS = 1000  # how many endings the multiples of a number may have
# The automaton of the library that divides has a state for each remainder, which none of its limits covers: the
# multiples of 999,983 took 14 s and 391 MB. Its bounds are doubles, of which these integers are exact.
MAX_MULTIPLE, _MAX_BOUND = 20_000, 2**53


@dataclass(frozen=True, slots=True)
class Bound:
    """One end of a range; `is_open`: the value itself is not in it."""

    value: Decimal
    is_open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberSet:
    """A set of numbers.

    Args:
        low: the least one; None: no bound.
        high: the greatest one; None: no bound.
        step: all are multiples of it; None: no such condition.
        values: all are one of these; None: no such condition.
    """

    low: Bound | None = None
    high: Bound | None = None
    step: Fraction | None = None
    values: frozenset[Decimal] | None = None

    def __and__(self, other: NumberSet) -> NumberSet:
        """The numbers that are in both. ValueError: their steps have too large a multiple."""
        steps = [one.step for one in (self, other) if one.step is not None]
        sets = [one.values for one in (self, other) if one.values is not None]
        lows = [one.low for one in (self, other) if one.low is not None]
        highs = [one.high for one in (self, other) if one.high is not None]
        return NumberSet(
            low=max(lows, key=lambda b: (b.value, b.is_open), default=None),
            high=min(highs, key=lambda b: (b.value, not b.is_open), default=None),
            step=_common_multiple(*steps) if len(steps) == 2 else next(iter(steps), None),
            values=sets[0] & sets[1] if len(sets) == 2 else next(iter(sets), None),
        )

    def __contains__(self, value: Decimal) -> bool:
        above = self.low is None or value > self.low.value or (value == self.low.value and not self.low.is_open)
        below = self.high is None or value < self.high.value or (value == self.high.value and not self.high.is_open)
        fits = self.step is None or (Fraction(value) / self.step).denominator == 1
        return above and below and fits and (self.values is None or value in self.values)

    def terminal(self) -> str | None:
        """A terminal of Lark; None if there is no such number.

        Raises:
            ValueError: the multiples of its step have too many endings: see `library_schema`.
        """
        if self.values is not None:
            found = sorted(value for value in self.values if value in self)
            return f"/{'|'.join(written(value) for value in found)}/" if found else None
        tight = self._tight()
        if tight.is_empty:
            return None
        if tight.step is None:
            return f"/{tight.range_of(_DECIMALS) or _ANY_NUMBER}/"
        decimals = "" if tight.step.denominator == 1 else _DECIMALS
        parts = [tight.range_of(decimals), None if tight.step == 1 else f"-?{_multiples(tight.step)}"]
        return " & ".join(f"/{part}/" for part in parts if part) or f"/-?{INTEGER}/"

    def library_schema(self) -> dict[str, object]:
        """A JSON Schema with which the library writes these integers.

        Raises:
            ValueError: it would not do it exactly.
        """
        tight, step = self._tight(), self.step
        assert step is not None, "numbers without a step have a terminal"
        if step.denominator != 1 or step > MAX_MULTIPLE:
            raise ValueError(f"{_decimal(step)} is not supported: beyond {MAX_MULTIPLE}, or no integer")
        bounds = {"minimum": tight.low, "maximum": tight.high}
        given = {key: int(bound.value) for key, bound in bounds.items() if bound is not None}
        if any(abs(value) > _MAX_BOUND for value in given.values()):
            raise ValueError(f"{step} is not supported beside a bound beyond {_MAX_BOUND}")
        return {"type": "integer", "multipleOf": int(step), **given}

    def without_step(self) -> NumberSet:
        """The same without the step, but for integers."""
        is_integer = self.step is not None and self.step.denominator == 1
        return replace(self, step=Fraction(1) if is_integer else None)

    @property
    def is_empty(self) -> bool:
        """Whether no number is in it, if its bounds are tight."""
        if self.low is None or self.high is None:
            return False
        is_open = self.low.is_open or self.high.is_open
        return self.low.value > self.high.value or (self.low.value == self.high.value and is_open)

    def _tight(self) -> NumberSet:
        """The same with bounds that are multiples of the step, if it has one."""
        if self.step is None:
            return self
        low, high = self.low, self.high
        if low is not None:
            count = Fraction(low.value) / self.step
            low = Bound(_decimal((math.floor(count) + 1 if low.is_open else math.ceil(count)) * self.step))
        if high is not None:
            count = Fraction(high.value) / self.step
            high = Bound(_decimal((math.ceil(count) - 1 if high.is_open else math.floor(count)) * self.step))
        return NumberSet(low=low, high=high, step=self.step)

    def range_of(self, decimals: str) -> str | None:
        """A regex of the numbers between the bounds; None if there are none."""
        if self.low is None and self.high is None:
            return None
        zero = Bound(Decimal(0))
        sides = []
        if self.high is None or self.high.value >= 0:
            low = zero if self.low is None or self.low.value < 0 else self.low
            sides.append(("", _magnitudes(low, self.high, decimals)))
        if self.low is None or self.low.value <= 0:
            low = zero if self.high is None or self.high.value > 0 else _negative(self.high)
            sides.append(("-", _magnitudes(low, self.low and _negative(self.low), decimals)))
        return "|".join(f"{sign}(?:{side})" for sign, side in sides if side)


def checked(value: Decimal) -> Decimal:
    """A bound or a step. ValueError: it is too long."""
    if not value.is_finite() or abs(value.adjusted()) > MAX_EXPONENT or len(value.as_tuple().digits) > MAX_DIGITS:
        raise ValueError(f"has {str(value)[:40]}; expected at most {MAX_DIGITS} digits, and 1e{MAX_EXPONENT}")
    return value


def written(value: Decimal) -> str:
    """A regex of the one way to write a number of `const` or `enum`."""
    whole, behind = _parts(value)
    return f"{'-' if value < 0 else ''}{whole}" + (rf"\.{behind}" if behind else "")


def _negative(bound: Bound) -> Bound:
    return Bound(bound.value.copy_negate(), bound.is_open)


def _common_multiple(one: Fraction, other: Fraction) -> Fraction:
    found = Fraction(math.lcm(one.numerator, other.numerator), math.gcd(one.denominator, other.denominator))
    if found >= 10**MAX_EXPONENT:
        raise ValueError(f"has numbers whose least common multiple is above 1e{MAX_EXPONENT}")
    return found


def _decimal(value: Fraction) -> Decimal:
    """The same number: bounds and steps have finitely many decimals."""
    places, _ = _scaled(value)
    sign = "-" if value < 0 else ""
    return Decimal(f"{sign}{abs(value.numerator) * 10**places // value.denominator}e-{places}")


def _scaled(value: Fraction) -> tuple[int, int]:
    """How many decimals it has, and the number without its decimal point: 2.5 -> 1, 25."""
    places = 0
    while 10**places % value.denominator:
        places += 1
    return places, value.numerator * 10**places // value.denominator


# ---------------------------------------------------------------------------------------------- ranges, digit by digit


def _parts(value: Decimal) -> tuple[str, str]:
    """The digits before and behind the decimal point, without zeros that say nothing: 0.50 -> "0", "5"."""
    whole, _, decimals = f"{value:f}".lstrip("-").partition(".")
    return whole.lstrip("0") or "0", decimals.rstrip("0")


def _magnitudes(low: Bound, high: Bound | None, decimals: str) -> str | None:
    """A regex of the numbers without sign from `low`, at least 0, to `high`; None if there are none."""
    return "|".join(_pieces(low, high, decimals)) or None


def _pieces(low: Bound, high: Bound | None, decimals: str) -> Iterator[str]:
    """Numbers with the integer part of a bound, and between them those with any decimals."""
    whole, behind = _parts(low.value)
    if high is None:
        if piece := _with_decimals(whole, _Ends(behind, low.is_open), None, decimals):
            yield piece
        yield from (f"{piece}{decimals}" for piece in _integers(int(whole) + 1, None))
        return
    last, last_behind = _parts(high.value)
    if int(whole) > int(last):
        return
    lower, upper = _Ends(behind, low.is_open), _Ends(last_behind, high.is_open)
    if piece := _with_decimals(whole, lower, upper if whole == last else None, decimals):
        yield piece
    if whole != last:
        yield from (f"{piece}{decimals}" for piece in _integers(int(whole) + 1, int(last) - 1))
        if piece := _with_decimals(last, None, upper, decimals):
            yield piece


@dataclass(frozen=True, slots=True)
class _Ends:
    """The decimals of a bound that are still to be compared."""

    digits: str
    is_open: bool

    @property
    def rest(self) -> _Ends:
        return _Ends(self.digits[1:], self.is_open)

    @property
    def first(self) -> int:
        return int(self.digits[:1] or "0")


def _with_decimals(whole: str, low: _Ends | None, high: _Ends | None, decimals: str) -> str | None:
    """The numbers with this integer part whose decimals are between the bounds; None if there are none."""
    is_whole = _has_zero(low, high)
    if not decimals:
        return whole if is_whole else None
    behind = _some_decimals(low, high)
    if behind is None:
        return whole if is_whole else None
    return f"{whole}(?:\\.{behind}){'?' if is_whole else ''}"


def _has_zero(low: _Ends | None, high: _Ends | None) -> bool:
    above = low is None or not (low.digits or low.is_open)
    return above and (high is None or bool(high.digits) or not high.is_open)


def _some_decimals(low: _Ends | None, high: _Ends | None) -> str | None:
    """A regex of one digit or more, as decimals between the bounds; None if there are none."""
    if low is not None and not low.digits and not low.is_open:
        low = None
    if high is None and low is None:
        return "[0-9]+"
    if high is None and low is not None and not low.digits:
        return "0*[1-9][0-9]*"
    if high is not None and not high.digits:
        return "0+" if low is None and not high.is_open else None
    found = list(_by_first_digit(low, high) if low and high else _one_sided(low, high))
    return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})" if found else None


def _one_sided(low: _Ends | None, high: _Ends | None) -> Iterator[str]:
    """Leading zeros of the bound at once: a group for each would nest too deeply."""
    ends = low or high
    assert ends is not None, "a range without bounds has any digits"
    zeros = len(ends.digits) - len(ends.digits.lstrip("0"))
    rest = _Ends(ends.digits[zeros:], ends.is_open)
    found = list(_by_first_digit(rest if low else None, None if low else rest))
    if zeros:
        yield f"0{{0,{zeros - 1}}}[1-9][0-9]*" if low else f"0{{1,{zeros}}}"
        yield f"0{{{zeros}}}(?:{'|'.join(found)})"
    else:
        yield from found


def _by_first_digit(low: _Ends | None, high: _Ends | None) -> Iterator[str]:
    least, most = low.first if low else 0, high.first if high else 9
    for digit in sorted({least, most}):
        if least <= digit <= most:
            lower, upper = low.rest if low and digit == least else None, high.rest if high and digit == most else None
            if lower is None and upper is None:
                yield f"{digit}[0-9]*"
                continue
            rest = _some_decimals(lower, upper)
            is_end = _has_zero(lower, upper)
            if rest:
                yield f"{digit}(?:{rest})?" if is_end else f"{digit}{rest}"
            elif is_end:
                yield str(digit)
    if most - least > 1:
        yield f"[{least + 1}-{most - 1}][0-9]*"


def _integers(low: int, high: int | None) -> Iterator[str]:
    """Regexes of the integers from `low`, at least 0, to `high`."""
    if high is not None and low > high:
        return
    first, last = str(low), "" if high is None else str(high)
    if len(first) == len(last):
        yield _same_size(first, last)
        return
    yield _same_size(first, "9" * len(first))
    if not last or len(last) - 2 >= len(first):
        yield f"[1-9][0-9]{{{len(first)},{len(last) - 2 if last else ''}}}"
    if last:
        yield _same_size("1" + "0" * (len(last) - 1), last)


def _same_size(low: str, high: str) -> str:
    """The integers between two that have as many digits."""
    size = len(low)
    if low == high:
        return low
    if not low.strip("0") and not high.strip("9"):
        return f"[0-9]{{{size}}}"
    if low[0] == high[0]:
        return low[0] + _same_size(low[1:], high[1:])
    least, most, found = int(low[0]), int(high[0]), []
    if low[1:].strip("0"):
        found.append(f"{least}{_same_size(low[1:], '9' * (size - 1))}")
        least += 1
    if high[1:].strip("9"):
        found.append(f"{most}{_same_size('0' * (size - 1), high[1:])}")
        most -= 1
    if least <= most:
        found.append(f"[{least}-{most}]" + (f"[0-9]{{{size - 1}}}" if size > 1 else ""))
    return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"


# ------------------------------------------------------------------------------------------------------- multiples


def _multiples(step: Fraction) -> str:
    """A regex of the multiples of a step, without sign: those of 2.5 end with 0, 2.5, 5 or 7.5.

    Raises:
        ValueError: they have too many endings.
    """
    places, scaled = _scaled(step)
    size = next((n for n in range(MAX_EXPONENT) if 10**n % scaled == 0), None)
    if size is None or 10**size // scaled > _MAX_ENDINGS:
        raise ValueError(f"{_decimal(step)} is not supported: its multiples have too many endings")
    endings = [f"{value:0{size}}" if size else "" for value in range(0, 10**size, scaled)]
    if size > places:
        return f"(?:{'|'.join(_ending(text[: size - places], text[size - places :]) for text in endings)})"
    free = places - size
    behind = [f"[0-9]{{1,{free}}}0*" if free else "0+"]
    behind += [f"[0-9]{{{free}}}{digits}0*" for text in endings if (digits := text.rstrip("0"))]
    return f"{INTEGER}(?:\\.(?:{'|'.join(behind)}))?" if places else INTEGER


def _ending(whole: str, behind: str) -> str:
    """The numbers that end with these digits before and behind the decimal point."""
    digits = behind.rstrip("0")
    front = f"(?:[1-9][0-9]*{whole}|{whole.lstrip('0') or '0'})"
    return rf"{front}\.{digits}0*" if digits else f"{front}(?:\\.0+)?" if behind else front
