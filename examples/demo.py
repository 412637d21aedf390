"""`make demo`: serve the embedded pair, complete code it has never seen, compare with plain decoding, stop.

Each function comes from a module of the standard library that was held out of training. It is completed twice over
gRPC, with speculation and without; exits with 0 if every pair of texts is identical, as exactness demands.
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

from rich.console import Console
from rich.rule import Rule
from rich.table import Table

from client import Client, Completion, Delta, Finished
from client.terminal import DRAFT_STYLE, TARGET_STYLE, show
from models.corpus import held_out_prompts

NUM_PROMPTS = 3
MAX_TOKENS = 96
START_SECONDS, STOP_SECONDS = 120, 30


def main() -> int:
    """The whole demonstration; the exit code."""
    out = Console(highlight=False)
    prompts = [prompt for prompt in held_out_prompts(50) if len(prompt) <= 1500][:NUM_PROMPTS]
    with running_server(out) as address, Client(address) as client:
        for speculation in ("auto", "off"):  # the first pass through anything is slow
            client.generate(prompts[0], max_tokens=16, speculation=speculation)
        watch(client, prompts[0], out)
        pairs = [compare(client, prompt) for prompt in prompts]
    out.print(report(pairs))
    return conclude(pairs, out)


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
    """Two ports that nobody listens on just now."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


def wait_until_serving(process: subprocess.Popen[bytes], address: str) -> None:
    """Return when the server is healthy; give up at once if it has died."""
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
    """Ask the server to drain and end."""
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


def compare(client: Client, prompt: str) -> tuple[Completion, Completion]:
    """The same greedy completion with speculation and without."""
    return (
        client.generate(prompt, max_tokens=MAX_TOKENS),
        client.generate(prompt, max_tokens=MAX_TOKENS, speculation="off"),
    )


def report(pairs: list[tuple[Completion, Completion]]) -> Table:
    """One row per function."""
    table = Table("function", "tokens", "rate", "length", "tokens/s", "plain", "gain", "same")
    for number, (fast, plain) in enumerate(pairs, 1):
        table.add_row(str(number), *figures([fast.finished], [plain.finished]), same_text([(fast, plain)]))
    return table


def figures(fast: list[Finished], plain: list[Finished]) -> list[str]:
    """Tokens, acceptance rate and length, speed with and without speculation and their ratio, of some runs together."""
    stats = [finished.speculation_stats for finished in fast]
    drafted, accepted, rounds = (sum(getattr(s, name) for s in stats) for name in ("drafted", "accepted", "rounds"))
    return [
        str(sum(finished.usage.completion_tokens for finished in fast)),
        f"{accepted / drafted:.1%}" if drafted else "no drafts",
        f"{1 + accepted / rounds:.2f}" if rounds else "1.00",
        f"{speed(fast):.1f}",
        f"{speed(plain):.1f}",
        f"{speed(fast) / speed(plain):.2f}x",
    ]


def speed(runs: list[Finished]) -> float:
    """Generated tokens per second over all of the runs, queueing left out."""
    seconds = sum(run.timing.total_seconds - run.timing.queue_seconds for run in runs)
    return sum(run.usage.completion_tokens for run in runs) / seconds if seconds > 0 else math.nan


def same_text(pairs: list[tuple[Completion, Completion]]) -> str:
    """Whether speculation changed nothing."""
    return "yes" if all(fast.token_ids == plain.token_ids for fast, plain in pairs) else "NO"


def conclude(pairs: list[tuple[Completion, Completion]], out: Console) -> int:
    """Say what came of it."""
    tokens, rate, length, fast, plain, gain = figures([f.finished for f, _ in pairs], [p.finished for _, p in pairs])
    out.print(f"acceptance rate      {rate}   drafts kept of drafts made, over {tokens} tokens")
    out.print(f"acceptance length    {length}   tokens per pass of the target that had drafts")
    out.print(f"with speculation     {fast} tokens/s, {gain} of plain decoding")
    out.print(f"without speculation  {plain} tokens/s")
    if same_text(pairs) != "yes":
        out.print("Speculation changed an output. It never may: please report this.", style="bold red")
        return 1
    out.print("Speculation changed no token, as promised. The server has stopped.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
