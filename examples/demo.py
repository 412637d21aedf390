"""`make demo`: serve the embedded pair, complete unseen code, compare with plain decoding, then stop the server.

Each function is from a module of the standard library that was held out from training. The server completes it over
gRPC without speculation, with fixed numbers of drafts and with AUTO, all twice, the second time in reverse order. Every
call has its own cache salt, so that it finds nothing of another call in the prefix cache. The exit code is 0 if all
texts of a function are identical, as exactness requires.
"""

from __future__ import annotations

import math
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

from rich.console import Console
from rich.rule import Rule
from rich.table import Table

from pilotfish.client import Client, Completion, Delta, Finished
from pilotfish.client.options import GenerateOptions
from pilotfish.client.terminal import DRAFT_STYLE, TARGET_STYLE, show
from pilotfish.models.corpus import held_out_prompts

NUM_PROMPTS = 3
MAX_TOKENS = 96
AUTO, PLAIN = "auto", "none"
WAYS: dict[str, GenerateOptions] = {
    PLAIN: {"speculation": "off"},
    "2": {"speculation": "fixed", "num_draft_tokens": 2},
    "4": {"speculation": "fixed", "num_draft_tokens": 4},
    AUTO: {"speculation": "auto"},
}
ROUNDS = 2
Runs = dict[str, list[Completion]]  # completions of one function, by way of decoding
START_SECONDS, STOP_SECONDS = 120, 30


def main(num_prompts: int = NUM_PROMPTS, rounds: int = ROUNDS) -> int:
    """Run the whole demonstration, or a shorter one, and return the exit code."""
    out = Console(highlight=False)
    prompts = [prompt for prompt in held_out_prompts(50) if len(prompt) <= 1500][:num_prompts]
    with running_server(out) as address, Client(address) as client:
        watch(client, prompts[0], out)
        runs = [compare(client, prompt, rounds) for prompt in prompts]
    out.print(report(runs))
    return conclude(runs, out)


@contextmanager
def running_server(out: Console) -> Iterator[str]:
    """`pilotfish serve` on free ports; yields the gRPC address, then stops it with SIGTERM."""
    grpc_port, http_port = free_ports()
    pilotfish = str(Path(sys.executable).with_name("pilotfish"))
    command = [pilotfish, "serve", f"--grpc-port={grpc_port}", f"--http-port={http_port}"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: S603 - our own command
        try:
            out.print(f"pilotfish serve: process {process.pid}, gRPC on port {grpc_port}, HTTP on port {http_port}")
            wait_until_serving(process, f"127.0.0.1:{grpc_port}")
            yield f"127.0.0.1:{grpc_port}"
            stop(process)
        except BaseException:
            process.kill()
            process.wait()
            log.seek(0)
            out.print(f"The server's log:\n{log.read()}", markup=False)
            raise


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
    """Ask the server to drain and stop."""
    process.send_signal(signal.SIGTERM)
    if code := process.wait(STOP_SECONDS):
        raise RuntimeError(f"the server exited with {code} after SIGTERM")


def watch(client: Client, prompt: str, out: Console) -> None:
    """Show one completion as it streams."""
    out.print(Rule("a function that the models have never seen"))
    out.print(prompt, style="dim", end="", markup=False, soft_wrap=True)
    for event in client.stream(prompt, max_tokens=MAX_TOKENS):
        if isinstance(event, Delta):
            show(event, out)
    out.print()
    out.print(Rule(f"[dim]prompt[/]  [{DRAFT_STYLE}]accepted draft[/]  [{TARGET_STYLE}]target's own token[/]"))


def compare(client: Client, prompt: str, rounds: int) -> Runs:
    """Run the same greedy completion in every way; the order is reversed in every other round."""
    runs: Runs = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in list(WAYS)[:: -1 if number % 2 else 1]:
            options: GenerateOptions = {**WAYS[way], "max_tokens": MAX_TOKENS, "cache_salt": token_hex(8)}
            runs[way].append(client.generate(prompt, **options))
    return runs


def report(runs: list[Runs]) -> Table:
    """Return one row per function: tokens, plain tokens per second, and speed-ups."""
    table = Table("function", "tokens", "plain tokens/s", *(f"drafts: {way}" for way in WAYS if way != PLAIN), "same")
    for number, one in enumerate(runs, 1):
        tokens = one[PLAIN][0].finished.usage.completion_tokens
        gains = [f"{gain([one], way):.2f}x" for way in WAYS if way != PLAIN]
        table.add_row(str(number), str(tokens), f"{speed(ended([one], PLAIN)):.1f}", *gains, same_text([one]))
    return table


def ended(runs: list[Runs], way: str) -> list[Finished]:
    """Return how every run of one way ended."""
    return [completion.finished for one in runs for completion in one[way]]


def gain(runs: list[Runs], way: str) -> float:
    """Return the speed-up of a way over plain decoding."""
    return speed(ended(runs, way)) / speed(ended(runs, PLAIN))


def speed(runs: list[Finished]) -> float:
    """Return generated tokens per second over all of the runs, without time in the queue."""
    seconds = sum(run.timing.total_seconds - run.timing.queue_seconds for run in runs)
    return sum(run.usage.completion_tokens for run in runs) / seconds if seconds > 0 else math.nan


def same_text(runs: list[Runs]) -> str:
    """Return whether all ways gave the same text."""
    texts = [{completion.token_ids for completions in one.values() for completion in completions} for one in runs]
    return "yes" if all(len(of_one) == 1 for of_one in texts) else "NO"


def conclude(runs: list[Runs], out: Console) -> int:
    """Print the conclusion and return the exit code."""
    stats = [finished.speculation_stats for finished in ended(runs, AUTO)]
    drafted, accepted, rounds = (sum(getattr(s, name) for s in stats) for name in ("drafted", "accepted", "rounds"))
    rate, length = (accepted / drafted, 1 + accepted / rounds) if drafted else (0.0, 1.0)
    best = max((way for way in WAYS if way not in (PLAIN, AUTO)), key=lambda way: gain(runs, way))
    out.print(f"without speculation  {speed(ended(runs, PLAIN)):.1f} tokens/s")
    out.print(f"auto                 {speed(ended(runs, AUTO)):.1f} tokens/s, {gain(runs, AUTO):.2f} times as fast")
    out.print(
        f"best fixed K ({best})     {speed(ended(runs, best)):.1f} tokens/s, {gain(runs, best):.2f} times as fast"
    )
    out.print(f"acceptance rate      {rate:.1%} of {drafted} drafts, with auto")
    out.print(f"acceptance length    {length:.2f} tokens per target pass with drafts")
    if same_text(runs) != "yes":
        out.print("Speculation changed an output. This is a bug; please report it.", style="bold red")
        return 1
    out.print("Speculation changed no token, as promised. The server has stopped.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
