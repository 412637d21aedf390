"""One definition of every option: flags, then variables, then the file."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from typing import get_args

import pytest
from pydantic import ValidationError

from pilotfish.engine.config import EngineConfig
from pilotfish.models import embedded_draft, embedded_eagle, embedded_medusa, embedded_target
from pilotfish.server import cli, version
from pilotfish.server.config import ChatFormatName, ServerConfig
from pilotfish.server.formats.detect import FORMATS
from pilotfish.server.telemetry import kv_events, tracing


def test_without_a_model_the_embedded_pair_is_served_and_a_model_has_no_draft_of_its_own() -> None:
    config = ServerConfig.load([])
    assert (config.host, config.target) == ("127.0.0.1", str(embedded_target()))
    assert config.draft == (str(embedded_draft()), str(embedded_medusa()), str(embedded_eagle()), "self:3")
    assert ServerConfig.load(["some/model"]).draft == ()


def test_in_shares_the_embedded_target_drafts_with_none_of_its_own_layers() -> None:
    for asked in (["--tensor-parallel-size", "2"], ["--tensor-parallel-size=1"]):
        config = ServerConfig.load(asked)
        assert config.draft[:3] == (str(embedded_draft()), str(embedded_medusa()), str(embedded_eagle()))
        assert ("self:3" in config.draft) == (config.tensor_parallel_size == 1)


@pytest.mark.parametrize(
    ("flags", "variable"),
    [
        (["--served-model-name", "who/it", "--served-model-name=it"], "x"),
        (["--served-model-name", "who/it,it"], "x"),
        ([], "who/it,it"),
    ],
)
def test_a_model_can_have_several_names(flags, variable, monkeypatch) -> None:
    monkeypatch.setenv("PILOTFISH_SERVED_MODEL_NAME", variable)
    assert ServerConfig.load(["some/model", *flags]).served_model_name == ("who/it", "it")
    with pytest.raises(ValidationError, match="served_model_name"):
        ServerConfig.load(["some/model", "--served-model-name", "a b"])


@pytest.mark.parametrize(("processes", "shares"), [(1, 2), (2, 1), (4, 2)])
def test_as_many_processes_as_shares(processes, shares, capsys, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    assert cli.main(["serve", "--tensor-parallel-size", str(shares)]) == 2
    told = capsys.readouterr().err
    assert f"tensor_parallel_size is {shares}" in told
    assert f"is {processes}: start one process per shard" in told


@pytest.mark.parametrize(
    ("name", "text"),
    [("c.yaml", "kv_memory: 7\nhost: 0.0.0.0\nhttp_port: 1\n"), ("c.toml", "kv_memory=7\nhost='0.0.0.0'\n")],
)
def test_flags_come_before_variables_before_the_file(name, text, tmp_path, monkeypatch) -> None:
    (tmp_path / name).write_text(text)
    monkeypatch.setenv("PILOTFISH_HTTP_PORT", "99")
    config = ServerConfig.load(["--config", str(tmp_path / name), "--kv-memory", "3"])
    assert (config.kv_memory, config.http_port, config.host) == (3.0, 99, "0.0.0.0")
    monkeypatch.setenv("PILOTFISH_CONFIG", str(tmp_path / name))
    assert ServerConfig.load([]).kv_memory == 7


@pytest.mark.parametrize(
    ("flags", "variable", "file", "drafts"),
    [
        (["--draft", "a", "--draft=o/b@12"], "c", "d", ("a", "o/b@12")),
        ([], "/models/a", "d", ("/models/a",)),
        ([], "a,mtp", "d", ("a", "mtp")),
        ([], '["a", "b,c"]', "d", ("a", "b,c")),
        ([], None, "d", ("d",)),
        ([], None, "[d, 'self:3']", ("d", "self:3")),
    ],
)
def test_a_draft_may_be_one_or_several(flags, variable, file, drafts, tmp_path, monkeypatch) -> None:
    (tmp_path / "c.yaml").write_text(f"draft: {file}\n")
    if variable is not None:
        monkeypatch.setenv("PILOTFISH_DRAFT", variable)
    assert ServerConfig.load(["m", "--config", str(tmp_path / "c.yaml"), *flags]).draft == drafts


def groups_in(shown: str) -> dict[str, str]:
    return dict(re.findall(r"^(\w[\w ]+):\n((?:  .*\n|\n)+)", shown, re.MULTILINE))


def test_help_has_the_options_in_groups(capsys) -> None:
    with pytest.raises(SystemExit):
        ServerConfig.load(["--help"])
    shown = capsys.readouterr().out
    assert shown.startswith("usage: pilotfish serve [MODEL] [OPTIONS]\n\n")
    groups = groups_in(shown)
    for title, names in {
        "general": "help config",
        "model": "revision device weights tensor-parallel-size adapter-root",
        "drafting": "draft draft-weights verification",
        "batching and memory": "max-model-len prefix-cache",
        "limits of a request": "max-prompt-tokens max-choices",
        "queue": "max-queue-requests ageing-seconds",
        "network and TLS": "playground host tls-client-ca",
        "callers": "token-file requests-per-second",
        "reliability": "drain-seconds max-engine-crashes",
        "observability": "log-format tracing kv-events-topic",
    }.items():
        assert set(names.split()) <= set(re.findall(r"--([a-z-]+)", groups[title])), title
    assert "options" not in groups
    text = " ".join(groups["drafting"].split())
    assert re.search(r"--num-draft-tokens N .*\(default: 8\)", text)
    assert re.search(r"--speculation {auto,off,fixed} .*\(default: auto\)", text)


@pytest.mark.parametrize(("flag", "is_all"), [("--help", False), ("--help-all", True)])
def test_help_of_another_command_has_its_own_options_first(flag, is_all, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["check", flag])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    groups = groups_in(shown)
    assert shown.count("usage:") == 1
    assert next(iter(groups)) == "options of check"
    assert "--no-load" in groups["options of check"]
    assert {"model", "drafting", "batching and memory"} <= groups.keys()
    assert ("--tls-cert" in shown, "queue" in groups) == (is_all, is_all)


def test_an_unknown_key_and_a_bad_value_are_errors(tmp_path) -> None:
    (tmp_path / "c.yaml").write_text("kv_memor: 7\n")
    with pytest.raises(ValidationError, match="kv_memor"):
        ServerConfig.load(["--config", str(tmp_path / "c.yaml")])
    with pytest.raises(ValidationError, match="kv_memory"):
        ServerConfig.load(["--kv-memory", "-1"])
    with pytest.raises(FileNotFoundError):
        ServerConfig.load(["--config", str(tmp_path / "none.yaml")])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tls_cert": "a"}, "tls_key"),
        ({"tls_key": "a"}, "tls_cert"),
        ({"standby": True, "tensor_parallel_size": 2}, "standby is not supported with tensor_parallel_size 2"),
        ({"tls_client_ca": "a"}, "tls_cert"),
        ({"max_requests_per_token": 1}, "token_file"),
        ({"kv_events_topic": "kv@a@b"}, "kv_events_topic needs kv_events_endpoint"),
        ({"kv_events_replay_endpoint": "tcp://*:1"}, "kv_events_replay_endpoint needs kv_events_endpoint"),
        ({"kv_events_endpoint": "tcp://*:1", "prefix_cache": False}, "kv_events_endpoint needs prefix_cache"),
    ],
)
def test_options_that_would_do_nothing_without_others_are_refused(options, problem) -> None:
    with pytest.raises(ValueError, match=problem):
        ServerConfig(target="x", **options)


def test_the_engine_gets_its_share() -> None:
    config = ServerConfig.load(["m", "--num-draft-tokens", "2", "--speculation", "off", "--grpc-port", "0"])
    assert config.engine() == EngineConfig(target="m", num_draft_tokens=2, speculation="off")
    for standby, each, engines in ((True, 1, 2), (False, 3, 3), (True, 3, 6)):
        config = ServerConfig(target="m", standby=standby, engines_per_device=each)
        assert config.engine().engines_per_device == engines


def test_every_engine_option_is_a_flag(capsys) -> None:
    with pytest.raises(SystemExit):
        ServerConfig.load(["--help"])
    shown = capsys.readouterr().out
    for name in EngineConfig.model_fields.keys() - {"target"}:
        assert f"--{name.replace('_', '-')}" in shown
    assert all(option.description for option in ServerConfig.model_fields.values())


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["version"], 0, f"pilotfish {version()}"),
        (["--help"], 0, "pilotfish"),
        ([], 0, "pilotfish"),
        (["fly"], 2, "'fly'"),
        (["serve", "--kv-memory", "-1"], 2, "kv_memory is '-1'; expected greater than 0"),
        (["serve", "--adapter", "a"], 2, "adapter"),
    ],
)
def test_commands_and_mistakes_in_them(arguments, code, said, capsys) -> None:
    assert cli.main(arguments) == code
    shown = capsys.readouterr()
    assert said in (shown.err if code else shown.out)


MISTAKES = {
    "proposer": "'eagel'; expected 'auto', 'model'",
    "dtype": "'float8'; expected 'auto', 'float32'",
    "weights": "'int3'; expected 'native'",
    "device": "'tpu'; expected 'auto', 'cpu' or 'cuda'",
    "speculation": "'maybe'; expected 'auto', 'off' or 'fixed'",
    "chat_format": "'xml'; expected 'generic', 'hermes'",
}


@pytest.mark.parametrize("command", ["serve", "check", "bench", "quality", "train-draft"])
def test_wrong_names_are_refused_before_anything_is_loaded(command) -> None:
    """Each is named with its value and what is possible; torch is not even imported."""
    flags = [f"--{name.replace('_', '-')}={said.split(';')[0].strip(chr(39))}" for name, said in MISTAKES.items()]
    flags += ["--out=unused"] if command == "train-draft" else []
    program = f"import sys; from pilotfish.server.cli import main; code = main({[command, *flags]}); "
    program += "sys.exit('torch' if 'torch' in sys.modules else code)"
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    for name, said in MISTAKES.items():
        assert f"{name} is {said}" in done.stderr


def test_the_chat_formats_are_those_of_the_option() -> None:
    assert set(get_args(ChatFormatName)) == FORMATS.keys()


def test_a_key_of_the_file_that_is_not_an_option_is_refused_with_a_similar_one(tmp_path, capsys) -> None:
    for name, text, said in (
        (
            "a.yaml",
            "kv_memor: 7\nproposer: eagel\n",
            ["there is no option kv_memor; did you mean kv_memory?", "'eagel'"],
        ),
        ("b.yaml", "a: [b\n", ["b.yaml", "expected ',' or ']'"]),
        ("b.toml", "a = [b\n", ["b.toml", "Invalid value"]),
    ):
        (tmp_path / name).write_text(text)
        assert cli.main(["serve", "--config", str(tmp_path / name)]) == 2
        shown = capsys.readouterr().err
        assert all(part in shown for part in said), shown


def test_the_word_none_is_no_draft() -> None:
    assert ServerConfig.load(["--draft", "none"]).draft == ServerConfig.load(["m", "--draft=none"]).draft == ()
    assert EngineConfig(target="m", draft="none").draft == ()
    with pytest.raises(ValidationError, match="has none beside other drafts"):
        ServerConfig.load(["--draft", "none", "--draft", "mtp"])


@pytest.fixture
def refused(capsys, monkeypatch):
    """What `serve` says of options with which it does not begin."""
    monkeypatch.setattr(
        "pilotfish.server.telemetry.logs.configure", lambda _: None
    )  # leave pytest's own handlers alone

    def serve(*options: str) -> str:
        assert cli.main(["serve", "nothing", *options]) == 1
        return capsys.readouterr().err

    return serve


def test_a_port_in_use_is_one_line(refused) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert port in refused("--grpc-port", port, "--http-port", "0")
        assert "in use" in refused("--grpc-port", "0", "--http-port", port)


def test_a_missing_token_file_or_extra_is_one_line(refused, monkeypatch) -> None:
    assert "/there/is/none" in refused("--token-file", "/there/is/none")
    for module, extra, options in (
        ("zmq", kv_events.EXTRA, ("--kv-events-endpoint", "tcp://127.0.0.1:*")),
        ("opentelemetry.sdk.trace", tracing.EXTRA, ("--tracing",)),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        assert extra in refused(*options)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read: No such file"),
        (b"\xff", "is not UTF-8"),
        (b"\n{% for %}", "the chat template is invalid: line 2"),
        (b"a" * ((1 << 17) + 1), "characters; expected at most 131072"),
    ],
)
def test_a_bad_chat_template_is_one_error_before_anything_loads(content, problem, tmp_path, capsys) -> None:
    file = tmp_path / "t.jinja"
    if content is not None:
        file.write_bytes(content)
    assert cli.main(["serve", "/there/is/no/model", "--chat-template", str(file)]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    [
        "",
        "--draft=",
        "--chat-template=",
        "--adapter=a=",
        "--adapter-root=",
        "--token-file=",
        "--config=",
        "--tls-cert=",
    ],
)
def test_an_invalid_file_name_is_one_line(option, capsys) -> None:
    assert cli.main(["serve", f"{option}{'x' * 5000}"]) == 2
    told = capsys.readouterr().err
    assert "File name too long" in told
    assert "xxx…xxx" in told
    assert len(told) < 1500
    field = option.strip("-").split("=")[0].replace("-", "_")
    assert field in told
