"""The HTTP edge: keys, limits, malformed requests, and what every answer carries."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any
from urllib.parse import unquote

import aiohttp
import pytest
from yarl import URL

from cluster.gateway import http
from core.hashing import extend_block_hashes, join_hashes
from tests.gateway.client import CHAT, COMPLETIONS, answer, ask, body
from tests.gateway.cluster import config, hash_root, ids, running


async def raw(cluster, request: bytes, *, hold: asyncio.Event | None = None) -> bytes:
    """Send bytes, return all that comes until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.gateway.port)
    writer.write(request)
    await writer.drain()
    try:
        async with asyncio.timeout(5):
            return await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def error_of(answered: bytes) -> tuple[int, dict[str, Any]]:
    head, _, rest = answered.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(rest)["error"]


async def test_routes_about_the_server(cluster):
    for path in ("/health", "/version", "/load", "/v1/models", "/v1/models/tiny", "/metrics"):
        async with cluster.session.get(path) as response:
            assert response.status == 200, path
    async with cluster.session.get("/v1/models") as response:
        (card,) = (await response.json())["data"]
        assert (card["id"], card["max_model_len"]) == ("tiny", 512)


async def test_tokenize_and_detokenize(cluster):
    status, made = await ask(cluster, "/tokenize", {"model": "tiny", "prompt": "hello 世"})
    assert status == 200
    assert made["tokens"] == ids("hello 世")
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    assert made["token_strs"][0] == "hello"
    assert made["max_model_len"] == 512
    status, back = await ask(cluster, "/detokenize", {"tokens": made["tokens"]})
    assert back == {"prompt": "hello 世"}
    messages = [{"role": "user", "content": "a"}]
    _, chat = await ask(cluster, "/tokenize", {"messages": messages})
    assert chat["tokens"] == ids("<|start|>user\na<|end|>\n<|start|>assistant\n")
    status, made = await ask(cluster, "/detokenize", {"tokens": [-1]})
    assert (status, made["error"]["param"]) == (400, "tokens")


async def test_readiness_follows_conductor_and_workers(tmp_path):
    """Ready once the Conductor tells of a worker of each role; not without a Conductor."""
    async with running(tmp_path, num_prefill=1, num_decode=1) as cluster:
        assert await _ready(cluster, 200)
        await cluster.conductor.stop()
        assert await _ready(cluster, 503)
        async with cluster.session.get("/health") as response:
            assert response.status == 200


async def test_a_prefill_worker_alone_is_not_ready(tmp_path):
    async with running(tmp_path, num_decode=0) as cluster:
        async with asyncio.timeout(5):
            while "worker" not in (cluster.gateway.not_ready() or ""):
                await asyncio.sleep(0.01)
        assert await _ready(cluster, 503)


async def _ready(cluster, status: int) -> bool:
    async with asyncio.timeout(10):
        while True:
            async with cluster.session.get("/ready") as response:
                if response.status == status:
                    assert status == 200 or "Retry-After" in response.headers
                    return True
            await asyncio.sleep(0.02)


async def test_unknown_paths_and_methods(cluster):
    for path, method, status in [
        ("/nope", "GET", 404),
        ("/v1/completions/", "POST", 404),
        (COMPLETIONS, "GET", 405),
        ("/health", "DELETE", 405),
    ]:
        async with cluster.session.request(method, path) as response:
            assert response.status == status
            assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_request_ids(cluster):
    """Echoed when valid; made otherwise."""
    for given, echoed in [("abc-1", True), ("a b", False), ("x" * 200, False), ("", False)]:
        async with cluster.session.get("/health", headers={"X-Request-Id": given}) as response:
            assert (response.headers["X-Request-Id"] == given) is echoed
    headers = {"X-Request-Id": "mine"}
    async with cluster.session.post(
        CHAT, json=body(CHAT, "a", stream=True), headers=headers
    ) as response:
        assert response.headers["X-Request-Id"] == "mine"
        chunk = json.loads((await response.text()).split("\n\n")[0].removeprefix("data: "))
        assert chunk["id"] != "mine"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "5", '"a"', "null", '{"a": NaN}', '{"a":' * 65 + "1" + "}" * 65, '{"a": "\xff'],
)
async def test_bodies_that_are_no_json_object(cluster, text):
    headers = {"Content-Type": "application/json"}
    data = text.encode("latin-1")
    async with cluster.session.post(COMPLETIONS, data=data, headers=headers) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] is None


async def test_brackets_in_strings_are_no_nesting(cluster):
    assert (await answer(cluster, COMPLETIONS, "a", prompt="[{" * 100))["choices"]


