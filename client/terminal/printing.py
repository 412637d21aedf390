"""Text of a model on a terminal: accepted drafts in another colour, reasoning dimmed, escape sequences made visible."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from pilotfish.client.results import Delta, ReasoningMarks
from pilotfish.client.terminal.reasoning import Part, ReasoningSplitter

DRAFT_STYLE, TARGET_STYLE, REASONING_STYLE = "cyan", "magenta", "dim"


OK, FAILED, INTERRUPTED = 0, 1, 130  # exit codes


def consoles(*, no_color: bool) -> tuple[Console, Console]:
    """Return the consoles of standard output and standard error. NO_COLOR counts as well."""
    out, notes = (Console(stderr=stderr, highlight=False, no_color=no_color or None) for stderr in (False, True))
    return out, notes


def print_problem(text: str, notes: Console) -> None:
    """Print why something failed."""
    notes.print(text, style="red", markup=False, soft_wrap=True)


class AnswerPrinter:
    """Prints one output as it arrives, and collects its reasoning and its answer.

    On a terminal both are shown; otherwise only the answer is written, unchanged.
    """

    def __init__(self, out: Console, marks: ReasoningMarks | None) -> None:
        self._out, self._marks = out, marks
        self._splitter = ReasoningSplitter(marks)
        self._is_first, self._was_reasoning = True, False

    @property
    def answer(self) -> str:
        return self._splitter.answer

    @property
    def reasoning(self) -> str:
        return self._splitter.reasoning.rstrip()

    def add(self, delta: Delta) -> None:
        if self._is_first:
            self._splitter = ReasoningSplitter(self._marks, starts_in_reasoning=delta.starts_in_reasoning)
            self._is_first = False
        self._print(self._splitter.add(delta.pieces()))

    def end(self) -> None:
        """Print the text that is held back because it could begin a mark of the reasoning."""
        self._print(self._splitter.end())

    def _print(self, parts: Iterable[Part]) -> None:
        for part in parts:
            if self._out.is_terminal:
                if self._was_reasoning and not part.is_reasoning:
                    self._out.print("\n")
                self._was_reasoning = part.is_reasoning
                _show_part(part, self._out)
            elif not part.is_reasoning:
                self._out.file.write(part.text)
                self._out.file.flush()


def _show_part(part: Part, out: Console) -> None:
    style = DRAFT_STYLE if part.from_draft else TARGET_STYLE
    style = f"{REASONING_STYLE} {style}" if part.is_reasoning else style
    out.print(Text(printable(part.text), style), end="", soft_wrap=True)


def printable(text: str) -> str:
    """Make escape sequences visible, because model output must not control the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def legend() -> Text:
    """Return what the colours stand for."""
    return Text.assemble(("accepted draft", DRAFT_STYLE), "  ", ("target's own token", TARGET_STYLE))
