"""Workers, Conductor and clients that come and go (cases B35, B37, B38 and the like)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct

import aiohttp
import pytest

from core.hashing import unpack_token_ids
from core.messages.to_conductor import WorkerRole
from core.messages.to_gateway import FailureCode
from tests.gateway.client import CHAT, COMPLETIONS, answer, ask, body, parse, stream, text_of
from tests.gateway.cluster import config, ids, running

TEXT = "one two three"


async def until(event: asyncio.Event) -> None:
    async with asyncio.timeout(5):
        await event.wait()


async def count(cluster, name: str) -> float:
    async with cluster.session.get("/metrics") as response:
        for line in (await response.text()).splitlines():
            if line.startswith(name):
                return float(line.split()[-1])
    return 0.0


@pytest.mark.parametrize("pause_at", [1, 4, len(TEXT) - 1])
async def test_b37_a_decode_worker_dies_in_a_stream(tmp_path, pause_at):
    """B37: its requests continue elsewhere; no token lost or repeated, usage counted once."""
    async with running(tmp_path) as cluster:
        dying = cluster.workers[1]
        dying.script.pause_at = pause_at
        options = {"include_usage": True}
        streaming = asyncio.create_task(
            stream(cluster, COMPLETIONS, TEXT, stream_options=options, seed=5, logprobs=0)
        )
        await until(dying.arrived)
        await cluster.add_worker(WorkerRole.DECODE, "d1")
        while len(cluster.gateway.dispatcher._live) and (
            next(iter(cluster.gateway.dispatcher._live.values())).machine.output_token_ids
            != ids(TEXT)[:pause_at]
        ):
            await asyncio.sleep(0.005)
        await dying.kill()
        cluster.workers.remove(dying)
        streamed = await streaming
        assert streamed.text() == TEXT
        assert streamed.errors == []
        assert streamed.usages[-1]["completion_tokens"] == len(ids(TEXT))
        assert streamed.usages[-1]["prompt_tokens"] == 6
        again = cluster.workers[0].requests[1]
        assert again.attempt.attempt == 2
        assert again.num_output_tokens == pause_at
        assert unpack_token_ids(again.token_ids) == (*ids("say it"), *ids(TEXT)[:pause_at])
        assert again.params == cluster.workers[0].requests[0].params
        assert await count(cluster, "halfmoon_migrations_total") == 1


async def test_b37_a_prefill_worker_dies_before_its_token(tmp_path):
    """B37: nothing was sent yet; the other prefill worker does it."""
    async with running(tmp_path, num_prefill=2) as cluster:
        for worker in cluster.workers[:2]:
            worker.script.pause_at = 0
        asking = asyncio.create_task(answer(cluster, CHAT, TEXT))
        waits = [asyncio.ensure_future(until(w.arrived)) for w in cluster.workers[:2]]
        done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in pending:
            wait.cancel()
        dying = cluster.workers[waits.index(done.pop())]
        await dying.kill()
        cluster.workers.remove(dying)
        cluster.workers[0].script.go.set()
        assert text_of(await asking) == TEXT
        decode = cluster.workers[-1]
        assert [r.attempt.attempt for r in decode.requests] == [1, 2]
        assert decode.requests[0].attempt in decode.cancelled


async def test_b37_without_another_worker_it_is_503(tmp_path):
    """B37: never 200 with an error inside."""
    async with running(tmp_path, config(retry_window_s=0.3)) as cluster:
        dying = cluster.workers[0]
        dying.script.pause_at = 0
        asking = asyncio.create_task(ask(cluster, COMPLETIONS, body(COMPLETIONS, TEXT)))
        await until(dying.arrived)
        await dying.kill()
        cluster.workers.remove(dying)
        status, made = await asking
        assert (status, made["error"]["code"]) == (503, "service_unavailable")


async def test_a_stream_that_cannot_go_on_ends_with_an_error_event(tmp_path):
    """One error event, and no `[DONE]`."""
    async with running(tmp_path, config(retry_window_s=0.3)) as cluster:
        dying = cluster.workers[1]
        dying.script.pause_at = 3
        made = body(COMPLETIONS, TEXT, stream=True)
        async with cluster.session.post(COMPLETIONS, json=made) as response:
            first = await response.content.readuntil(b"\n\n")
            await dying.kill()
            cluster.workers.remove(dying)
            streamed = parse((first + await response.content.read()).decode())
        assert [e["error"]["code"] for e in streamed.errors] == ["service_unavailable"]
        assert not streamed.done
        assert TEXT.startswith(streamed.text())


async def test_b38_a_preempted_request_resumes_exactly(cluster):
    """B38: however often; nobody is blamed."""
    decode = cluster.workers[1]
    decode.script.failures.extend([FailureCode.PREEMPTED] * 4)
    assert text_of(await answer(cluster, COMPLETIONS, TEXT)) == TEXT
    assert await count(cluster, "vllm:num_preemptions_total") == 4


async def test_b38_what_never_fits_is_400(cluster):
    """B38: at once."""
    cluster.workers[0].script.failures.append(FailureCode.NEVER_FITS)
    status, made = await ask(cluster, COMPLETIONS, body(COMPLETIONS, TEXT))
    assert (status, made["error"]["code"]) == (400, "context_length_exceeded")


async def test_an_engine_error_is_tried_once_elsewhere(cluster):
    failures = cluster.workers[0].script.failures
    failures.append(FailureCode.ENGINE_ERROR)
    assert text_of(await answer(cluster, COMPLETIONS, TEXT)) == TEXT
    failures.extend([FailureCode.ENGINE_ERROR] * 2)
    status, made = await ask(cluster, COMPLETIONS, body(COMPLETIONS, TEXT))
    assert (status, made["error"]["code"]) == (500, "server_error")


@pytest.mark.parametrize(
    "code", [c for c in FailureCode if c not in (FailureCode.NEVER_FITS, FailureCode.ENGINE_ERROR)]
)
@pytest.mark.parametrize("which", [0, 1])
async def test_every_other_failure_is_worth_another_attempt(cluster, code, which):
    cluster.workers[which].script.failures.append(code)
    assert text_of(await answer(cluster, COMPLETIONS, TEXT)) == TEXT


async def test_duplicated_frames_change_nothing(cluster):
    """Idempotent by (request, attempt, seq)."""
    for worker in cluster.workers:
        worker.script.duplicate = True
    streamed = await stream(cluster, COMPLETIONS, TEXT, stream_options={"include_usage": True}, n=2)
    assert [streamed.text(i) for i in range(2)] == [TEXT, TEXT]
    assert streamed.usages[-1]["completion_tokens"] == 2 * len(ids(TEXT))


async def test_tokens_of_decode_that_overtake_the_first(cluster):
    """The first token comes over another connection and later than the second."""
    prefill, decode = cluster.workers
    prefill.script.pause_at = 0
    asking = asyncio.create_task(answer(cluster, COMPLETIONS, TEXT))
    await until(decode.arrived)
    async with asyncio.timeout(5):
        while not all(t.done() for t in decode.running.values()) or not decode.running:
            await asyncio.sleep(0.005)
    prefill.script.go.set()
    assert text_of(await asking) == TEXT


async def test_a_coupled_worker_does_it_alone(tmp_path):
    async with running(tmp_path, num_prefill=0, num_decode=0, num_coupled=1) as cluster:
        assert text_of(await answer(cluster, COMPLETIONS, TEXT)) == TEXT
        assert text_of(await answer(cluster, COMPLETIONS, "a")) == "a"
        requests = cluster.workers[0].requests
        assert [getattr(r, "prefill", "absent") for r in requests] == [None, None]


async def test_the_conductor_dies_and_streams_go_on(tmp_path):
    """New requests wait for its next life."""
    async with running(tmp_path) as cluster:
        decode = cluster.workers[1]
        decode.script.pause_at = 3
        streaming = asyncio.create_task(stream(cluster, COMPLETIONS, TEXT))
        await until(decode.arrived)
        await cluster.conductor.stop()
        asking = asyncio.create_task(answer(cluster, COMPLETIONS, TEXT))
        decode.script.go.set()
        assert (await streaming).text() == TEXT
        await cluster.start_conductor()
        assert text_of(await asking) == TEXT


async def test_what_ended_without_a_conductor_is_not_assigned_by_the_next(tmp_path):
    """The workers register what they have not noticed the end of; the gateway knows better."""
    async with running(tmp_path) as cluster:
        decode = cluster.workers[1]
        decode.script.pause_at = 3
        streaming = asyncio.create_task(stream(cluster, COMPLETIONS, TEXT))
        await until(decode.arrived)
        await cluster.conductor.stop()
        decode.script.go.set()
        assert (await streaming).text() == TEXT
        await cluster.start_conductor()
        view = cluster.conductor.conductor.view
        async with asyncio.timeout(5):
            while len(view.workers) < 2 or not view.gateways or view.assignments:
                await asyncio.sleep(0.01)


async def test_without_a_conductor_a_request_is_503_in_bounded_time(tmp_path):
    settings = config(place_timeout_s=0.1, retry_window_s=0.1)
    async with running(tmp_path, settings) as cluster:
        await cluster.conductor.stop()
        status, _ = await ask(cluster, COMPLETIONS, body(COMPLETIONS, TEXT))
        assert status == 503


# --- clients that leave -------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize(("worker", "pause_at"), [(0, 0), (1, 1), (1, 5)])
async def test_b35_a_client_that_leaves_is_cancelled_everywhere(
    cluster, streaming, reset, worker, pause_at
):
    """B35: before and after the first token, with FIN and with RST, stream or not."""
    paused = cluster.workers[worker]
    paused.script.pause_at = pause_at
    _, writer = await asyncio.open_connection("127.0.0.1", cluster.gateway.port)
    raw = json.dumps(body(COMPLETIONS, TEXT, stream=streaming)).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    await until(paused.arrived)
    if reset:
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    else:
        writer.close()
    for each in cluster.workers:
        await until(each.was_cancelled)
        assert each.cancelled == [each.requests[0].attempt]
    await cluster.settle()
    paused.script.go.set()
    paused.script.pause_at = None
    assert text_of(await answer(cluster, COMPLETIONS, TEXT)) == TEXT


async def test_b35_a_storm_of_leavers_leaves_nothing(cluster):
    """B35, S08: 50 clients that leave at different moments."""
    cluster.workers[1].script.pause_at = 2

    async def leave(i: int) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.002 * i):
                await ask(cluster, COMPLETIONS, body(COMPLETIONS, TEXT))

    await asyncio.gather(*(leave(i) for i in range(50)))
    await cluster.settle()
    cluster.workers[1].script.go.set()
    assert text_of(await answer(cluster, COMPLETIONS, TEXT)) == TEXT
    async with asyncio.timeout(5):
        while sum(w.num_assigned for w in cluster.conductor.conductor.state(0.0).workers):
            await asyncio.sleep(0.01)


async def test_a_client_that_stops_reading_is_cut_off(tmp_path):
    """The buffer is bounded; then its requests end at the workers."""
    settings = config(stream_buffer_bytes=2000, max_model_len=100_000)
    async with running(tmp_path, settings) as cluster:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", cluster.gateway.port))
        reader, writer = await asyncio.open_connection(sock=sock)
        made = body(COMPLETIONS, max_tokens=99_000, stream=True, logprobs=20)
        raw = json.dumps(made).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + raw)
        async with asyncio.timeout(30):
            await cluster.workers[1].was_cancelled.wait()
        await cluster.settle()
        async with asyncio.timeout(20):
            rest = await reader.read()
        assert b"error" not in rest and not rest.endswith(b"0\r\n\r\n")  # cut, not ended
        writer.close()
        await writer.wait_closed()
        assert text_of(await answer(cluster, COMPLETIONS, TEXT)) == TEXT


async def test_pings_come_during_a_long_prefill(tmp_path):
    async with running(tmp_path, config(ping_interval_s=0.02)) as cluster:
        prefill = cluster.workers[0]
        prefill.script.pause_at = 0
        made = body(CHAT, TEXT, stream=True)
        async with cluster.session.post(CHAT, json=made) as response:
            assert response.status == 200
            seen = b""
            while b": ping" not in seen:
                seen += await response.content.readuntil(b"\n\n")
            prefill.script.go.set()
            seen += await response.content.read()
        streamed = parse(seen.decode())
        assert streamed.num_pings >= 1
        assert streamed.text() == TEXT


async def test_stopping_the_gateway_cancels_at_the_workers(tmp_path):
    async with running(tmp_path) as cluster:
        decode = cluster.workers[1]
        decode.script.pause_at = 2
        asking = asyncio.create_task(ask(cluster, COMPLETIONS, body(COMPLETIONS, TEXT)))
        await until(decode.arrived)
        await cluster.gateway.stop()
        with contextlib.suppress(aiohttp.ClientError):
            status, _ = await asking
            assert status == 503
        await until(decode.was_cancelled)


async def test_a_stream_cut_off_by_the_gateways_end_says_so(tmp_path):
    """One error event of the usual shape, and no `[DONE]`; a request that comes now gets 503."""
    async with running(tmp_path) as cluster:
        cluster.workers[1].script.pause_at = 2
        made = body(COMPLETIONS, TEXT, stream=True)
        async with cluster.session.post(COMPLETIONS, json=made) as response:
            first = await response.content.readuntil(b"\n\n")
            await cluster.gateway.dispatcher.stop()
            streamed = parse((first + await response.content.read()).decode())
        expected = {
            "message": "The server is shutting down.",
            "type": "server_error",
            "param": None,
            "code": "service_unavailable",
        }
        assert streamed.errors == [{"error": expected}]
        assert not streamed.done
        assert await ask(cluster, COMPLETIONS, made) == (503, {"error": expected})
