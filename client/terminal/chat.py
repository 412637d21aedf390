"""`pilotfish chat`: a conversation with a chat model on a running server.

Answers are written to standard output, everything else to standard error. From a pipe, each line is a question.
"""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.text import Text

from pilotfish.client.connection import Retry
from pilotfish.client.errors import RequestFailedError, UnavailableError
from pilotfish.client.terminal import commands, settings
from pilotfish.client.terminal.printing import FAILED, INTERRUPTED, OK, consoles, legend, print_problem
from pilotfish.client.terminal.prompt_lines import ReadLine, entry, reader, typed
from pilotfish.client.terminal.session import ChatSession

# A stream waits about six seconds for its server to come back: a person at the prompt can ask again.
RETRY = Retry(resume_attempts=6)


def main(argv: list[str]) -> int:
    """Run `pilotfish chat` with these arguments and return the exit code. A wrong command line exits with 2."""
    arguments = _parser().parse_args(argv)
    out, notes = consoles(no_color=arguments.no_color)
    try:
        return _run(arguments, out, notes)
    except UnavailableError as error:
        hint = "start one with `pilotfish serve MODEL`, or name another one with --address"
        problem = f"the server at {arguments.address} does not answer ({error.message}); {hint}"
    except (RequestFailedError, OSError) as error:
        problem = str(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    print_problem(f"pilotfish chat: {problem}", notes)
    return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pilotfish chat",
        description="Talk to a chat model on a running server. /help lists the commands of the conversation.",
        epilog=settings.TOKEN_HELP,
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="system prompt [none]")
    parser.add_argument("--stats", action="store_true", help="show speed, drafts and cached tokens after each answer")
    settings.add_connection(parser)
    settings.add_settings(parser, "sampling and stopping", settings.SAMPLING)
    settings.add_settings(parser, "speculation", settings.SPECULATION)
    return parser


def _run(arguments: argparse.Namespace, out: Console, notes: Console) -> int:
    is_interactive = sys.stdin.isatty()
    with settings.connect(arguments, RETRY) as client:
        model = client.model_info()
        if not model.has_chat_template:
            problem = f"{model.model} has no chat template; `pilotfish generate PROMPT` continues a text with it"
            print_problem(f"pilotfish chat: {problem}", notes)
            return FAILED
        session = ChatSession(
            client, model, settings.settings_of(arguments), out=out, notes=notes, is_interactive=is_interactive,
            timeout=arguments.timeout,
        )  # fmt: skip
        session.conversation.system, session.shows_stats = arguments.system, arguments.stats
        if is_interactive:
            session.note(
                f"{model.model}, context of {model.max_model_len} tokens. /help lists commands, Ctrl-D leaves."
            )
            if not model.answers_questions:
                session.note("This model completes Python code and answers no questions; `pilotfish generate` fits it.")
            notes.print(Text.assemble(legend(), "\n"))
            _talk(session, reader())
            return OK
        _talk(session, reader())
        return FAILED if session.num_problems else OK


def _talk(session: ChatSession, read: ReadLine) -> None:
    """Answer one entry after the other, until the input ends or Ctrl-C comes twice at an empty prompt."""
    was_interrupted = False
    while True:
        try:
            text = entry(read)
            was_interrupted = False
            if text.startswith("/") and "\n" not in text:
                commands.run(text, session)
            elif text.strip():
                session.ask(text)
        except EOFError:
            return
        except UnicodeError:
            session.problem("The line is not valid UTF-8.")
        except KeyboardInterrupt:
            if not session.is_interactive:
                raise
            is_empty = not typed()
            session.note("")
            if was_interrupted and is_empty:
                return
            was_interrupted = is_empty
            if is_empty:
                session.note("Ctrl-C again or Ctrl-D leaves.")
