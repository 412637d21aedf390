"""Sets of numbers as Lark regexes, with exact decimal arithmetic.

Bounded numbers are written without exponent; trailing zeros of decimals, and the sign of -0, are optional.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

INTEGER = "(?:0|[1-9][0-9]*)"
_DECIMALS = r"(?:\.[0-9]+)?"
_ANY_NUMBER = f"-?{INTEGER}{_DECIMALS}(?:[eE][+\\-]?[0-9]+)?"
MAX_EXPONENT, MAX_DIGITS = 400, 100  # of a bound: its regex grows with its digits
_MAX_ENDINGS = 1000  # maximum number of endings of the multiples of a number
# The library's automaton for multiples has a state per remainder, which its limits do not cover: the multiples of
# 999,983 took 14 s and 391 MB. Its bounds are doubles, which represent these integers exactly.
MAX_MULTIPLE, _MAX_BOUND = 20_000, 2**53
MAX_WHITESPACE = 64  # so that a small model cannot write spaces forever
SPACES = rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE}}}"
_OPTIONS = {"whitespace_pattern": SPACES}  # as elsewhere in a document, so that the library joins the lexers


@dataclass(frozen=True, slots=True)
class Bound:
    """One end of a range; `is_open`: the value itself is not in it."""

    value: Decimal
    is_open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberSet:
    """A set of numbers.

    Args:
        low: the minimum; None: no bound.
        high: the maximum; None: no bound.
        step: all are multiples of it; None: no condition.
        values: the allowed values; None: no condition.
    """

    low: Bound | None = None
    high: Bound | None = None
    step: Fraction | None = None
    values: frozenset[Decimal] | None = None

    def __and__(self, other: NumberSet) -> NumberSet:
        """The intersection. Raises ValueError if the least common multiple of the steps is too large."""
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
        """A Lark terminal; None if the set is empty.

        Raises:
            ValueError: the multiples of its step have too many endings: see `library_schema`.
        """
        if self.values is not None:
            found = sorted(value for value in self.values if value in self)
            return f"/{'|'.join(written(value) for value in found)}/" if found else None
        tight = self._tight()
        if tight.is_empty:
            return None
        step, bounds = tight.step, [*_bounds(tight.low, ""), *_bounds(tight.high, "-")]
        plain = f"-?{INTEGER}{_DECIMALS}" if bounds else _ANY_NUMBER
        return " & ".join([f"/{plain if step is None else f'-?{_multiples(step)}'}/", *bounds])

    def library_schema(self) -> dict[str, object]:
        """A JSON Schema for the library's own rule of these integers. Raises ValueError if it would not be exact."""
        tight, step = self._tight(), self.step
        assert step is not None, "numbers without a step have a terminal"
        if step.denominator != 1 or step > MAX_MULTIPLE:
            raise ValueError(f"{_decimal(step)} is not supported: expected an integer of at most {MAX_MULTIPLE}")
        bounds = {"minimum": tight.low, "maximum": tight.high}
        given = {key: int(bound.value) for key, bound in bounds.items() if bound is not None}
        if any(abs(value) > _MAX_BOUND for value in given.values()):
            raise ValueError(f"{step} is not supported beside a bound beyond {_MAX_BOUND}")
        return {"type": "integer", "multipleOf": int(step), **given, "x-guidance": _OPTIONS}

    @property
    def is_empty(self) -> bool:
        """Whether the set is empty, if its bounds are tight."""
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


def is_library_schema(schema: Any) -> bool:
    """Whether it is a schema for the library. Raises ValueError if it has options of the library."""
    if not isinstance(schema, dict) or "x-guidance" not in schema:
        return False
    rest = {key: value for key, value in schema.items() if key != "x-guidance"}
    numbers = [value for key, value in rest.items() if key != "type"]
    if schema["x-guidance"] == _OPTIONS and all(isinstance(number, Decimal) for number in numbers):
        low, high = (Bound(rest[key]) if key in rest else None for key in ("minimum", "maximum"))
        found = NumberSet(low=low, high=high, step=Fraction(rest.get("multipleOf", 1)))
        if schema == found.library_schema():
            return True
    raise ValueError("x-guidance in a schema is not supported")


