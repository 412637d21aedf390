"""`pilotfish generate`: sends one prompt to a server and prints its tokens, with accepted drafts in another colour.

The generated text is written to standard output, statistics and errors to standard error.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import get_args

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pilotfish.client.connection import Tls
from pilotfish.client.errors import RequestFailedError
from pilotfish.client.options import GenerateOptions, SpeculationMode, Verification
from pilotfish.client.results import Delta, Finished, TokenLogprob
from pilotfish.client.sync_client import Client

DRAFT_STYLE, TARGET_STYLE = "cyan", "magenta"
VARIABLE = "PILOTFISH_TOKEN"  # holds the token: a command-line flag would be readable by every user of the machine
OK, FAILED, INTERRUPTED = 0, 1, 130


def main(argv: list[str]) -> int:
    """Run `pilotfish generate` with these arguments and return the exit code. A wrong command line exits with 2."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    notes = Console(stderr=True, highlight=False)
    try:
        prompt = _prompt(arguments)
        with Client(arguments.address, token=os.environ.get(VARIABLE), tls=_tls(arguments)) as client:
            _run(client, prompt, arguments, notes)
    except (RequestFailedError, OSError, UnicodeDecodeError) as error:
        return _fail(error, notes)
    except KeyboardInterrupt:
        notes.print("\ncancelled", markup=False)
        return INTERRUPTED
    return OK


def _tls(arguments: argparse.Namespace) -> Tls | None:
    return Tls(authority=arguments.tls_ca) if arguments.tls or arguments.tls_ca else None


def _fail(error: Exception, notes: Console) -> int:
    if isinstance(error, BrokenPipeError):  # the reader (`| head`) closed the pipe: this is no error to report
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    else:
        notes.print(f"pilotfish generate: {error}", style="red", markup=False, soft_wrap=True)
    return FAILED


# --------------------------------------------------------------------------------------------------- command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pilotfish generate",
        description="Generate a completion and stream its text.",
        epilog=f"The environment variable {VARIABLE} contains the access token, if the server requires one.",
    )
    parser.add_argument("prompt", nargs="?", help="the prompt; - reads it from standard input")
    parser.add_argument("--file", type=Path, metavar="PATH", help="read the prompt from this file (- for stdin)")
    parser.add_argument("--address", default="127.0.0.1:50051", help="gRPC address of the server [%(default)s]")
    parser.add_argument("--tls", action="store_true", help="use TLS with the system's CA certificates")
    parser.add_argument("--tls-ca", metavar="PATH", help="use TLS with this CA bundle (PEM)")
    parser.add_argument("--compare", action="store_true", help="run again with and without speculation; show speeds")
    sampling = parser.add_argument_group("sampling and stopping (default: the server's)")
    sampling.add_argument("--temperature", type=float, help="sampling temperature; 0 is greedy")
    sampling.add_argument("--top-p", type=float, help="keep the most likely tokens up to this total probability")
    sampling.add_argument("--top-k", type=int, help="keep this many of the most likely tokens; 0 keeps all")
    sampling.add_argument("--min-p", type=float, help="drop tokens below this fraction of the highest probability")
    sampling.add_argument("--seed", type=int, help="random seed; the same seed gives the same output")
    sampling.add_argument("--max-tokens", type=int, help="maximum number of tokens to generate")
    sampling.add_argument("--stop", action="append", default=[], help="string that ends the output; can be repeated")
    _add_more_sampling(sampling)
    _add_structure(parser)
    speculation = parser.add_argument_group("speculation (default: the server's)")
    speculation.add_argument("--speculation", choices=get_args(SpeculationMode), help="how many tokens to draft")
    speculation.add_argument("--num-draft-tokens", type=int, help="maximum number of drafts per round (K)")
    speculation.add_argument("--proposer", help="proposer of drafts, for instance model or ngram")
    speculation.add_argument("--verification", choices=get_args(Verification), help="verification rule")
    return parser


