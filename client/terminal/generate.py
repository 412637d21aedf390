"""`pilotfish generate`: sends one prompt to a server and prints its tokens, with accepted drafts in another colour.

The generated text is written to standard output, statistics and errors to standard error.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pilotfish.client.errors import RequestFailedError
from pilotfish.client.options import ChatMessage, GenerateOptions, Prompt
from pilotfish.client.results import Finished, TokenLogprob
from pilotfish.client.sync_client import Client
from pilotfish.client.terminal import settings
from pilotfish.client.terminal.comparison import compare
from pilotfish.client.terminal.printing import (
    FAILED,
    INTERRUPTED,
    OK,
    AnswerPrinter,
    consoles,
    legend,
    print_problem,
    printable,
)


def main(argv: list[str]) -> int:
    """Run `pilotfish generate` with these arguments and return the exit code. A wrong command line exits with 2."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    out, notes = consoles(no_color=arguments.no_color)
    try:
        prompt = _prompt(arguments)
        with settings.connect(arguments) as client:
            _run(client, prompt, arguments, out, notes)
    except (RequestFailedError, OSError, UnicodeDecodeError) as error:
        return _fail(error, notes)
    except KeyboardInterrupt:
        notes.print("\ncancelled", markup=False)
        return INTERRUPTED
    return OK


def _fail(error: Exception, notes: Console) -> int:
    if isinstance(error, BrokenPipeError):  # the reader (`| head`) closed the pipe: this is no error to report
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    else:
        print_problem(f"pilotfish generate: {error}", notes)
    return FAILED


# --------------------------------------------------------------------------------------------------- command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pilotfish generate",
        description="Generate text and stream it: the answer of a chat model, or the continuation of a base model.",
        epilog=settings.TOKEN_HELP,
    )
    parser.add_argument("prompt", nargs="?", help="the prompt; - reads it from standard input")
    parser.add_argument("--file", type=Path, metavar="PATH", help="read the prompt from this file (- for stdin)")
    parser.add_argument(
        "--raw", action="store_true", help="continue the prompt as it is; default: the user's turn in the chat template"
    )
    settings.add_connection(parser)
    parser.add_argument(
        "--compare", action="store_true", help="run again by turns with and without drafts; show the gain"
    )
    sampling = settings.add_settings(parser, "sampling and stopping", settings.SAMPLING)
    sampling.add_argument("--n", type=int, help="number of outputs; several are shown when all are complete")
    sampling.add_argument("--logprobs", type=int, metavar="N", help="list all tokens with N alternatives each")
    _add_structure(parser)
    settings.add_settings(parser, "speculation", settings.SPECULATION)
    return parser


def _add_structure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("structure of the output, one of these").add_mutually_exclusive_group()
    group.add_argument("--json-schema", type=Path, metavar="FILE", help="JSON that is valid under this JSON Schema")
    group.add_argument("--regex", help="text that matches this regular expression")
    group.add_argument("--choice", action="append", metavar="TEXT", help="one of these texts; can be repeated")


def _prompt(arguments: argparse.Namespace) -> str:
    if (arguments.prompt is None) == (arguments.file is None):
        _parser().error("expected either a prompt or --file")
    if arguments.prompt == "-" or arguments.file == Path("-"):
        return sys.stdin.read()
    return arguments.file.read_text("utf-8") if arguments.file else str(arguments.prompt)


def _options(arguments: argparse.Namespace) -> GenerateOptions:
    return {
        **settings.settings_of(arguments),
        "n": arguments.n,
        "logprobs": None if arguments.logprobs is None else True,
        "top_logprobs": arguments.logprobs,
        "json_schema": arguments.json_schema and arguments.json_schema.read_text("utf-8"),
        "regex": arguments.regex,
        "choice": arguments.choice,
    }


# ------------------------------------------------------------------------------------------------------- the run


