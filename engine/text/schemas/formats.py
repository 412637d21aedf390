"""What `format` accepts, as patterns all of which match."""

from __future__ import annotations

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_MONTH_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"  # Python's and most other dates lack the year 0
_DATE = f"(?:{_YEAR}-{_MONTH_DAY}|(?:{_LEAP_YEAR})-02-29)"
# A second 60 is one only where it is 23:59 in UTC, and only on days that are not known long before.
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_GROUP = "[0-9a-fA-F]{1,4}"


def _ipv6() -> str:
    """Eight groups, of which the last two may be IPv4, and `::` may stand for one or more (RFC 4291)."""
    found = [f"(?:{_GROUP}:){{7}}{_GROUP}", f"(?:{_GROUP}:){{6}}{_IPV4}"]
    for before in range(8):
        front = f"{_GROUP}(?::{_GROUP}){{{before - 1}}}::" if before else "::"
        after = 7 - before
        ends = [f"(?:{_GROUP}(?::{_GROUP}){{0,{after - 1}}})?"] if after else [""]
        if after >= 2:
            ends.append(f"(?:{_GROUP}:){{0,{after - 2}}}{_IPV4}")
        found.append(f"{front}(?:{'|'.join(ends)})")
    return f"(?:{'|'.join(found)})"


_IPV6 = _ipv6()
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]+"

# RFC 3986
_ESCAPE = "%[0-9a-fA-F]{2}"
_REGISTERED = r"a-zA-Z0-9\-._~!$&'()*+,;="
_SEGMENT = f"(?:[{_REGISTERED}:@]|{_ESCAPE})"
_AUTHORITY = (
    rf"(?:(?:[{_REGISTERED}:]|{_ESCAPE})*@)?"
    rf"(?:\[(?:{_IPV6}|[vV][0-9a-fA-F]+\.[{_REGISTERED}:]+)\]|(?:[{_REGISTERED}]|{_ESCAPE})*)(?::[0-9]*)?"
)
_PATH = f"(?://{_AUTHORITY}(?:/{_SEGMENT}*)*|/(?:{_SEGMENT}+(?:/{_SEGMENT}*)*)?|{_SEGMENT}+(?:/{_SEGMENT}*)*)?"
_QUERY = f"(?:[{_REGISTERED}:@/?]|{_ESCAPE})*"

# RFC 3339, appendix A
_CLOCK = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_CALENDAR = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"

_FORMATS = {
    "date": (_DATE,),
    "time": (_TIME,),
    "date-time": (f"{_DATE}[tT]{_TIME}",),
    "duration": (f"P(?:{_CALENDAR}(?:{_CLOCK})?|{_CLOCK}|[0-9]+W)",),
    # RFC 5321 without quoted local parts, and of addresses in brackets those of IPv4
    "email": (rf"{_ATOM}(?:\.{_ATOM})*@(?:{_HOSTNAME}|\[{_IPV4}\])", r"[^@]{1,64}@.{1,253}"),
    "hostname": (_HOSTNAME, ".{1,253}"),
    "ipv4": (_IPV4,),
    "ipv6": (_IPV6,),
    "uuid": ("[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",),
    "uri": (rf"[a-zA-Z][a-zA-Z0-9+\-.]*:{_PATH}(?:\?{_QUERY})?(?:#{_QUERY})?",),
}


def patterns_of(name: str) -> list[str]:
    """The patterns of a format. ValueError: it is not known."""
    if name not in _FORMATS:
        raise ValueError(f"{name!r} is not supported; expected {', '.join(_FORMATS)}")
    return [f"^(?:{pattern})$" for pattern in _FORMATS[name]]
