"""`pilotfish generate` as a person and as a pipe sees it."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
from contextlib import contextmanager

import grpc
import pytest

from pilotfish.client import terminal
from pilotfish.v1 import generation_pb2 as pb
from tests.client.fake_server import FINISHED, invalid, refusal

LOGPROB = pb.TokenLogprob(logprob=-0.5, top=[pb.Candidate(token_id=3, logprob=-0.5)])
COMMAND = [sys.executable, "-c", "import sys; from pilotfish.client.terminal import main; sys.exit(main(sys.argv[1:]))"]


def generate(fake, *arguments):
    return terminal.main(["--address", fake.address, *arguments])


def test_text_to_stdout_figures_to_stderr(fake, capsys):
    assert generate(fake, "def f():") == 0
    out, err = capsys.readouterr()
    assert out == " retürn a+b\n"
    for figure in (
        "4 after a prompt of 3",
        "2.0 tokens/s",
        "750 ms",
        "25.0% of 8",
        "2.00 in 2",
        "'\\n\\n'",
        str(2**64 - 1),
    ):
        assert figure in err
    assert "interrupted" not in err
    fake.finished.interruptions = 2
    generate(fake, "x")
    assert "2 times" in capsys.readouterr().err


def test_options_reach_the_server(fake, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "null"}', "utf-8")
    for options in (
        "--temperature 0.5 --stop a --stop b --speculation fixed --max-tokens 3 --choice yes --choice no",
        f"--logprobs 2 --json-schema {schema} --repetition-penalty 1.5 --min-tokens 1 --presence-penalty -1",
    ):
        generate(fake, "x", *options.split())
    first, second = fake.requests
    assert first == pb.GenerateRequest(
        prompt="x",
        sampling=pb.SamplingParams(temperature=0.5),
        stopping=pb.StoppingParams(stop=["a", "b"], max_tokens=3),
        speculation=pb.SpeculationOptions(mode=pb.SPECULATION_MODE_FIXED),
        output=pb.OutputOptions(),
        guided=pb.GuidedDecoding(choice=pb.Choice(choices=["yes", "no"])),
    )
    assert second == pb.GenerateRequest(
        prompt="x",
        sampling=pb.SamplingParams(repetition_penalty=1.5, presence_penalty=-1),
        stopping=pb.StoppingParams(min_tokens=1),
        output=pb.OutputOptions(logprobs=True, top_logprobs=2),
        speculation=pb.SpeculationOptions(),
        guided=pb.GuidedDecoding(json_schema='{"type": "null"}'),
    )


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


@pytest.mark.parametrize("arguments", [["-"], ["--file", "-"], ["--file", "FILE"]], ids=" ".join)
def test_a_prompt_from_standard_input_or_a_file(fake, arguments, monkeypatch, tmp_path):
    (tmp_path / "FILE").write_text("def ü", "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("def ü".encode()), "utf-8"))
    assert generate(fake, *arguments) == 0
    assert fake.requests[0].prompt == "def ü"


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


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (invalid(prompt="is empty"), "INVALID_ARGUMENT: 2 problems"),
        (refusal(grpc.StatusCode.INTERNAL, "[red]x[/red] [/]"), "INTERNAL: [red]x[/red] [/]"),  # as it is, no markup
    ],
)
def test_a_refusal_is_one_line_and_exit_1(fake, capsys, status, told):
    fake.status = status
    assert generate(fake, "") == 1
    assert capsys.readouterr() == ("", f"pilotfish generate: {told}\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["x", "--address", "127.0.0.1:1"], "UNAVAILABLE"), (["--file", "/nonexistent"], "/nonexistent")],
)
def test_who_or_what_is_not_there_is_exit_1(capsys, arguments, told):
    assert terminal.main(arguments) == 1
    assert told in capsys.readouterr().err


@contextmanager
def on_a_terminal(*arguments):
    """The command with a pseudo-terminal as its standard output and error; yields (process, read everything)."""
    ours, theirs = pty.openpty()
    env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    env |= {"TERM": "xterm-256color", "COLUMNS": "100", "PYTHONUNBUFFERED": "1"}
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


def test_a_person_sees_who_wrote_which_token_and_ctrl_c_cancels_the_request(fake):
    fake.hold = True
    with on_a_terminal("def [/]f\x1b[2J:", "--address", fake.address) as (process, read):
        screen = read(until="ürn".encode())
        process.send_signal(signal.SIGINT)
        screen += read()
        assert process.wait(20) == 130
    assert fake.call_ended.wait(5)
    assert "\x1b[36m ret\x1b[0m\x1b[35mürn\x1b[0m" in screen
    assert "def [/]f\\x1b[2J:" in screen  # shown, not obeyed
    assert "accepted draft" in re.sub(r"\x1b\[[0-9;]*m", "", screen)
    assert "cancelled" in screen
    assert "Traceback" not in screen