@dataclass(slots=True)
class _Outcome:
    """One output of a stream while it is received."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def end(self) -> Finished:
        """Return how the output ended. The stream must be complete."""
        assert self.finished is not None, "a stream ended without an error and without its Finished"
        return self.finished


def _run(client: Client, text: str, arguments: argparse.Namespace, out: Console, notes: Console) -> None:
    prompt: Prompt = text
    options, marks = _options(arguments), None
    model = None if arguments.raw else client.model_info()
    if model is not None and model.answers_questions:
        prompt = [ChatMessage(role="user", content=text)]
        marks = model.reasoning_marks if out.is_terminal else None  # elsewhere the text is written as it is
    if out.is_terminal:
        notes.print(Text.assemble(("prompt", "dim"), "  ", legend(), "\n"))
        out.print(printable(text), style="dim", end="" if prompt is text else "\n", markup=False, soft_wrap=True)
    count = options.get("n") or 1
    printer = AnswerPrinter(out, marks) if count == 1 else None
    outcomes = _stream(client, prompt, options, arguments.timeout, printer)
    out.print()
    for index, outcome in enumerate(outcomes):
        if count > 1:
            notes.print(f"--- output {index}", style="dim")
            out.print(printable(outcome.text) if out.is_terminal else outcome.text, markup=False, soft_wrap=True)
        if outcome.logprobs:
            notes.print(_logprobs(outcome.token_ids, outcome.logprobs))
        notes.print(_statistics(outcome.end))
    if arguments.compare:
        seeded: GenerateOptions = {**options, "seed": outcomes[0].end.seed}  # so that sampled texts are the same
        notes.print(_table(compare(client, prompt, seeded, arguments.timeout).lines()))


def _stream(
    client: Client, prompt: Prompt, options: GenerateOptions, timeout: float | None, printer: AnswerPrinter | None
) -> list[_Outcome]:
    """Generate every output, and print each delta as it arrives."""
    outcomes = [_Outcome() for _ in range(options.get("n") or 1)]
    with closing(client.stream(prompt, timeout=timeout, **options)) as events:
        for event in events:
            outcome = outcomes[event.index]
            if isinstance(event, Finished):
                outcome.finished = event
                continue
            outcome.text += event.text
            outcome.token_ids += event.token_ids
            outcome.logprobs += event.logprobs
            if printer is not None:
                printer.add(event)
    if printer is not None:
        printer.end()
    return outcomes


# ------------------------------------------------------------------------------------------ statistics beside the text


def _statistics(finished: Finished) -> Table:
    """Return a table with the statistics of one output."""
    stats, speculation = finished.speculation_stats, finished.speculation
    table = _table([
        ("tokens", f"{finished.usage.completion_tokens} after a prompt of {finished.usage.prompt_tokens}"),
        ("speed", f"{finished.tokens_per_second:.1f} tokens/s"),
        ("first token", f"{1000 * finished.timing.time_to_first_token_seconds:.0f} ms"),
    ])  # fmt: skip
    if stats.drafted:
        table.add_row("acceptance", f"{stats.acceptance_rate:.1%} of {stats.drafted} drafts")
        table.add_row("tokens per round", f"{stats.acceptance_length:.2f} in {stats.rounds} rounds")
    drafting = f"{speculation.mode}, {speculation.proposer}, K={speculation.num_draft_tokens}"
    table.add_row("speculation", f"{drafting}, {speculation.verification}")
    if finished.interruptions:
        table.add_row("interrupted", f"{finished.interruptions} times; statistics since the last interruption")
    table.add_row("finished by", _reason(finished))
    table.add_row("seed", str(finished.seed))
    return table


def _table(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _reason(finished: Finished) -> str:
    if finished.stop_string is not None:
        return f"{finished.finish_reason} string {finished.stop_string!r}"
    if finished.stop_token_id is not None:
        return f"{finished.finish_reason} token {finished.stop_token_id}"
    return finished.finish_reason


def _logprobs(token_ids: Sequence[int], found: Sequence[TokenLogprob]) -> Table:
    """Return a table with one row per token: its id, its probability, and the most likely tokens at that position."""
    table = Table.grid(padding=(0, 2))
    for token, of in zip(token_ids, found, strict=True):
        top = "  ".join(f"{candidate.token_id} {candidate.logprob:.3f}" for candidate in of.top)
        table.add_row(str(token), f"{of.logprob:.3f}", top)
    return table
