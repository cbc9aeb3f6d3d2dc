"""The command line: what it says, what it refuses, and that it starts quickly."""

import os
import re
import socket
import subprocess
import sys

import pytest
import yaml
from rich.console import Console

from cluster import cli
from cluster.cli import OVERRIDES, main
from cluster.config import Config, walk
from cluster.launcher import check_place
from cluster.machine import check_addresses
from cluster.state_dir import StateDir
from core.errors import ConfigError
from scheduler.policies import POLICIES


def run(*arguments: str) -> int:
    return main(list(arguments))


def test_help_loads_nothing_heavy():
    script = (
        "import sys; from cluster.cli import main\n"
        "try: main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'ray', 'transformers', 'pydantic', 'rich', 'numpy', 'aiohttp'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--max-model-len" in done.stdout


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        run("--version")
    assert ended.value.code == 0
    assert re.fullmatch(r"halfmoon \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_every_flag_sets_a_key_that_exists():
    known = {dotted for dotted, _, _ in walk(Config())}
    assert set(OVERRIDES.values()) <= known


def test_config_show_takes_flags_and_file(tmp_path, capsys):
    path = tmp_path / "c.yaml"
    path.write_text("decode: {max_batch: 7}")
    assert run("config", "show", "--config", str(path), "--prefill", "3", "--coupled") == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["decode"]["max_batch"] == 7
    assert shown["prefill"]["workers"] == 3
    assert shown["coupled"]["workers"] == 1


@pytest.mark.parametrize(
    ("words", "workers"),
    [
        (("--coupled", "some/model"), 1),
        (("--coup", "some/model"), 1),
        (("--coupled", "2", "some/model"), 2),
        (("--coupled=2", "some/model"), 2),
        (("some/model", "--coupled"), 1),
        (("--coupled", "--port", "0", "some/model"), 1),
    ],
)
def test_coupled_leaves_the_model_its_name(words, workers, capsys):
    assert run("config", "show", *words) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["model"], shown["coupled"]["workers"]) == ("some/model", workers)


def refused(capsys, *arguments: str) -> str:
    """Run a command that has to be refused before anything starts; return its one message."""
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return str(err)


def test_an_unknown_key_is_refused(tmp_path, capsys):
    path = tmp_path / "c.yaml"
    path.write_text("modle: x")
    message = refused(capsys, "serve", str(tmp_path / "none"), "--config", str(path))
    assert "unknown key `modle`; did you mean `model`?" in message


def test_a_taken_port_is_refused(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = refused(
            capsys, "serve", "--port", str(port), "--state-dir", str(tmp_path / "state")
        )
    assert f"`port` {port} on 127.0.0.1 is taken by process" in message
    assert "--port" in message


def test_config_check_refuses_what_serve_refuses(tmp_path, capsys):
    (tmp_path / "file").touch()
    state = str(tmp_path / "state")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, hint in (
            (("--state-dir", str(tmp_path / "file" / "x")), "--state-dir"),
            (("--state-dir", "~nobody-of-that-name/x"), "--state-dir"),
            (("--state-dir", state, "--port", port), "`port` .*--port"),
            (("--state-dir", state, "--host", "192.0.2.1", "--port", "0"), "`host` .*--host"),
            (("--state-dir", state, "--host", "a..b", "--port", "0"), "`host` .*--host"),
            (("--state-dir", state, "--hosts", "3", "--port", "0"), "`hosts` is 3.*2 or less"),
            (("--policy", "fastest"), "`scheduler.policy`: write one of random, .*centric"),
        ):
            for command in (("serve",), ("config", "check")):
                assert re.search(hint, refused(capsys, *command, *arguments))


def test_config_check_can_be_used_beside_a_running_cluster(tmp_path, capsys):
    state = StateDir(tmp_path / "state")
    state.prepare()
    lock = state.lock()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = Config(state_dir=str(state.path), port=taken.getsockname()[1])
        check_place(config, Console(width=1000))
        os.close(lock)
        assert "a cluster runs in" in capsys.readouterr().out
        with pytest.raises(ConfigError, match="is taken"):
            check_place(config, Console())


def test_what_listens_for_workers_is_checked_as_well():
    with pytest.raises(ConfigError, match=r"`listen` '192\.0\.2\.1' is no address"):
        check_addresses(Config(listen="192.0.2.1", port=0))


def test_keys_are_not_shown_and_what_is_shown_is_no_key(tmp_path, capsys):
    assert run("config", "show", "--api-key", "s3cret") == 0
    shown = capsys.readouterr().out
    assert "s3cret" not in shown
    path = tmp_path / "c.yaml"
    path.write_text(shown)
    assert "put the key itself in the place of" in refused(
        capsys, "config", "check", "--config", str(path), "--port", "0"
    )


def test_lines_are_not_broken_where_there_is_no_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    cli._console().print("word " * 100)
    assert capsys.readouterr().out.count("\n") == 1


def test_help_names_every_policy_and_hides_the_test_hook(capsys):
    for command in (("serve",), ("config", "show")):
        with pytest.raises(SystemExit):
            run(*command, "--help")
        text = " ".join(capsys.readouterr().out.split())
        assert all(name in text.replace("- ", "-") for name in POLICIES)
        assert "--enable-forced-tokens" not in text
    assert run("config", "show") == 0
    shown = capsys.readouterr().out.replace("\n", " ")
    assert all(name in shown for name in POLICIES)


def test_a_missing_model_is_refused(tmp_path, capsys):
    message = refused(
        capsys, "serve", str(tmp_path / "none"), "--port", "0", "--state-dir", str(tmp_path / "s")
    )
    assert "there is no model" in message


def test_status_without_a_cluster_says_how_to_start_one(tmp_path, capsys):
    message = refused(capsys, "status", "--state-dir", str(tmp_path))
    assert "halfmoon serve" in message
    assert "--state-dir" in message


def test_a_command_that_is_not_there_is_a_plain_error(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cluster.checks.kill", None)
    message = refused(capsys, "check", "kill")
    assert "not in this version" in message


def test_tools_have_their_own_arguments(capsys):
    with pytest.raises(SystemExit) as ended:
        run("check", "parity", "--help")
    assert ended.value.code == 0
    assert "--longest" in capsys.readouterr().out


def test_kinds_to_kill_may_stand_before_the_model(capsys):
    message = refused(capsys, "check", "kill", "--kind", "pool", "--kind", "prefill", "no-such")
    assert "no-such" in message


def test_model_list_names_the_known_ones(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run("model", "list") == 0
    assert "smollm2-135m-instruct\tnot fetched yet" in capsys.readouterr().out
    (tmp_path / "halfmoon" / "models" / "smollm2-135m-instruct-1").mkdir(parents=True)
    assert run("model", "list") == 0
    assert "smollm2-135m-instruct\tfetched" in capsys.readouterr().out
