"""One `halfmoon serve` of the real model, two of each worker on two pool nodes, for all tests."""

from __future__ import annotations

import asyncio
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from cluster.checks.client import Completion, complete, session
from cluster.checks.reference import Reference, compare, load_reference
from cluster.server_process import ServerProcess
from core.errors import HalfmoonError
from core.messages.to_conductor import WorkerRole
from engine.models import inspect_model, resolve_model

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MODEL = "smollm2-135m-instruct"
CONFIG = {
    "model": MODEL,
    "hosts": 2,
    "prefill": {"workers": 2},
    "decode": {"workers": 2},
    "max_model_len": 1024,
    "pool": {"memory": "256MiB"},
    "scheduler": {"policy": "round-robin"},
}
MAX_TOKENS = 16
LONG_TOKENS = 48
PROMPTS = {
    "one token": [504],
    "two blocks": list(range(1000, 1032)),
    "three blocks and a tail": list(range(2000, 2053)),
}
KILLED = "three blocks and a tail"


@pytest.fixture(scope="module")
def model_dir() -> Path:
    try:
        return resolve_model(MODEL)
    except (HalfmoonError, OSError) as error:
        pytest.skip(f"{MODEL} cannot be fetched: {error}")


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Reference:
    """Made before the server starts, so that they do not compete for the cores."""
    made = load_reference(model_dir)
    for prompt in PROMPTS.values():
        made.generate(prompt, MAX_TOKENS)
    made.generate(PROMPTS[KILLED], LONG_TOKENS)
    made.unload()
    return made


@pytest.fixture(scope="module")
def server(
    reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Stopped by the last test; `stop` here does nothing then."""
    made = ServerProcess(CONFIG, tmp_path_factory.mktemp("serve"))
    made.start()
    yield made
    made.stop()


def check(
    model_dir: Path,
    reference: Reference,
    name: str,
    result: Completion,
    max_tokens: int = MAX_TOKENS,
) -> None:
    """The tokens are those of `transformers` generate, near-ties apart."""
    assert result.error is None
    eos = inspect_model(model_dir).eos_token_ids
    _, mismatch = compare(name, PROMPTS[name], result.token_ids, max_tokens, eos, reference)
    assert mismatch is None


def test_it_knows_the_capital_of_france_and_speaks_to_the_official_client(server):
    """B21 and the README's example."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with client:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        asked: dict[str, Any] = {
            "model": MODEL,
            "messages": question,
            "max_tokens": 20,
            "temperature": 0,
        }
        whole = client.chat.completions.create(**asked)
        assert "Paris" in whole.choices[0].message.content
        pieces = [c.choices[0].delta.content or "" for c in
                  client.chat.completions.create(**asked, stream=True)]  # fmt: skip
        assert "".join(pieces) == whole.choices[0].message.content
        made = client.completions.create(
            model=MODEL, prompt="The sky is", max_tokens=5, temperature=0
        )
        assert made.usage is not None and made.usage.completion_tokens == 5
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model=MODEL, input="x")
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="no-such", prompt="x")


def test_tokens_equal_transformers_cold_warm_and_on_the_other_prefill(server, model_dir, reference):
    """B25, B29: every process finds the same blocks, whatever its PYTHONHASHSEED."""

    async def main() -> dict[str, list[Completion]]:
        async with session() as http:
            return {
                name: [
                    await complete(http, server.url, MODEL, prompt, MAX_TOKENS) for _ in range(3)
                ]
                for name, prompt in PROMPTS.items()
            }

    for name, results in asyncio.run(main()).items():
        for result in results:
            check(model_dir, reference, name, result)
        most = (len(PROMPTS[name]) - 1) // 16 * 16
        assert results[0].cached_tokens == 0
        assert results[2].cached_tokens == most


def test_a_decode_worker_killed_in_the_stream_costs_no_token(server, model_dir, reference):
    """B18, B37: kill -9 of the one that streams; its successor is another process."""
    killed: list[int] = []

    def kill() -> None:
        state = server.cluster_state()
        busy = {w.name for w in state.workers if w.role == WorkerRole.DECODE and w.num_assigned}
        for record in server.records("decode"):
            if record.name in busy:
                server.kill(record.pid)
                killed.append(record.pid)

    async def main() -> Completion:
        killing: list[asyncio.Task[None]] = []

        def on_token(result: Completion) -> None:
            if len(result.token_ids) == 3:
                killing.append(asyncio.create_task(asyncio.to_thread(kill)))

        async with session() as http:
            result = await complete(
                http, server.url, MODEL, PROMPTS[KILLED], LONG_TOKENS, on_token=on_token
            )
            await asyncio.gather(*killing)
            return result

    check(model_dir, reference, KILLED, asyncio.run(main()), LONG_TOKENS)
    assert len(killed) == 1
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    migrations = [x for x in lines if x.startswith("halfmoon_migrations_total{")]
    assert float(migrations[0].rsplit(" ", 1)[1]) >= 1


def test_sigterm_leaves_nothing_behind(server):
    """Runs last: no process, no file in the runtime directories, no segment."""
    family = server._descendants()
    started = {p.pid for p in family}
    assert len(started) >= 8
    server.stop()  # raises when a process outlives it
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    left = [p for p in server.state_dir.rglob("*") if p.is_socket() or p.suffix == ".lock"]
    assert left == []
    assert [n for n in os.listdir("/dev/shm") if "halfmoon" in n] == []  # noqa: PTH208
