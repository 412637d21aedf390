"""Reads what a person or a pipe sends, one entry at a time: a line, or several as one. Independent of the server."""

from __future__ import annotations

import sys
from collections.abc import Callable

try:
    import readline  # gives `input` line editing and a history

    typed: Callable[[], str] = readline.get_line_buffer  # the text of the current line
except ImportError:  # not every Python has it
    typed = str

BLOCK = '"""'  # around an entry of several lines
SIGN, MORE_SIGN = "> ", ". "
ReadLine = Callable[[str], str]  # prints a sign, returns a line; raises EOFError at the end


def reader() -> ReadLine:
    """Return how lines of standard input are read: with signs and line editing from a terminal, else without."""
    if not sys.stdin.isatty():
        return _read_pipe
    return input


def _read_pipe(_sign: str) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n").removesuffix("\r")


def entry(read: ReadLine) -> str:
    r'''Return the next entry. A trailing \ continues it on the next line; """ begins lines that end with """.

    Raises EOFError at the end of the input.
    '''
    lines: list[str] = []
    try:
        lines.append(read(SIGN))
        if lines[0].lstrip().startswith(BLOCK):
            return _block(lines, read)
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(read(MORE_SIGN))
    except EOFError:
        if not lines:
            raise
    return "\n".join(lines)


def _block(lines: list[str], read: ReadLine) -> str:
    """Read the rest of a block; the lines of its marks count only if they have more text."""
    lines[0] = lines[0].lstrip().removeprefix(BLOCK)
    while BLOCK not in lines[-1]:
        lines.append(read(MORE_SIGN))
    lines[-1] = lines[-1].replace(BLOCK, "", 1)
    first, last = not lines[0], len(lines) - (not lines[-1])
    return "\n".join(lines[first:last])
