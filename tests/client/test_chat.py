"""`pilotfish chat` as a person and as a pipe sees it, against a server with scripted answers."""

from __future__ import annotations

import io
import json
import re

import grpc
import pytest

from pilotfish.client.terminal import chat
from pilotfish.client.terminal.conversation import Conversation
from pilotfish.client.terminal.prompt_lines import entry
from pilotfish.v1 import generation_pb2 as pb
from tests.client.fake_server import MARKS, invalid, refusal, said
from tests.client.pseudo_terminal import on_a_terminal, plain

ANSWER = " retürn a+b"


@pytest.fixture
def fake(fake):
    fake.has_chat_template = True
    return fake


def asked(fake):
    """The messages of each request, as (role, content) pairs."""
    requests = [request for request in fake.requests if isinstance(request, pb.GenerateRequest)]
    return [[(turn.role, turn.content) for turn in request.messages.messages] for request in requests]


@pytest.fixture
def piped(fake, monkeypatch, capsys):
    """Runs the command with these lines in a pipe; returns its exit code, output and notes."""

    def run(*lines, flags=()):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code = chat.main(["--address", fake.address, *flags])
        return code, *capsys.readouterr()

    return run


# --------------------------------------------------------------------------------------------------------- a pipe


def test_every_line_of_a_pipe_is_a_question_with_the_turns_before_it(fake, piped):
    assert piped("one", "", "two", flags=["--system", "be brief"]) == (0, f"{ANSWER}\n{ANSWER}\n", "")
    first = [("system", "be brief"), ("user", "one")]
    assert asked(fake) == [first, [*first, ("assistant", ANSWER), ("user", "two")]]


def test_settings_reach_the_server_and_the_answer_may_fill_the_context(fake, piped):
    piped(
        "/set temperature 0.5", "/set seed 7", "a", "/set seed default", "b", flags=["--top-k", "3", "--timeout", "9"]
    )
    first, second = (request for request in fake.requests if isinstance(request, pb.GenerateRequest))
    assert first.sampling == pb.SamplingParams(temperature=0.5, seed=7, top_k=3)
    assert second.sampling == pb.SamplingParams(temperature=0.5, top_k=3)
    assert first.stopping == pb.StoppingParams(fit_context=True, stop_in_answer=True)
    assert fake.deadlines[-1] == pytest.approx(9.0, abs=2.0)


def test_commands_change_the_conversation(fake, piped, tmp_path):
    file = tmp_path / "talk.json"
    lines = ("a", "b", "/undo", "/system new", "/regenerate", f"/save {file}", "/reset", "c", f"/load {file}", "d")
    code, _, notes = piped(*lines, flags=["--seed", "3"])
    assert code == 0
    assert "Removed the last question and its answer: b" in notes
    system, turn = ("system", "new"), ("assistant", ANSWER)
    assert asked(fake)[2:] == [
        [system, ("user", "a")],
        [system, ("user", "c")],
        [system, ("user", "a"), turn, ("user", "d")],
    ]
    requests = [request for request in fake.requests if isinstance(request, pb.GenerateRequest)]
    assert [request.sampling.HasField("seed") for request in requests] == [True, True, False, True, True]
    assert json.loads(file.read_text("utf-8")) == [
        {"role": role, "content": text} for role, text in (system, ("user", "a"), turn)
    ]


def test_reset_keeps_the_system_prompt_and_exit_leaves(fake, piped):
    assert piped("a", "/clear", "b", "/exit", "c", flags=["--system", "s"])[0] == 0
    assert asked(fake)[1:] == [[("system", "s"), ("user", "b")]]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("/nonsense", "There is no command /nonsense"),
        ("/set temperature warm", "temperature is 'warm'; expected a number"),
        ("/set speculation on", "expected one of auto, off, fixed"),
        ("/set heat 1", "there is no setting 'heat'"),
        ("/load /nonexistent", "/nonexistent: No such file"),
        ("/save", "expected the name of a file"),
        ("/undo", "no turn to undo"),
        ("/regenerate", "no question yet"),
        ("/stats maybe", "expected on or off"),
    ],
)
def test_a_wrong_command_is_a_sentence_and_the_conversation_goes_on(fake, piped, line, problem):
    code, out, notes = piped(line, "a")
    assert (code, out) == (1, f"{ANSWER}\n")
    assert problem in notes


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "line 1"),
        ("3", "expected a JSON list"),
        ('["a"]', "message 0 is no JSON object"),
        ('[{"role": "user", "content": ["a"]}]', "message 0 has a content that is no text"),
        ('[{"role": "user", "tool_calls": []}]', "message 0 has 'tool_calls'"),
        ('[{"content": "a"}]', "message 0 has no role"),
    ],
)
def test_a_file_that_is_no_conversation_changes_nothing(tmp_path, text, problem):
    (tmp_path / "x").write_text(text, "utf-8")
    conversation = Conversation("s", [{"role": "user", "content": "a"}])
    with pytest.raises(ValueError, match=re.escape(problem)):
        conversation.load(tmp_path / "x")
    assert conversation == Conversation("s", [{"role": "user", "content": "a"}])


