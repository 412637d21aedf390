"""`pilotfish generate` as a person and as a pipe sees it."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
from google.rpc import status_pb2

from client import terminal
from pilotfish.v1 import generation_pb2 as pb
from tests.client.fake_server import FINISHED, invalid

LOGPROB = pb.TokenLogprob(logprob=-0.5, top=[pb.Candidate(token_id=3, logprob=-0.5)])
COMMAND = [sys.executable, "-c", "import sys; from client.terminal import main; sys.exit(main(sys.argv[1:]))"]


def generate(fake, *arguments):
    return terminal.main(["--address", fake.address, *arguments])


def test_text_to_stdout_figures_to_stderr(fake, capsys):
    assert generate(fake, "def f():") == 0
    out, err = capsys.readouterr()
    assert out == " retürn a+b\n"
    for figure in (
        "4 after 3 of prompt",
        "2.0 tokens/s",
        "750 ms",
        "25.0% of 8",
        "2.00 in 2",
        "'\\n\\n'",
        str(2**64 - 1),
    ):
        assert figure in err


def test_an_interruption_is_told(fake, capsys):
    generate(fake, "x")
    assert "interrupted" not in capsys.readouterr().err
    fake.finished.interruptions = 2
    generate(fake, "x")
    assert "2 times" in capsys.readouterr().err


def test_options_reach_the_server(fake):
    generate(
        fake, "x", "--temperature", "0.5", "--stop", "a", "--stop", "b", "--speculation", "fixed", "--max-tokens", "3"
    )
    [request] = fake.requests
    assert request.sampling.temperature == 0.5
    assert list(request.stopping.stop) == ["a", "b"]
    assert (request.stopping.max_tokens, request.speculation.mode) == (3, 3)
    assert not request.sampling.HasField("top_k")


def test_more_options_reach_the_server(fake, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "null"}', "utf-8")
    generate(fake, "x", "--logprobs", "2", "--json-schema", str(schema), "--repetition-penalty", "1.5")
    generate(fake, "x", "--choice", "yes", "--choice", "no", "--min-tokens", "1", "--presence-penalty", "-1")
    first, second = fake.requests
    assert (first.output.logprobs, first.output.top_logprobs) == (True, 2)
    assert first.guided.json_schema == '{"type": "null"}'
    assert first.sampling.repetition_penalty == 1.5
    assert list(second.guided.choice.choices) == ["yes", "no"]
    assert (second.stopping.min_tokens, second.sampling.presence_penalty) == (1, -1)
    assert not second.output.HasField("logprobs")


def test_several_outputs_are_shown_one_after_the_other(fake, capsys):
    deltas = [pb.TokenDelta(index=i, text=text, token_ids=[3], logprobs=[LOGPROB]) for i, text in ((1, "b"), (0, "a"))]
    fake.events = [pb.GenerateStreamResponse(delta=delta) for delta in deltas]
    other = pb.Finished()
    other.CopyFrom(FINISHED)
    other.index = 1
    fake.events.append(pb.GenerateStreamResponse(finished=other))
    assert generate(fake, "x", "--n", "2", "--logprobs", "1") == 0
    out, err = capsys.readouterr()
    assert out.split() == ["a", "b"]
    assert err.index("output 0") < err.index("output 1")
    assert "-0.500" in err
    assert fake.requests[0].sampling.n == 2


def test_compare_repeats_with_the_same_seed_and_caches_of_their_own(fake, capsys):
    assert generate(fake, "x", "--temperature", "1", "--compare") == 0
    first, plain, again = fake.requests
    assert not first.sampling.HasField("seed")
    assert (plain.sampling.seed, plain.speculation.mode) == (2**64 - 1, 2)
    assert (again.sampling.seed, again.speculation.mode) == (2**64 - 1, first.speculation.mode)
    assert len({first.cache_salt, plain.cache_salt, again.cache_salt}) == 3
    assert "the same text" in capsys.readouterr().err


def test_prompt_from_a_file(fake, tmp_path):
    path = tmp_path / "prompt.py"
    path.write_text("def ü():\n", "utf-8")
    assert generate(fake, "--file", str(path)) == 0
    assert fake.requests[0].prompt == "def ü():\n"


@pytest.mark.parametrize("arguments", [["-"], ["--file", "-"]], ids=["dash", "file dash"])
def test_prompt_from_standard_input(fake, arguments):
    done = subprocess.run([*COMMAND, "--address", fake.address, *arguments], input=b"def f", capture_output=True)
    assert (done.returncode, done.stdout.decode()) == (0, " retürn a+b\n")
    assert fake.requests[0].prompt == "def f"


@pytest.mark.parametrize(
    "arguments",
    [[], ["x", "--file", "y"], ["x", "--speculation", "on"], ["x", "--regex", "a", "--choice", "b"]],
    ids=str,
)
def test_a_wrong_command_line_exits_with_2(fake, arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        generate(fake, *arguments)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_a_refusal_is_one_line_and_exit_1(fake, capsys):
    fake.status = invalid(prompt="is empty")
    assert generate(fake, "") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "pilotfish generate: INVALID_ARGUMENT: 2 problems\n"


def test_nobody_there_is_exit_1(capsys):
    assert terminal.main(["x", "--address", "127.0.0.1:1"]) == 1
    assert "UNAVAILABLE" in capsys.readouterr().err


def test_a_missing_file_is_exit_1(fake, capsys):
    assert generate(fake, "--file", "/nonexistent") == 1
    assert "/nonexistent" in capsys.readouterr().err


def test_an_error_that_looks_like_markup_is_shown_as_it_is(fake, capsys):
    fake.status = status_pb2.Status(code=13, message="[red]x[/red] [/]")
    assert generate(fake, "x") == 1
    assert "[red]x[/red] [/]" in capsys.readouterr().err


@contextmanager
def on_a_terminal(*arguments):
    """The command with a pseudo-terminal as its standard output and error; yields (process, read everything)."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"} | {"PYTHONUNBUFFERED": "1"}
    env.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env=env,
        # A shell's background jobs ignore SIGINT, and so would what they start: these tests as well as any.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # one thread does this
    )
    os.close(theirs)

    def read(until: bytes = b"\0") -> str:
        seen = b""
        while until not in seen:
            try:
                seen += os.read(ours, 4096)
            except OSError:  # how a pseudo-terminal says that its other side is closed
                break
        return seen.decode()

    try:
        yield process, read
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_drafts_and_target_tokens_have_their_colours(fake):
    with on_a_terminal("def [/]f\x1b[2J:", "--address", fake.address) as (process, read):
        screen = read()
        assert process.wait(20) == 0
    assert "\x1b[36m ret\x1b[0m\x1b[35mürn\x1b[0m" in screen
    assert "\x1b[36m a\x1b[0m\x1b[35m+\x1b[0m\x1b[35mb\x1b[0m" in screen
    assert "def [/]f\\x1b[2J:" in screen  # shown, not obeyed
    assert "accepted draft" in re.sub(r"\x1b\[[0-9;]*m", "", screen)


def test_ctrl_c_cancels_the_request(fake):
    fake.hold = True
    with on_a_terminal("def f", "--address", fake.address) as (process, read):
        read(until="ürn".encode())
        process.send_signal(signal.SIGINT)
        rest = read()
        assert process.wait(20) == 130
    assert fake.call_ended.wait(5)
    assert "cancelled" in rest
    assert "Traceback" not in rest
