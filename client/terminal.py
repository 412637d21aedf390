"""`pilotfish generate`: one prompt to the server, its tokens to the terminal, accepted drafts in their own colour.

The text goes to standard output and everything said about it to standard error, so that both can be redirected.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.table import Table
from rich.text import Text

from client.errors import RequestFailed
from client.options import Options, SpeculationMode, Verification
from client.results import Delta, Finished
from client.sync_client import Client

DRAFT_STYLE, TARGET_STYLE = "cyan", "magenta"
OK, FAILED, INTERRUPTED = 0, 1, 130


def main(argv: list[str]) -> int:
    """Run `pilotfish generate` with these arguments; the exit code. A wrong command line exits with 2."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    notes = Console(stderr=True, highlight=False)
    try:
        prompt = _prompt(arguments)
        with Client(arguments.address) as client:
            _run(client, prompt, arguments, notes)
    except (RequestFailed, OSError, UnicodeDecodeError) as error:
        return _fail(error, notes)
    except KeyboardInterrupt:
        notes.print("\ncancelled", markup=False)
        return INTERRUPTED
    return OK


def _fail(error: Exception, notes: Console) -> int:
    if isinstance(error, BrokenPipeError):  # `| head` has seen enough: not worth a word
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    else:
        notes.print(f"pilotfish generate: {error}", style="red", markup=False, soft_wrap=True)
    return FAILED


# --------------------------------------------------------------------------------------------------- command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pilotfish generate", description="Continue a prompt and stream the text.")
    parser.add_argument("prompt", nargs="?", help="text to continue; - reads standard input")
    parser.add_argument("--file", type=Path, metavar="PATH", help="read the prompt from this file; - is standard input")
    parser.add_argument("--address", default="127.0.0.1:50051", help="the server's gRPC address [%(default)s]")
    parser.add_argument("--compare", action="store_true", help="run once more without speculation; show both speeds")
    sampling = parser.add_argument_group("sampling and stopping (default: the server's)")
    sampling.add_argument("--temperature", type=float, help="0 is greedy")
    sampling.add_argument("--top-p", type=float, help="keep the likeliest tokens that reach this probability together")
    sampling.add_argument("--top-k", type=int, help="keep this many likeliest tokens; 0 keeps all")
    sampling.add_argument("--min-p", type=float, help="drop tokens less likely than this fraction of the likeliest")
    sampling.add_argument("--seed", type=int, help="repeats the output of an earlier run that had this seed")
    sampling.add_argument("--max-tokens", type=int, help="most tokens to generate")
    sampling.add_argument("--stop", action="append", default=[], help="text that ends the output; may be repeated")
    speculation = parser.add_argument_group("speculation (default: the server's)")
    speculation.add_argument("--speculation", choices=get_args(SpeculationMode), help="how many tokens to draft")
    speculation.add_argument("--num-draft-tokens", type=int, help="most drafts per round")
    speculation.add_argument("--proposer", help="who drafts, for instance model or ngram")
    speculation.add_argument("--verification", choices=get_args(Verification), help="rule that keeps or drops drafts")
    return parser


def _prompt(arguments: argparse.Namespace) -> str:
    if (arguments.prompt is None) == (arguments.file is None):
        _parser().error("expected a prompt or --file, one of them")
    if arguments.prompt == "-" or arguments.file == Path("-"):
        return sys.stdin.read()
    return arguments.file.read_text("utf-8") if arguments.file else str(arguments.prompt)


def _options(arguments: argparse.Namespace) -> Options:
    return Options(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        seed=arguments.seed,
        max_tokens=arguments.max_tokens,
        stop=arguments.stop,
        speculation=arguments.speculation,
        num_draft_tokens=arguments.num_draft_tokens,
        proposer=arguments.proposer,
        verification=arguments.verification,
    )


# ------------------------------------------------------------------------------------------------------- the run


