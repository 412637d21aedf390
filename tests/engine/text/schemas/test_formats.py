"""Formats, each against a reader of its own: what it takes is accepted, and nothing else but what is listed."""

from __future__ import annotations

import ipaddress
import random
import re
import uuid
from collections.abc import Callable
from datetime import date

import pytest

from tests.engine.text.schemas.accepting import Accepted


def reads(reader: Callable[[str], object]) -> Callable[[str], bool]:
    def is_read(text: str) -> bool:
        try:
            reader(text)
        except ValueError:
            return False
        return True

    return is_read


def is_hostname(text: str) -> bool:
    """RFC 1123."""
    label = r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
    return len(text) <= 253 and all(re.fullmatch(label, part) and len(part) <= 63 for part in text.split("."))


def is_time(text: str) -> bool:
    """RFC 3339, but a second 60."""
    found = re.fullmatch(r"(\d\d):(\d\d):(\d\d)(\.\d+)?(?:[zZ]|[+-](\d\d):(\d\d))", text, re.ASCII)
    tops = (23, 59, 59, None, 23, 59)
    return bool(found) and all(
        top is None or int(part or 0) <= top for part, top in zip(found.groups(), tops, strict=True)
    )


def is_date_time(text: str) -> bool:
    return is_date(text[:10]) and text[10:11] in ("t", "T") and is_time(text[11:])


def is_date(text: str) -> bool:
    return bool(re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII)) and reads(date.fromisoformat)(text)


def is_email(text: str) -> bool:
    name, _, domain = text.rpartition("@")
    atom = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
    is_host = is_hostname(domain) or (domain[:1] + domain[-1:] == "[]" and READERS["ipv4"](domain[1:-1]))
    return len(name) <= 64 and bool(re.fullmatch(rf"{atom}(\.{atom})*", name)) and is_host


READERS: dict[str, Callable[[str], bool]] = {
    "ipv4": reads(ipaddress.IPv4Address),
    "ipv6": lambda text: "%" not in text and reads(ipaddress.IPv6Address)(text),
    "hostname": is_hostname,
    "uuid": lambda text: (
        reads(uuid.UUID)(text) and bool(re.fullmatch("[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", text))
    ),
    "time": is_time,
    "date": is_date,
    "date-time": is_date_time,
    "email": is_email,
}
SAMPLES = {
    "ipv4": ["127.0.0.1", "255.255.255.255", "256.1.1.1", "1.2.3", "01.2.3.4"],
    "ipv6": [
        "::", "::1", "1::", "1:2:3:4:5:6:7:8", "1::8", "::ffff:192.0.2.1", "64:ff9b::192.0.2.33", "1:2:3:4:5:6:1.2.3.4",
        "1:2:3:4:5:6:7::", "::2:3:4:5:6:7:8", "1:2:3:4:5::1.2.3.4", "fe80::1%eth0", "1:2:3:4:5:6:7:1.2.3.4",
        "::1.2.3.256", "1::2::3", ":1", "12345::",
    ],
    "hostname": [
        "a", "a-b.example.com", "xn--bcher-kva.example", "-a", "a-", "a..b", "a.", "x" * 63, "x" * 64,
        ".".join(["x" * 62] * 4), ".".join(["x" * 63] * 3 + ["x" * 61]), ".".join(["x" * 63] * 3 + ["x" * 62]), "a_b",
    ],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000",
             "123e4567e89b12d3a456426614174000", "g23e4567-e89b-12d3-a456-42661417400"],
    "time": ["12:34:56Z", "23:59:60Z",
             "12:00:60Z", "12:34:56", "24:00:00Z", "12:34:56.78+23:59", "00:00:00-24:00"],
    "date": ["2024-02-29", "2023-02-29", "1900-02-29", "2000-02-29", "2024-04-31", "2024-1-1"],
    "date-time": ["2024-02-29T12:00:00Z", "2024-02-30t12:00:00z", "2024-02-28 12:00:00Z", "2024-02-28T12:00:60Z"],
    "email": ["a@b", "a.b+c@d.example", "a..b@c", "a@[127.0.0.1]", "a@[1.2.3]", "@b", "a@", "a@-b",
              "x" * 64 + "@a", "x" * 65 + "@a"],
}  # fmt: skip


def changed(text: str, rng: random.Random) -> str:
    """One character more, less or another, or a piece of it twice."""
    at, end = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
    char = rng.choice([*text, *"0129:.-af@TZg"])
    return rng.choice([text[:at] + char + text[at:], text[:at] + text[at + 1 :], text[:at] + char + text[at + 1 :],
                       text[:end] + text[at:]])  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_a_format_accepts_what_its_reader_takes(name: str) -> None:
    accepted, rng = Accepted({"type": "string", "format": name}), random.Random(0)
    texts = [*SAMPLES[name], *(changed(rng.choice(SAMPLES[name]), rng) for _ in range(250))]
    wrong = [text for text in texts if (f'"{text}"' in accepted) != READERS[name](text)]
    assert wrong == []
    assert {READERS[name](text) for text in texts} == {True, False}


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("duration", ["P1D", "PT1H", "P1Y2M3DT4H5M6S", "P3W"], ["P", "P1D2H", "PT", "P1W1D", "1D", "P1Y2D"]),
        (
            "uri",
            [
                "http://a/b?c#d",
                "urn:x:y",
                "http://[::ffff:1.2.3.4]:80/",
                "a:",
                "http://u:p@h/%41",
                "file:///x",
                "a:/b//c",
            ],
            [
                "//a/b",
                "a",
                "http://a b",
                "http://[::1",
                "http://a/%4",
                "http://a:x/",
                "1a:b",
                "a:b#c#d",
                "http://[::1]x",
            ],
        ),
    ],
)
def test_a_format_of_an_rfc(name: str, valid: list[str], invalid: list[str]) -> None:
    accepted = Accepted({"type": "string", "format": name})
    assert [text for text in valid if f'"{text}"' not in accepted] == []
    assert [text for text in invalid if f'"{text}"' in accepted] == []
