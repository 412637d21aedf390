"""Coding agents run commands as a scripted target asks, and tell what it answers to their results.

Codex speaks to `/v1/responses`, Claude Code to `/v1/messages`. Neither needs an account or another server.
"""

from __future__ import annotations

import json

import pytest

from tests.clients.environments import BUILD, MODEL, run
from tests.clients.scripted import PRINTED

pytestmark = pytest.mark.timeout(300)

TASK = "Run the command and tell me what it prints."
AGENTS = BUILD / "npm" / "node_modules" / ".bin"


@pytest.fixture
def work(home):
    folder = home / "work"
    folder.mkdir()
    return folder


def test_codex_runs_a_command_and_tells_what_it_printed(scripted, home, work):
    provider = (
        f'{{name = "Pilotfish", base_url = "{scripted.url}/v1", wire_api = "responses", request_max_retries = 0}}'
    )
    (home / "codex").mkdir()
    run(
        str(AGENTS / "codex"),
        "exec",
        *("--skip-git-repo-check", "--cd", str(work), "--dangerously-bypass-approvals-and-sandbox"),
        *("--model", MODEL, "--config", 'model_provider = "pilotfish"'),
        *("--config", f"model_providers.pilotfish = {provider}", "--config", "analytics.enabled = false"),
        *("--output-last-message", str(home / "last.txt")),
        TASK,
        home=home,
        CODEX_HOME=str(home / "codex"),
    )
    assert (work / "proof.txt").read_text() == f"{PRINTED}\n", "it has run the command"
    assert (home / "last.txt").read_text() == f"The command printed {PRINTED}"


def test_claude_code_runs_a_command_and_tells_what_it_printed(scripted, home, work):
    # It offers tools in a way of Anthropic's alone at first; when that is refused, it goes on with plain ones.
    variables = {
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_BASE_URL": scripted.url,
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CONFIG_DIR": str(home / "claude"),
    }
    options = ("--allowedTools", "Bash", "--add-dir", str(work), "--output-format", "json")
    printed = run(str(AGENTS / "claude"), "-p", TASK, *options, home=work, **variables)
    result = json.loads(printed.splitlines()[-1])
    assert not result["is_error"], result
    assert result["num_turns"] == 2
    assert (work / "proof.txt").read_text() == f"{PRINTED}\n", "it has run the command"
    assert result["result"] == f"The command printed {PRINTED}"