def test_reasoning_is_kept_apart_in_the_history_and_not_piped(fake, piped):
    fake.marks, fake.events = MARKS, said("<think>\nso", "\n</think>\n\n", "42")
    assert piped("a", "b")[:2] == (0, "42\n42\n")
    turn = fake.requests[-1].messages.messages[1]
    assert (turn.role, turn.content, turn.reasoning) == ("assistant", "42", "so")


def test_statistics_on_wish(fake, piped):
    fake.finished.usage.cached_prompt_tokens = 2
    _, _, notes = piped("a", "/stats off", "b", flags=["--stats"])
    line = "4 tokens, 2.0 tokens/s; first token after 750 ms; 2 of 8 drafts accepted; 2 of 3 prompt tokens cached"
    assert notes.splitlines() == [line, "Statistics are off."]


@pytest.mark.parametrize(
    ("tokens", "note"), [(61, "the context of 64 tokens is full. Nothing was dropped"), (9, "the maximum of 9 tokens")]
)
def test_an_answer_that_is_cut_says_why(fake, piped, tokens, note):
    fake.finished.finish_reason, fake.finished.usage.completion_tokens = pb.FINISH_REASON_LENGTH, tokens
    code, _, notes = piped("a")
    assert code == 0
    assert note in notes


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "late"), "exceeds the timeout of 9 s: late"),
        (invalid(prompt="is empty"), "INVALID_ARGUMENT: 2 problems"),
        (refusal(grpc.StatusCode.UNAVAILABLE, "gone"), "The server does not answer: gone. The conversation is kept"),
    ],
    ids=["deadline", "invalid", "gone"],
)
def test_an_error_is_a_sentence_and_its_question_is_no_turn(fake, piped, status, sentence):
    fake.admits = 1  # the model's description
    fake.status = status
    code, _, notes = piped("a", "b", flags=["--timeout", "9"])
    assert code == 1
    assert sentence in notes
    assert "The question is not part of the conversation." in notes
    assert all(len(turns) == 1 for turns in asked(fake))


def test_a_base_model_and_a_missing_server_are_one_line(fake, piped, capsys):
    fake.has_chat_template = False
    code, out, notes = piped("a")
    assert (code, out) == (1, "")
    assert "tiny has no chat template; `pilotfish generate PROMPT`" in notes
    assert chat.main(["--address", "127.0.0.1:1"]) == 1
    assert "`pilotfish serve MODEL`" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------- a person


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        (["a\\", "b\\", "c"], "a\nb\nc"),
        (['"""', "a", "", "b", '"""'], "a\n\nb"),
        (['"""a', 'b"""'], "a\nb"),
        (['"""one"""'], "one"),
        (["a\\"], "a\n"),
    ],
)
def test_entries_of_several_lines(typed, text):
    lines = iter([*typed])

    def read(_sign):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    assert entry(read).rstrip("\n") == text.rstrip("\n")
    with pytest.raises(EOFError):
        entry(read)


def test_ctrl_c_stops_the_answer_and_not_the_program(fake):
    fake.hold = True
    with on_a_terminal("chat", "--address", fake.address) as terminal:
        terminal.read(until="> ")
        terminal.type("first\n")
        terminal.read(until="ürn")
        assert not fake.call_ended.is_set()
        terminal.type("\x03")
        terminal.read(until="Stopped.")
        assert fake.call_ended.wait(5)  # at the server
        fake.hold = False
        terminal.read(until="> ")
        terminal.type("second\n")
        terminal.read(until="a+b")
        terminal.read(until="> ")
        terminal.type("\x03")
        terminal.read(until="Ctrl-C again")
        terminal.read(until="> ")
        terminal.type("text")
        terminal.read(until="text")
        terminal.type("\x03")  # leaves the line, not the program
        terminal.read(until="> ")
        terminal.type("\x03")
        terminal.read(until="> ")
        terminal.type("\x03")
        screen = terminal.read_all()
        assert terminal.process.wait(20) == 0
    assert asked(fake)[1] == [("user", "first"), ("assistant", " retürn"), ("user", "second")]
    assert "\x1b[36m ret\x1b[0m\x1b[35mürn\x1b[0m" in screen
    assert "Traceback" not in plain(screen)


def test_a_server_that_dies_is_a_sentence_and_the_history_remains(fake):
    with on_a_terminal("chat", "--address", fake.address) as terminal:
        terminal.read(until="> ")
        terminal.type("first\n")
        terminal.read(until="> ")
        fake.status = refusal(grpc.StatusCode.UNAVAILABLE, "gone")
        terminal.type("second\n")
        terminal.read(until="The server does not answer: gone.")
        terminal.read(until="> ")
        fake.status = None
        terminal.type("third\n")
        terminal.read(until="a+b")
        terminal.read(until="> ")
        terminal.type("\x04")
        assert terminal.read_all()
        assert terminal.process.wait(20) == 0
    assert asked(fake)[-1] == [("user", "first"), ("assistant", ANSWER), ("user", "third")]


def test_a_regeneration_that_fails_keeps_the_old_answer(fake, piped):
    fake.admits, fake.status = 2, invalid(x="y")
    _, _, notes = piped("a", "/regenerate", "b")
    assert "The old answer remains." in notes
    assert asked(fake)[-1] == [("user", "a"), ("assistant", ANSWER), ("user", "b")]
