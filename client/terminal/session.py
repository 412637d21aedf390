"""A conversation with a running server on a terminal or a pipe: questions, streamed answers, and what went wrong."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import cast

from rich.console import Console

from pilotfish.client.errors import DeadlineExceededError, InvalidRequestError, RequestFailedError, UnavailableError
from pilotfish.client.options import GenerateOptions
from pilotfish.client.results import Finished, ModelInfo
from pilotfish.client.sync_client import Client
from pilotfish.client.terminal.conversation import Conversation
from pilotfish.client.terminal.printing import AnswerPrinter, print_problem

_CONTEXT_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"  # the server's reason
_MAKE_ROOM = "Nothing was dropped: /undo removes the last turn, /reset all turns."


class ChatSession:
    """The conversation, its settings and its model.

    Args:
        out: for answers. notes: for everything else.
        is_interactive: a person types, so that Ctrl-C ends an answer and not the program.
        timeout: maximum seconds of an answer.
    """

    def __init__(
        self, client: Client, model: ModelInfo, options: GenerateOptions, *, out: Console, notes: Console,
        is_interactive: bool, timeout: float | None = None,
    ) -> None:  # fmt: skip
        self.conversation, self.options, self.model = Conversation(), options, model
        self.shows_stats = False
        self.num_problems = 0
        self._client, self._out, self._notes = client, out, notes
        self.is_interactive, self._timeout = is_interactive, timeout

    def ask(self, question: str) -> None:
        """Send a question with the turns before it, and print the answer, which becomes the last turn."""
        self.conversation.ask(question)
        if not self._answer(self.options):
            self.conversation.undo()
            self.note("The question is not part of the conversation.")

    def regenerate(self) -> None:
        """Answer the last question again, with another seed. If nothing arrives, the old answer remains."""
        old = self.conversation.take_answer()
        if old is None:
            self.problem("There is no question yet.")
            return
        options = cast("GenerateOptions", {name: value for name, value in self.options.items() if name != "seed"})
        if not self._answer(options):
            self.conversation.turns += old
            self.note("The old answer remains.")
        elif old == self.conversation.turns[-1:] and not options.get("temperature"):
            self.note("The answer is the same: the temperature is 0. After /set temperature 0.8 answers differ.")

    def note(self, text: str) -> None:
        """Print a note that is no part of an answer."""
        self._notes.print(text, style="dim", markup=False, soft_wrap=True)

    def problem(self, text: str) -> None:
        """Print a problem, and count it."""
        self.num_problems += 1
        print_problem(text, self._notes)

    def _answer(self, options: GenerateOptions) -> bool:
        """Stream the answer, and add what arrives to the conversation; return whether anything did."""
        printer, end, problem = AnswerPrinter(self._out, self.model.reasoning_marks), None, ""
        options = {**options, "fit_context": True, "stop_in_answer": True}
        is_stopped = False
        try:
            stream = self._client.stream(self.conversation.messages, timeout=self._timeout, **options)
            with self._one_interrupt(), closing(stream) as events:
                for event in events:
                    if isinstance(event, Finished):
                        end = event
                    else:
                        printer.add(event)
        except KeyboardInterrupt:
            if not self.is_interactive:
                raise
            is_stopped = True
        except RequestFailedError as error:
            problem = self.explained(error)
        printer.end()
        has_text = bool(printer.answer or printer.reasoning)
        if has_text or end is not None:
            self._out.print()
            self.conversation.answer(printer.answer, printer.reasoning)
        if is_stopped:
            self.note("Stopped.")
        elif problem:
            self.problem(problem)
        elif end is not None:
            self._conclude(end, has_text=has_text)
        return has_text or end is not None

    @contextmanager
    def _one_interrupt(self) -> Iterator[None]:
        """Let the first Ctrl-C raise KeyboardInterrupt, and ignore others until the block has ended."""

        def interrupt(*_: object) -> None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            raise KeyboardInterrupt

        if not self.is_interactive:
            yield
            return
        before = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _conclude(self, end: Finished, *, has_text: bool) -> None:
        """Note why an answer ended, if not by itself, and its statistics."""
        used, context = end.usage.prompt_tokens + end.usage.completion_tokens, self.model.max_model_len
        if end.finish_reason == "length" and used >= context:
            self.note(f"The answer ends here because the context of {context} tokens is full. {_MAKE_ROOM}")
        elif end.finish_reason == "length":
            self.note(f"The answer ends here after the maximum of {end.usage.completion_tokens} tokens.")
        elif end.finish_reason != "stop":
            self.note(f"The server ended the answer: {end.finish_reason}.")
        elif not has_text:
            self.note("The answer is empty.")
        if self.shows_stats:
            self.note(statistics(end))

    def explained(self, error: RequestFailedError) -> str:
        """Return a sentence about an error, and what can be done."""
        match error:
            case UnavailableError():
                return f"The server does not answer: {error.message}. The conversation is kept; ask again later."
            case DeadlineExceededError():
                limit = "" if self._timeout is None else f" of {self._timeout:g} s"
                return f"The answer exceeds the timeout{limit}: {error.message}"
            case InvalidRequestError(reason=reason) if reason == _CONTEXT_EXCEEDED:
                context = f"the context of {self.model.max_model_len} tokens"
                return f"The conversation does not fit into {context}: {error.message}. {_MAKE_ROOM}"
        return str(error)


def statistics(end: Finished) -> str:
    """Return one line about an answer."""
    usage, drafts = end.usage, end.speculation_stats
    parts = [
        f"{usage.completion_tokens} tokens, {end.tokens_per_second:.1f} tokens/s",
        f"first token after {1000 * end.timing.time_to_first_token_seconds:.0f} ms",
        f"{drafts.accepted} of {drafts.drafted} drafts accepted" if drafts.drafted else "no drafts",
        f"{usage.cached_prompt_tokens} of {usage.prompt_tokens} prompt tokens cached",
    ]
    return "; ".join(parts)