def checked(value: Decimal) -> Decimal:
    """A bound or a step. Raises ValueError if it is too long."""
    if not value.is_finite() or abs(value.adjusted()) > MAX_EXPONENT or len(value.as_tuple().digits) > MAX_DIGITS:
        raise ValueError(f"has {str(value)[:40]}; expected at most {MAX_DIGITS} digits, and 1e{MAX_EXPONENT}")
    return value


def written(value: Decimal) -> str:
    """A regex of the canonical notation of a number of `const` or `enum`."""
    whole, behind = _parts(value)
    return f"{'-' if value < 0 else ''}{whole}" + (rf"\.{behind}" if behind else "")


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
    """The number of decimals, and the number without its decimal point: 2.5 -> 1, 25."""
    places = 0
    while 10**places % value.denominator:
        places += 1
    return places, value.numerator * 10**places // value.denominator


# ---------------------------------------------------------------------------------------------- ranges, digit by digit


def _parts(value: Decimal) -> tuple[str, str]:
    """The digits before and after the decimal point, without redundant zeros: 0.50 -> "0", "5"."""
    whole, _, decimals = f"{value:f}".lstrip("-").partition(".")
    return whole.lstrip("0") or "0", decimals.rstrip("0")


def _bounds(bound: Bound | None, sign: str) -> Iterator[str]:
    """The terminal of the numbers on one side of a bound, if any; `sign`: "" for a low one, "-" for a high one.

    At least 2: those that are. At least -2: all but those with a minus and more than 2.
    """
    if bound is not None:
        value = bound.value.copy_negate() if sign else bound.value
        if value > 0 or (value == 0 and bound.is_open):
            yield f"/{sign}(?:{_at_least(value, bound.is_open)})/"
        else:
            yield f"~/{'' if sign else '-'}(?:{_at_least(value.copy_abs(), not bound.is_open)})/"


def _at_least(value: Decimal, is_open: bool) -> str:
    """A regex of the unsigned numbers from `value` on, or above it, digit by digit.

    12.5 -> three digits and more; [2-9] and a digit, 1[3-9], both with any decimals; 12.[6-9] and 12.5, with more.
    """
    whole, behind = _parts(value)
    size, front = len(whole), rf"{_counted(whole)}\."
    larger = [f"{_counted(whole[:i])}[{int(d) + 1}-9][0-9]{{{size - i - 1}}}" for i, d in enumerate(whole) if d != "9"]
    found = [f"(?:{'|'.join([f'[1-9][0-9]{{{size},}}', *larger])}){_DECIMALS}"]
    found += [
        f"{front}{_counted(behind[: same.start()])}{same[1]}{{0,{len(same[0]) - 1}}}[{int(same[1]) + 1}-9][0-9]*"
        for same in re.finditer(r"([0-8])\1*", behind)
    ]
    if is_open:
        found.append(f"{front}{_counted(behind)}[0-9]*[1-9][0-9]*")
    else:
        found.append(f"{front}{_counted(behind)}[0-9]*" if behind else f"{_counted(whole)}{_DECIMALS}")
    return "|".join(found)


def _counted(digits: str) -> str:
    """10000 -> 10{4}."""
    return re.sub(r"(.)\1{3,}", lambda same: f"{same[1]}{{{len(same[0])}}}", digits)


# ------------------------------------------------------------------------------------------------------- multiples


def _multiples(step: Fraction) -> str:
    """A regex of the unsigned multiples of a step: those of 2.5 end with 0, 2.5, 5 or 7.5.

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
    """The numbers that end with these digits before and after the decimal point."""
    digits = behind.rstrip("0")
    front = f"(?:[1-9][0-9]*{whole}|{whole.lstrip('0') or '0'})"
    return rf"{front}\.{digits}0*" if digits else f"{front}(?:\\.0+)?" if behind else front