def _add_more_sampling(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--min-tokens", type=int, help="minimum number of tokens before a stop or end-of-text token")
    group.add_argument("--repetition-penalty", type=float, help="above 1: penalise tokens of prompt and output")
    group.add_argument("--presence-penalty", type=float, help="subtracted from the logits of tokens in the output")
    group.add_argument("--frequency-penalty", type=float, help="subtracted per occurrence in the output")
    group.add_argument("--n", type=int, help="number of outputs; several are shown when all are complete")
    group.add_argument("--logprobs", type=int, metavar="N", help="list all tokens with N alternatives each")


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
    return GenerateOptions(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        seed=arguments.seed,
        repetition_penalty=arguments.repetition_penalty,
        presence_penalty=arguments.presence_penalty,
        frequency_penalty=arguments.frequency_penalty,
        n=arguments.n,
        logprobs=None if arguments.logprobs is None else True,
        top_logprobs=arguments.logprobs,
        json_schema=arguments.json_schema and arguments.json_schema.read_text("utf-8"),
        regex=arguments.regex,
        choice=arguments.choice,
        max_tokens=arguments.max_tokens,
        min_tokens=arguments.min_tokens,
        stop=arguments.stop,
        speculation=arguments.speculation,
        num_draft_tokens=arguments.num_draft_tokens,
        proposer=arguments.proposer,
        verification=arguments.verification,
    )


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


def _run(client: Client, prompt: str, arguments: argparse.Namespace, notes: Console) -> None:
    out = Console(highlight=False)
    options = _options(arguments)
    if out.is_terminal:
        notes.print(_legend())
        out.print(_printable(prompt), style="dim", end="", markup=False, soft_wrap=True)
    count = options.get("n") or 1
    outcomes = _stream(client, prompt, options, out if count == 1 else None)
    out.print()
    for index, outcome in enumerate(outcomes):
        if count > 1:
            notes.print(f"--- output {index}", style="dim")
            out.print(_printable(outcome.text) if out.is_terminal else outcome.text, markup=False, soft_wrap=True)
        if outcome.logprobs:
            notes.print(_logprobs(outcome.token_ids, outcome.logprobs))
        notes.print(_statistics(outcome.end))
    if arguments.compare:
        notes.print(_compared(client, prompt, {**options, "seed": outcomes[0].end.seed}))


def _compared(client: Client, prompt: str, options: GenerateOptions) -> Text:
    """Run plain decoding and speculation once more and compare them.

    Both use the seed of the first run, so that sampled texts can be compared, and their own cache salt, so that neither
    finds the prompt or the other's output in the prefix cache.
    """
    plain_options: GenerateOptions = {**options, "speculation": "off"}
    [plain, *_] = _stream(client, prompt, {**plain_options, "cache_salt": token_hex(8)}, None)
    [again, *_] = _stream(client, prompt, {**options, "cache_salt": token_hex(8)}, None)
    return _comparison(again.end, plain.end, same_text=again.text == plain.text)


def _stream(client: Client, prompt: str, options: GenerateOptions, out: Console | None) -> list[_Outcome]:
    """Generate every output and show each delta on `out` as it arrives."""
    outcomes = [_Outcome() for _ in range(options.get("n") or 1)]
    with closing(client.stream(prompt, **options)) as events:
        for event in events:
            outcome = outcomes[event.index]
            if isinstance(event, Finished):
                outcome.finished = event
                continue
            outcome.text += event.text
            outcome.token_ids += event.token_ids
            outcome.logprobs += event.logprobs
            if out is not None:
                show(event, out)
    return outcomes


def show(delta: Delta, out: Console) -> None:
    """Print new text, with colours on a terminal, otherwise unchanged."""
    if out.is_terminal:
        pieces = [
            (_printable(piece.text), DRAFT_STYLE if piece.from_draft else TARGET_STYLE) for piece in delta.pieces()
        ]
        out.print(Text.assemble(*pieces), end="", soft_wrap=True)
    else:
        out.file.write(delta.text)  # exactly the bytes that the model generated
        out.file.flush()


def _printable(text: str) -> str:
    """Make escape sequences visible, because model output must not control the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def _legend() -> Text:
    return Text.assemble(
        ("prompt", "dim"), "  ", ("accepted draft", DRAFT_STYLE), "  ", ("target's own token", TARGET_STYLE), "\n"
    )


# ------------------------------------------------------------------------------------------ statistics beside the text


def _statistics(finished: Finished) -> Table:
    """Return a table with the statistics of one output."""
    stats, speculation = finished.speculation_stats, finished.speculation
    table = Table.grid(padding=(0, 2))
    table.add_row("tokens", f"{finished.usage.completion_tokens} after a prompt of {finished.usage.prompt_tokens}")
    table.add_row("speed", f"{finished.tokens_per_second:.1f} tokens/s")
    table.add_row("first token", f"{1000 * finished.timing.time_to_first_token_seconds:.0f} ms")
    if stats.drafted:
        table.add_row("acceptance", f"{stats.acceptance_rate:.1%} of {stats.drafted} drafts")
        table.add_row("tokens per round", f"{stats.acceptance_length:.2f} in {stats.rounds} rounds")
        table.add_row("gain", f"{stats.gain_ratio:.2f} times plain decoding (estimate)")
    drafting = f"{speculation.mode}, {speculation.proposer}, K={speculation.num_draft_tokens}"
    table.add_row("speculation", f"{drafting}, {speculation.verification}")
    if finished.interruptions:
        table.add_row("interrupted", f"{finished.interruptions} times; statistics since the last interruption")
    table.add_row("finished by", _reason(finished))
    table.add_row("seed", str(finished.seed))
    return table


def _reason(finished: Finished) -> str:
    if finished.stop_string is not None:
        return f"{finished.finish_reason} string {finished.stop_string!r}"
    if finished.stop_token_id is not None:
        return f"{finished.finish_reason} token {finished.stop_token_id}"
    return finished.finish_reason


def _comparison(speculative: Finished, plain: Finished, *, same_text: bool) -> Text:
    """Return one line that compares a run with drafts and a run without."""
    fast, slow = speculative.tokens_per_second, plain.tokens_per_second
    if same_text:
        verdict = "the same text"
    elif speculative.speculation.verification == "rejection":
        verdict = "a different sample, as expected under rejection"
    else:
        verdict = "A DIFFERENT TEXT"
    return Text(f"without speculation: {slow:.1f} tokens/s, {verdict}; speculation is {fast / slow:.2f} times as fast")


def _logprobs(token_ids: Sequence[int], found: Sequence[TokenLogprob]) -> Table:
    """Return a table with one row per token: its id, its probability, and the most likely tokens at that position."""
    table = Table.grid(padding=(0, 2))
    for token, of in zip(token_ids, found, strict=True):
        top = "  ".join(f"{candidate.token_id} {candidate.logprob:.3f}" for candidate in of.top)
        table.add_row(str(token), f"{of.logprob:.3f}", top)
    return table
