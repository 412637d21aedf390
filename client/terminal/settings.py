"""Options that commands of the terminal share: how to reach a server, how to sample, how to speculate.

A setting is written once, here; flags of `generate` and `chat` and the names of `/set` follow from it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast, get_args

from pilotfish.client.connection import Retry, Tls
from pilotfish.client.options import GenerateOptions, SpeculationMode, Verification
from pilotfish.client.sync_client import Client

VARIABLE = "PILOTFISH_TOKEN"  # holds the token: a command-line flag would be readable by every user of the machine
TOKEN_HELP = f"The environment variable {VARIABLE} contains the access token, if the server requires one."


@dataclass(frozen=True, slots=True)
class Setting:
    """An option of a request. `repeats`: it is a list, of which each use gives one value."""

    name: str
    help: str
    kind: type[float | int | str] = float
    choices: tuple[str, ...] | None = None
    repeats: bool = False

    def add_to(self, group: argparse._ArgumentGroup) -> None:
        """Add the flag."""
        flag, action = f"--{self.name.replace('_', '-')}", "append" if self.repeats else "store"
        group.add_argument(flag, type=self.kind, choices=self.choices, action=action, help=self.help)

    def parse(self, text: str) -> Any:
        """Return the value that `text` stands for. Raises ValueError."""
        try:
            value = self.kind(text)
        except ValueError:
            expected = "a whole number" if self.kind is int else "a number"
            raise ValueError(f"{self.name} is {text!r}; expected {expected}") from None
        if self.choices is not None and value not in self.choices:
            raise ValueError(f"{self.name} is {text!r}; expected one of {', '.join(self.choices)}")
        return [value] if self.repeats else value


SAMPLING = (
    Setting("temperature", "sampling temperature; 0 is greedy"),
    Setting("top_p", "keep the most likely tokens up to this total probability"),
    Setting("top_k", "keep this many of the most likely tokens; 0 keeps all", int),
    Setting("min_p", "drop tokens below this fraction of the highest probability"),
    Setting("seed", "random seed; the same seed gives the same output", int),
    Setting("max_tokens", "maximum number of tokens to generate", int),
    Setting("min_tokens", "minimum number of tokens before a stop or end-of-text token", int),
    Setting("stop", "string that ends the output; can be repeated", str, repeats=True),
    Setting("repetition_penalty", "above 1: penalise tokens of prompt and output"),
    Setting("presence_penalty", "subtracted from the logits of tokens in the output"),
    Setting("frequency_penalty", "subtracted per occurrence in the output"),
)
SPECULATION = (
    Setting("speculation", "how many tokens to draft", str, get_args(SpeculationMode)),
    Setting("num_draft_tokens", "maximum number of drafts per round (K)", int),
    Setting("proposer", "proposer of drafts, for instance model or ngram", str),
    Setting("verification", "verification rule", str, get_args(Verification)),
)
SETTINGS = {setting.name: setting for setting in (*SAMPLING, *SPECULATION)}


def add_settings(parser: argparse.ArgumentParser, title: str, settings: Iterable[Setting]) -> argparse._ArgumentGroup:
    """Add a group of flags, and return it."""
    group = parser.add_argument_group(f"{title} (default: the server's)")
    for setting in settings:
        setting.add_to(group)
    return group


def settings_of(arguments: argparse.Namespace) -> GenerateOptions:
    """Return the settings that the command line gives."""
    given = {name: getattr(arguments, name) for name in SETTINGS}
    return cast("GenerateOptions", {name: value for name, value in given.items() if value is not None})


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `connect`, and `--timeout` and `--no-color`."""
    parser.add_argument("--address", default="127.0.0.1:50051", help="gRPC address of the server [%(default)s]")
    parser.add_argument("--tls", action="store_true", help="use TLS with the system's CA certificates")
    parser.add_argument("--tls-ca", metavar="PATH", help="use TLS with this CA bundle (PEM)")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="maximum time of an answer [none]")
    parser.add_argument("--no-color", action="store_true", help="no colors, as with the environment variable NO_COLOR")


def connect(arguments: argparse.Namespace, retry: Retry | None = Retry()) -> Client:  # noqa: B008 - frozen
    """Return a client of the server that the command line names."""
    tls = Tls(authority=arguments.tls_ca) if arguments.tls or arguments.tls_ca else None
    return Client(arguments.address, token=os.environ.get(VARIABLE), tls=tls, retry=retry)
