"""`pilotfish generate` as a person and as a pipe sees it."""

from __future__ import annotations

import io

import grpc
import pytest

from pilotfish.client import convert
from pilotfish.client.terminal import generate as command
from pilotfish.client.terminal.comparison import Comparison, Round
from pilotfish.v1 import generation_pb2 as pb
from tests.client.fake_server import FINISHED, MARKS, invalid, refusal, said
from tests.client.pseudo_terminal import on_a_terminal, plain

LOGPROB = pb.TokenLogprob(logprob=-0.5, top=[pb.Candidate(token_id=3, logprob=-0.5)])


def generate(fake, *arguments):
    return command.main(["--address", fake.address, *arguments])


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
    first, second = (request for request in fake.requests if isinstance(request, pb.GenerateRequest))
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
    assert fake.requests[-1].sampling.n == 2


def test_a_chat_model_gets_the_prompt_as_the_users_turn_unless_raw(fake):
    fake.has_chat_template = True
    for flags in ([], ["--raw"]):
        assert generate(fake, "hi", *flags) == 0
    asked = [request for request in fake.requests if isinstance(request, pb.GenerateRequest)]
    assert [(turn.role, turn.content) for turn in asked[0].messages.messages] == [("user", "hi")]
    assert asked[1].WhichOneof("input") == "prompt"


def test_compare_repeats_with_the_same_seed_and_caches_of_their_own(fake, capsys):
    fake.answer = timed(2.0)
    assert generate(fake, "x", "--temperature", "1", "--compare") == 0
    first, *runs = (request for request in fake.requests if isinstance(request, pb.GenerateRequest))
    assert not first.sampling.HasField("seed")
    assert {run.sampling.seed for run in runs} == {2**64 - 1}
    assert [run.speculation.mode == pb.SPECULATION_MODE_OFF for run in runs[:4]] == [False, True, True, False]
    assert len({run.cache_salt for run in runs}) == len(runs)
    shown = capsys.readouterr().err
    assert "the same with and without drafts" in shown
    assert "gain" in shown
    assert "estimate" not in shown


def timed(seconds, num_tokens=40, tokens=(1, 2)):
    finished = pb.Finished()
    finished.CopyFrom(FINISHED)
    finished.usage.completion_tokens, finished.timing.queue_seconds = num_tokens, 0.0
    finished.timing.total_seconds = seconds
    return pb.GenerateResponse(outputs=[pb.Output(token_ids=tokens, finished=finished)])


def rounds(*seconds, **plain):
    return Comparison(
        tuple(Round(convert.completion(timed(a)), convert.completion(timed(b, **plain))) for a, b in seconds)
    )


def test_the_gain_is_that_of_the_median_round_beside_its_times():
    lines = dict(rounds((1.0, 3.0), (5.0, 5.0), (2.0, 3.0), (1.0, 1.4), (1.0, 1.6)).lines())
    assert lines["gain"] == "1.50 times as fast with drafts (1.40 to 1.60 in 5 rounds without the best and the worst)"
    assert (lines["with drafts"], lines["without drafts"]) == ("40 tokens in 2.00 s", "40 tokens in 3.00 s")
    assert lines["text"].startswith("the same")
    assert "DIFFERENT" in dict(rounds((1.0, 3.0), (1.0, 1.0), (1.0, 1.0), tokens=(1, 3)).lines())["text"]


def test_rounds_that_disagree_give_no_gain():
    lines = dict(rounds((1.0, 3.0), (1.0, 0.5), (1.0, 1.0), (1.0, 0.7), (1.0, 1.5)).lines())
    assert lines["gain"].startswith("not measured: the machine is too busy (0.70 to 1.50 in 5 rounds")


def test_a_short_text_has_no_gain():
    assert dict(rounds((1.0, 3.0), num_tokens=31).lines())["gain"] == "not measured: fewer than 32 tokens"


@pytest.mark.parametrize("arguments", [["-"], ["--file", "-"], ["--file", "FILE"]], ids=" ".join)
def test_a_prompt_from_standard_input_or_a_file(fake, arguments, monkeypatch, tmp_path):
    (tmp_path / "FILE").write_text("def ü", "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("def ü".encode()), "utf-8"))
    assert generate(fake, *arguments) == 0
    assert fake.requests[-1].prompt == "def ü"


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
    assert command.main(arguments) == 1
    assert told in capsys.readouterr().err


def test_a_person_sees_who_wrote_which_token_and_ctrl_c_cancels_the_request(fake):
    fake.hold = True
    with on_a_terminal("generate", "def [/]f\x1b[2J:", "--address", fake.address) as terminal:
        terminal.read(until="ürn")
        terminal.type("\x03")
        screen = terminal.read_all()
        assert terminal.process.wait(20) == 130
    assert fake.call_ended.wait(5)
    assert "\x1b[36m ret\x1b[0m\x1b[35mürn\x1b[0m" in screen
    assert "def [/]f\\x1b[2J:" in screen  # shown, not obeyed
    assert "accepted draft" in plain(screen)
    assert "cancelled" in screen
    assert "Traceback" not in screen


def test_colors_can_be_turned_off(fake):
    with on_a_terminal("generate", "def f", "--no-color", "--address", fake.address) as terminal:
        assert "\x1b[3" not in terminal.read_all()


def test_reasoning_is_dimmed_for_a_person_and_written_as_it_is_to_a_pipe(fake, capsys):
    fake.has_chat_template, fake.marks = True, MARKS
    fake.events = said("<think>so", "</think>\n\n", "42")
    assert generate(fake, "x") == 0
    assert capsys.readouterr().out == "<think>so</think>\n\n42\n"
    with on_a_terminal("generate", "x", "--address", fake.address) as terminal:
        screen = terminal.read_all()
    assert "\x1b[2;35mso\x1b[0m" in screen
    assert "\x1b[35m42\x1b[0m" in screen
    assert "think>" not in screen