async def test_other_kinds_of_bodies(cluster):
    """415."""
    for headers in (
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ):
        async with cluster.session.post(COMPLETIONS, data=b"{}", headers=headers) as response:
            assert response.status == 415


async def test_a_large_body_is_refused_unread(cluster):
    """413 by its announced length, before `100 Continue`; the connection ends."""
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        "Expect: 100-continue\r\nContent-Length: 99999999999\r\n\r\n"
    )
    status, error = error_of(await raw(cluster, head.encode()))
    assert (status, error["type"]) == (413, "invalid_request_error")


async def test_a_chunked_body_is_refused_at_the_limit(tmp_path):
    async with running(tmp_path, config(max_body_bytes=1000)) as cluster:
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            "Transfer-Encoding: chunked\r\n\r\n"
        )
        chunk = "400\r\n" + "x" * 1024 + "\r\n"
        assert error_of(await raw(cluster, (head + chunk).encode()))[0] == 413


async def test_a_slow_sender_is_refused(tmp_path):
    """408."""
    async with running(tmp_path, receive_timeout_s=0.05) as cluster:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{"
        for sent in (head, "POST /v1/comp", "GET /health HTTP/1.1\r\nHost: x\r\n"):
            status, error = error_of(await raw(cluster, sent.encode()))
            assert (status, error["type"]) == (408, "invalid_request_error")


async def test_targets_in_absolute_form(cluster):
    """As a proxy sends them."""
    for scheme in ("http", "HTTPS"):
        head = f"GET {scheme}://x:80/v1/models?a=b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        assert (await raw(cluster, head.encode())).startswith(b"HTTP/1.1 200 ")


async def test_a_model_by_its_name(tmp_path):
    """With a slash in it, as it is or escaped; another one is `model_not_found`."""
    async with running(tmp_path, config(model_name="org/tiny")) as cluster:
        for name, status in [("org/tiny", 200), ("org%2Ftiny", 200), ("n%20o", 404), ("", 404)]:
            async with cluster.session.get(
                URL(f"{cluster.url}/v1/models/{name}", encoded=True)
            ) as got:
                assert got.status == status, name
                if status == 404:
                    error = (await got.json())["error"]
                    assert (error["code"], error["param"]) == ("model_not_found", "model")
                    assert f"`{unquote(name)}`" in error["message"]


async def test_an_identity_encoding_is_none(cluster):
    headers = {"Content-Encoding": "Identity"}
    async with cluster.session.post(CHAT, json=body(CHAT, "a"), headers=headers) as response:
        assert response.status == 200


async def test_large_headers_are_refused(cluster):
    """431, for one long header, for many, and for many short ones."""
    one = f"GET /health HTTP/1.1\r\nHost: x\r\nA: {'a' * 20_000}\r\n\r\n"
    many = "GET /health HTTP/1.1\r\nHost: x\r\n" + f"B: {'b' * 1000}\r\n" * 20 + "\r\n"
    many = many.replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n")
    short = "GET /health HTTP/1.1\r\nHost: x\r\n" + "C: c\r\n" * 200 + "\r\n"
    for request in (one, many, short):
        assert error_of(await raw(cluster, request.encode()))[0] == 431


async def test_malformed_http_gets_our_error_body(cluster):
    status, error = error_of(await raw(cluster, b"NONSENSE\r\n\r\n"))
    assert (status, error["type"]) == (400, "invalid_request_error")


async def test_keys_guard_every_route_but_health(tmp_path):
    keys = ("key-a", "key-b")
    async with running(tmp_path, config(api_keys=keys)) as cluster:
        for path in ("/v1/models", "/metrics", "/ready", "/nope", "/health/../v1/models"):
            for header in ({}, {"Authorization": "Bearer nope"}, {"Authorization": "Basic key-a"}):
                async with cluster.session.get(path, headers=header) as response:
                    assert response.status == 401, (path, header)
                    assert (await response.json())["error"]["code"] == "invalid_api_key"
        async with cluster.session.get("/health") as response:
            assert response.status == 200
        for key in keys:
            header = {"Authorization": f"Bearer {key}"}
            async with cluster.session.get("/v1/models", headers=header) as response:
                assert response.status == 200


async def test_tenants_and_salts_have_hashes_of_their_own(tmp_path):
    """Two keys never share a block; a `cache_salt` narrows its own tenant's namespace."""
    async with running(tmp_path, config(api_keys=("a", "b"))) as cluster:
        seen = []
        for key, salt in [("a", None), ("b", None), ("a", "s"), ("b", "s"), ("a", None)]:
            headers = {"Authorization": f"Bearer {key}"}
            made = body(COMPLETIONS, "x", prompt="0123456789", cache_salt=salt)
            status, _ = await ask(cluster, COMPLETIONS, made, headers=headers)
            assert status == 200
            seen.append(cluster.workers[0].requests[-1].block_hashes)
        assert len(set(seen)) == 4
        assert seen[4] == seen[0]


async def test_without_keys_blocks_are_shared(cluster):
    await answer(cluster, COMPLETIONS, "x", prompt="0123456789")
    request = cluster.workers[0].requests[0]
    expected = extend_block_hashes(hash_root("").digest(), ids("0123456789"), 4)
    assert request.block_hashes == join_hashes(expected)


async def test_too_many_requests_in_flight(tmp_path):
    """429 with Retry-After, counted in choices, and given back afterwards."""
    async with running(tmp_path, config(max_inflight_requests=2)) as cluster:
        status, _ = await ask(cluster, COMPLETIONS, body(COMPLETIONS, "a", n=3))
        assert status == 429
        prefill = cluster.workers[0]
        prefill.script.pause_at = 0
        first = asyncio.create_task(answer(cluster, COMPLETIONS, "a", n=2))
        async with asyncio.timeout(5):
            await prefill.arrived.wait()
        made = body(COMPLETIONS, "a")
        async with cluster.session.post(COMPLETIONS, json=made) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["code"] == "rate_limit_exceeded"
        prefill.script.go.set()
        await first
        assert await answer(cluster, COMPLETIONS, "a")


async def test_connections_over_the_limit_are_refused_and_closed(tmp_path):
    """503 with Retry-After, whatever is asked but `/health`; a place that is given up is free."""
    async with running(tmp_path, config(max_connections=1)) as cluster:
        async with cluster.session.get("/version") as response:
            assert response.status == 200  # and the session keeps its connection
        made = json.dumps(body(COMPLETIONS, "a"))
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(made)}\r\n\r\n"
        refused = await raw(cluster, (head + made).encode())
        status, error = error_of(refused)
        assert (status, error["type"]) == (503, "server_error")
        assert b"\r\nRetry-After: 1\r\n" in refused
        alive = await raw(cluster, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert alive.startswith(b"HTTP/1.1 200 ")
        assert await raw(cluster, b"") == b""  # says nothing, and is closed all the same
        assert await answer(cluster, COMPLETIONS, "a")
        await cluster.session.close()
        cluster.session = aiohttp.ClientSession(cluster.url)
        async with asyncio.timeout(5):
            while (await ask(cluster, COMPLETIONS, body(COMPLETIONS, "a")))[0] == 503:
                pass
        await cluster.session.close()


async def test_far_over_the_limit_connections_are_not_even_answered(tmp_path, monkeypatch):
    monkeypatch.setattr(http, "_MAX_SURPLUS", 0)
    async with running(tmp_path, config(max_connections=1)) as cluster:
        await ask(cluster, COMPLETIONS, body(COMPLETIONS, "a"))
        answered = b""
        with contextlib.suppress(ConnectionError):
            answered = await raw(cluster, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answered == b""


async def test_no_worker_is_503_with_retry_after(tmp_path):
    settings = config(retry_window_s=0.1)
    async with running(tmp_path, settings, num_prefill=0, num_decode=0) as cluster:
        for streaming in (False, True):
            made = body(COMPLETIONS, "a", stream=streaming)
            async with cluster.session.post(COMPLETIONS, json=made) as response:
                assert response.status == 503
                assert "Retry-After" in response.headers


async def test_keep_alive_serves_many_requests_on_one_connection(cluster):
    for _ in range(3):
        await answer(cluster, COMPLETIONS, "a")
        await ask(cluster, COMPLETIONS, body(COMPLETIONS, "a", n=0))
    assert len(cluster.session.connector._conns) == 1
    (idle,) = cluster.session.connector._conns.values()
    assert len(idle) == 1


async def test_ready_means_making_progress(tmp_path):
    """Requests at workers and no token within the stall bound: 503 until there is one."""
    async with running(tmp_path, config(stall_timeout_s=0.3)) as cluster:
        assert await _ready(cluster, 200)
        decode = cluster.workers[1]
        decode.script.pause_at = 1
        asking = asyncio.create_task(answer(cluster, COMPLETIONS, "abc"))
        seen: set[str | None] = set()
        async with asyncio.timeout(5):
            while "requests make no progress" not in seen:
                seen.add(cluster.gateway.not_ready())
                await asyncio.sleep(0)
        decode.script.go.set()
        await asking
        assert await _ready(cluster, 200)
