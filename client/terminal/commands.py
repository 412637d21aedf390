"""The commands of `pilotfish chat`: lines that begin with /."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pilotfish.client.options import GenerateOptions
from pilotfish.client.terminal.session import ChatSession
from pilotfish.client.terminal.settings import SETTINGS

_DEFAULT = "default"  # the value that removes a setting


def run(line: str, session: ChatSession) -> None:
    """Run the command in `line`. Raises EOFError for /exit."""
    name, _, argument = line.partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        session.problem(f"There is no command {name}; /help lists all. A question may begin with / after a space.")
        return
    try:
        command.run(session, argument.strip())
    except ValueError as error:
        session.problem(f"{name}: {error}")
    except OSError as error:
        session.problem(f"{name}: {error.filename}: {error.strerror}")


def _help(session: ChatSession, _: str) -> None:
    width = max(len(command.usage) for command in COMMANDS.values())
    found = {command.usage: command.help for command in COMMANDS.values()}
    session.note("\n".join(f"{usage:{width}}  {text}" for usage, text in found.items()))
    session.note(
        'Several lines: a \\ at the end of a line continues it; """ begins and ends a block. '
        "Ctrl-C stops an answer; Ctrl-D leaves."
    )


def _system(session: ChatSession, text: str) -> None:
    conversation = session.conversation
    if text:
        conversation.system = "" if text == '""' else text
        session.note("There is a new system prompt." if conversation.system else "There is no system prompt now.")
    else:
        shown = conversation.system or "There is no system prompt."
        session.note(f'{shown}\n/system TEXT replaces it, /system "" removes it.')


def _reset(session: ChatSession, _: str) -> None:
    session.conversation.turns.clear()
    session.note("The conversation is empty." + (" The system prompt remains." if session.conversation.system else ""))


def _undo(session: ChatSession, _: str) -> None:
    question = session.conversation.undo()
    if question is None:
        session.problem("There is no turn to undo.")
    else:
        session.note(f"Removed the last question and its answer: {_shortened(question)}")


def _regenerate(session: ChatSession, _: str) -> None:
    session.regenerate()


def _save(session: ChatSession, name: str) -> None:
    session.conversation.save(_path(name))
    session.note(f"Saved {len(session.conversation.messages)} messages to {name}.")


def _load(session: ChatSession, name: str) -> None:
    session.conversation.load(_path(name))
    session.note(f"Loaded {len(session.conversation.messages)} messages from {name}.")


def _path(name: str) -> Path:
    if not name:
        raise ValueError("expected the name of a file")
    return Path(name).expanduser()


def _stats(session: ChatSession, text: str) -> None:
    if text not in ("on", "off", ""):
        raise ValueError(f"expected on or off, not {text!r}")
    session.shows_stats = text == "on" if text else not session.shows_stats
    session.note(f"Statistics are {'on' if session.shows_stats else 'off'}.")


def _set(session: ChatSession, text: str) -> None:
    name, _, value = text.partition(" ")
    name = name.replace("-", "_")
    if not name:
        given = "\n".join(f"{name} {value}" for name, value in session.options.items())
        session.note(f"{given or 'All settings have their defaults.'}\nNames: {', '.join(SETTINGS)}")
        return
    if name not in SETTINGS:
        raise ValueError(f"there is no setting {name!r}; expected one of {', '.join(SETTINGS)}")
    options = dict(session.options)
    options.pop(name, None)
    if value.strip() != _DEFAULT:
        options[name] = SETTINGS[name].parse(value.strip())
    session.options = GenerateOptions(**options)  # type: ignore[typeddict-item]  # its keys are those of SETTINGS
    session.note(f"{name} is {options.get(name, 'the default')}.")


def _exit(_session: ChatSession, _: str) -> None:
    raise EOFError


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:57]}..."


@dataclass(frozen=True, slots=True)
class Command:
    """A command: what it does with the rest of its line, and its help."""

    run: Callable[[ChatSession, str], None]
    usage: str
    help: str


_ALL = {
    ("/help",): Command(_help, "/help", "list the commands"),
    ("/system",): Command(_system, "/system [TEXT]", "show or replace the system prompt"),
    ("/reset", "/clear"): Command(_reset, "/reset, /clear", "remove all turns; the system prompt and settings remain"),
    ("/undo",): Command(_undo, "/undo", "remove the last question and its answer"),
    ("/regenerate",): Command(_regenerate, "/regenerate", "answer the last question again, with another seed"),
    ("/save",): Command(_save, "/save FILE", "write all messages to a JSON file"),
    ("/load",): Command(_load, "/load FILE", "replace the conversation by the messages of a JSON file"),
    ("/stats",): Command(_stats, "/stats [on|off]", "show speed, drafts and cached tokens after each answer"),
    ("/set",): Command(_set, "/set [NAME VALUE]", "show or change settings; the value `default` is the server's"),
    ("/exit", "/quit"): Command(_exit, "/exit, /quit", "leave"),
}
COMMANDS = {name: command for names, command in _ALL.items() for name in names}
