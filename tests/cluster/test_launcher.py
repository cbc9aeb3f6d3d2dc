"""A whole cluster from its command line: start, failures, and what is left afterwards (nothing)."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cluster.server_process import free_port
from cluster.state_dir import ProcessRecord, StateDir
from core.requests import SamplingParams
from engine.toy import toy_generate, toy_spec

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PATIENCE_S = 120.0
EOS = "<|end|>"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 16,
    "head_dim": 8,
    "intermediate_size": 16,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like a model; the toy engine needs no more than that."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(EOS, special=True)])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    vocab_size = backend.get_vocab_size()
    config = CONFIG | {"vocab_size": vocab_size, "eos_token_id": vocab_size - 1}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {"model.layers.0.self_attn.k_proj.weight": np.ones((8, 16), np.float32)}
    save_file(weights, folder / "model.safetensors")
    return folder


class Server:
    """`halfmoon serve` as a child; `start` may be called again after it has ended."""

    def __init__(self, model: Path, work_dir: Path) -> None:
        self.state = StateDir(work_dir / "state")
        self.port = free_port()
        self._log = work_dir / "server.log"
        self._arguments = [str(model), "--engine", "toy", "--port", str(self.port), "--hosts", "2"]
        self._arguments += ["--pool-memory", "64MiB", "--state-dir", str(self.state.path)]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "cluster", "serve", *self._arguments]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.wait_for(lambda: "ready after" in self.said())

    def said(self) -> str:
        return self._log.read_text()

    def wait_for(self, happened: Callable[[], bool]) -> None:
        assert self.process is not None
        deadline_s = time.monotonic() + PATIENCE_S
        while not happened():
            assert self.process.poll() is None, f"the server ended:\n{self.said()}"
            assert time.monotonic() < deadline_s, f"it did not happen:\n{self.said()}"
            time.sleep(0.1)

    def complete(self, prompt: list[int], max_tokens: int) -> str:
        body = {"model": self._arguments[0], "prompt": prompt, "max_tokens": max_tokens,
                "temperature": 0, "ignore_eos": True}  # fmt: skip
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return str(json.loads(response.read())["choices"][0]["text"])

    def status(self) -> dict[str, object]:
        command = [sys.executable, "-m", "cluster", "status", "--json"]
        command += ["--state-dir", str(self.state.path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def family(self) -> list[psutil.Process]:
        assert self.process is not None
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(model, tmp_path_factory.mktemp("cluster"))
    server.start()
    yield server
    assert server.process is not None
    server.process.terminate()
    server.process.wait(60)


def oracle(model: Path, prompt: list[int], max_tokens: int) -> str:
    config = json.loads((model / "config.json").read_text())
    spec = toy_spec(vocab_size=config["vocab_size"], max_model_len=256,
                    eos_token_ids=(config["eos_token_id"],))  # fmt: skip
    tokens = toy_generate(prompt, SamplingParams(max_tokens=max_tokens), spec)
    return Tokenizer.from_file(str(model / "tokenizer.json")).decode(tokens)


def test_it_answers_across_two_hosts(server, model):
    prompt = list(range(50))
    assert server.complete(prompt, 12) == oracle(model, prompt, 12)


def test_only_the_gateway_and_loopback_are_open(server):
    listening = [
        connection.laddr
        for process in server.family()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert any(address.port == server.port for address in listening)
    assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


@pytest.mark.parametrize("name", ["conductor", "pool-1", "prefill-0", "decode-0", "gateway"])
def test_a_killed_process_comes_back(server, model, name):
    before = server.state.read_processes()[name]
    os.kill(before.pid, signal.SIGKILL)

    def is_back() -> bool:
        now: ProcessRecord = server.state.read_processes()[name]
        return now.incarnation != before.incarnation and f"{name} was restarted" in server.said()

    server.wait_for(is_back)
    (death,) = (
        line for line in server.said().splitlines() if f"process {before.pid}) died" in line
    )
    assert re.fullmatch(rf"\d{{4}}(-\d\d){{2}} \d\d(:\d\d){{2}} {name} .*Ray restarts it", death)
    assert "raylet" not in server.said()
    server.wait_for(lambda: _is_ready(server.port))
    prompt = list(range(60))
    assert server.complete(prompt, 10) == oracle(model, prompt, 10)
    status = server.status()
    assert status["down"] == []
    lives = {life["name"]: life for life in status["processes"]}
    assert lives[name]["restarts"] == before.restarts + 1
    known = {worker["name"]: worker for worker in status["cluster"]["workers"]}
    if name in known:
        assert known[name]["incarnation"] == server.state.read_processes()[name].incarnation


def test_a_second_cluster_in_the_same_place_is_refused(server):
    command = [sys.executable, "-m", "cluster", "serve", "--state-dir", str(server.state.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "a cluster already runs in" in done.stderr


def test_a_killed_launcher_is_cleaned_up_at_the_next_start_and_sigterm_leaves_nothing(server):
    old = server.family()
    old_run_dir = Path(server.state.read_run()["run_dir"])
    old[0].kill()
    server.process.wait(60)
    server.start()
    assert not old_run_dir.exists()
    _, alive = psutil.wait_procs(old, timeout=1)
    assert alive == []

    family = server.family()
    run_dir = Path(server.state.read_run()["run_dir"])
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0, server.said()
    assert [p for p in family if p.is_running()] == []
    assert not run_dir.exists()
    assert server.state.read_run() == {}
    assert server.state.read_processes() == {}
    assert not server.state.is_locked()


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
            return True
    except OSError:
        return False