@dataclass(frozen=True, slots=True)
class _Outcome:
    """All of one stream."""

    text: str
    finished: Finished


def _run(client: Client, prompt: str, arguments: argparse.Namespace, notes: Console) -> None:
    out = Console(highlight=False)
    options = _options(arguments)
    if out.is_terminal:
        notes.print(_legend())
        out.print(_printable(prompt), style="dim", end="", markup=False, soft_wrap=True)
    outcome = _stream(client, prompt, options, out)
    out.print()
    notes.print(_statistics(outcome.finished))
    if arguments.compare:
        # The seed that was used, or two sampled texts would differ for no fault of speculation's.
        plain = _stream(client, prompt, {**options, "seed": outcome.finished.seed, "speculation": "off"}, None)
        notes.print(_comparison(outcome, plain))


def _stream(client: Client, prompt: str, options: Options, out: Console | None) -> _Outcome:
    """Generate; show each delta on `out` as it arrives."""
    text: list[str] = []
    with closing(client.stream(prompt, **options)) as events:
        for event in events:
            if isinstance(event, Finished):
                return _Outcome("".join(text), event)
            text.append(event.text)
            if out is not None:
                show(event, out)
    raise AssertionError("a stream ended without an error and without its Finished")


def show(delta: Delta, out: Console) -> None:
    """Print new text, in colours on a terminal and as it is elsewhere."""
    if out.is_terminal:
        pieces = [
            (_printable(piece.text), DRAFT_STYLE if piece.from_draft else TARGET_STYLE) for piece in delta.pieces()
        ]
        out.print(Text.assemble(*pieces), end="", soft_wrap=True)
    else:
        out.file.write(delta.text)  # byte for byte what the model said
        out.file.flush()


def _printable(text: str) -> str:
    """Model output must not steer the terminal: escape sequences show as what they are."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


# ------------------------------------------------------------------------------------------------ what to say of it


def _legend() -> Text:
    return Text.assemble(
        ("prompt", "dim"), "  ", ("accepted draft", DRAFT_STYLE), "  ", ("target's own token", TARGET_STYLE), "\n"
    )


def _statistics(finished: Finished) -> Table:
    stats, speculation = finished.speculation_stats, finished.speculation
    table = Table.grid(padding=(0, 2))
    table.add_row("tokens", f"{finished.usage.completion_tokens} after {finished.usage.prompt_tokens} of prompt")
    table.add_row("speed", f"{finished.tokens_per_second:.1f} tokens/s")
    table.add_row("first token", f"{1000 * finished.timing.time_to_first_token_seconds:.0f} ms")
    if stats.drafted:
        table.add_row("acceptance", f"{stats.acceptance_rate:.1%} of {stats.drafted} drafts")
        table.add_row("tokens per round", f"{stats.acceptance_length:.2f} in {stats.rounds} rounds")
    drafting = f"{speculation.mode}, {speculation.proposer}, K={speculation.num_draft_tokens}"
    table.add_row("speculation", f"{drafting}, {speculation.verification}")
    table.add_row("finished by", _reason(finished))
    table.add_row("seed", str(finished.seed))
    return table


def _reason(finished: Finished) -> str:
    if finished.stop_string is not None:
        return f"{finished.finish_reason} string {finished.stop_string!r}"
    if finished.stop_token_id is not None:
        return f"{finished.finish_reason} token {finished.stop_token_id}"
    return finished.finish_reason


def _comparison(speculative: _Outcome, plain: _Outcome) -> Text:
    fast, slow = speculative.finished.tokens_per_second, plain.finished.tokens_per_second
    if speculative.text == plain.text:
        verdict = "the same text"
    elif speculative.finished.speculation.verification == "rejection":
        verdict = "another sample, as rejection may draw"
    else:
        verdict = "ANOTHER TEXT"
    return Text(f"without speculation: {slow:.1f} tokens/s, {verdict}; speculation is {fast / slow:.2f} times as fast")
