"""Asking the gateway and reading its answers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tests.gateway.cluster import MODEL, Cluster, ids

Json = dict[str, Any]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass
class Streamed:
    """A stream, taken apart."""

    chunks: list[Any] = field(default_factory=list)
    errors: list[Any] = field(default_factory=list)
    num_pings: int = 0
    done: bool = False

    @property
    def usages(self) -> list[Any]:
        return [c.get("usage", "absent") for c in self.chunks]

    def deltas(self, index: int = 0) -> list[str]:
        made = []
        for chunk in self.chunks:
            for choice in chunk["choices"]:
                if choice["index"] == index:
                    text = choice["text"] if "text" in choice else choice["delta"].get("content")
                    made.append(text or "")
        return made

    def text(self, index: int = 0) -> str:
        return "".join(self.deltas(index))

    def finishes(self, index: int = 0) -> list[str]:
        return [
            choice["finish_reason"]
            for chunk in self.chunks
            for choice in chunk["choices"]
            if choice["index"] == index and choice["finish_reason"] is not None
        ]


def parse(raw: str) -> Streamed:
    streamed = Streamed()
    for event in raw.split("\n\n"):
        if event == "data: [DONE]":
            streamed.done = True
        elif event.startswith(":"):
            streamed.num_pings += 1
        elif event:
            body = json.loads(event.removeprefix("data: "))
            (streamed.errors if "error" in body else streamed.chunks).append(body)
    return streamed


def body(path: str, output: str | None = None, **fields) -> Json:
    """A request whose output is forced to read `output`, and no more unless asked."""
    made: dict[str, Any] = {"model": MODEL}
    if path == COMPLETIONS:
        made["prompt"] = "say it"
    else:
        made["messages"] = [{"role": "user", "content": "say it"}]
    if output is not None:
        forced = ids(output)
        made |= {"forced_token_ids": forced, "max_tokens": len(forced)}
    return {k: v for k, v in (made | fields).items() if v is not ...}


async def ask(
    cluster: Cluster, path: str, fields: dict[str, Any], **kwargs
) -> tuple[int, dict[str, Any]]:
    async with cluster.session.post(path, json=fields, **kwargs) as response:
        made: dict[str, Any] = await response.json()
        return response.status, made


async def answer(cluster: Cluster, path: str, output: str | None = None, **fields) -> Json:
    status, made = await ask(cluster, path, body(path, output, **fields))
    assert status == 200, made
    return made


async def stream(cluster: Cluster, path: str, output: str | None = None, **fields) -> Streamed:
    made = body(path, output, stream=True, **fields)
    async with cluster.session.post(path, json=made) as response:
        assert response.status == 200, await response.text()
        return parse(await response.text())


def text_of(made: dict[str, Any], index: int = 0) -> str:
    choice = made["choices"][index]
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text
