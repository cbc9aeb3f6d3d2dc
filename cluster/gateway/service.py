"""The gateway process: HTTP in front, Conductor and workers behind.

1. `start` listens for HTTP, then looks for the Conductor; `/ready` tells when both sides work.
2. A call is validated, tokenised in a thread, hashed, and becomes one request per choice.
3. `Dispatcher` runs the requests; `Answer` turns their outputs into the body or the stream.
4. `stop` ends every request at the workers and closes everything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from cluster.gateway.app import Api
from cluster.gateway.body import BodyReader
from cluster.gateway.dispatch import Dispatcher
from cluster.gateway.http import HttpServer
from cluster.gateway.metrics import Metrics
from cluster.gateway.prompts import Preparer
from cluster.gateway.tokenizer import Tokenizer
from cluster.request_events import RetryLimits
from core.config import GatewayConfig
from core.errors import HalfmoonError
from core.hashing import HashRoot
from core.ids import Address
from core.messages.to_conductor import ClusterState, WorkerRole
from core.net import HEARTBEAT_S, Identity

log = logging.getLogger(__name__)

POLL_S = 1.0
"""How often the Conductor is asked about the cluster; after three failures nothing is known."""
NOT_READY_POLL_S = 0.1


class Gateway:
    """One gateway. `hash_root` makes the root of block hashes for a tenant's salt.

    `receive_timeout_s` bounds how long a client may take to send a head, and a body. Prompts,
    outputs and keys are never logged.
    """

    def __init__(
        self,
        config: GatewayConfig,
        *,
        tokenizer: Tokenizer,
        hash_root: Callable[[str], HashRoot],
        eos_token_ids: Sequence[int],
        identity: Identity,
        secret: bytes,
        host: str,
        port: int,
        resolve_conductor: Callable[[], Awaitable[Address]],
        heartbeat_s: float = HEARTBEAT_S,
        receive_timeout_s: float = 30.0,
    ) -> None:
        self.metrics = Metrics(config.model_name)
        self.port = port
        self._host = host
        self._config = config
        self.dispatcher = Dispatcher(
            identity=identity,
            secret=secret,
            address=lambda: Address(self._host, self.port),
            resolve_conductor=resolve_conductor,
            limits=RetryLimits(
                config.max_attempts, config.retry_window_s, config.attempt_timeout_s
            ),
            place_timeout_s=config.place_timeout_s,
            metrics=self.metrics,
            heartbeat_s=heartbeat_s,
        )
        self._api = Api(
            config,
            tokenizer=tokenizer,
            preparer=Preparer(config, tokenizer, hash_root, eos_token_ids),
            dispatcher=self.dispatcher,
            metrics=self.metrics,
            status=self,
            bodies=BodyReader(config, receive_timeout_s),
        )
        self._http = HttpServer(
            self._api.routes(), config, self.metrics, head_timeout_s=receive_timeout_s
        )
        self._state: ClusterState | None = None
        self._polling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen; `port` is the real one afterwards. Raises `ConfigError`."""
        self.port = await self._http.start(self._host, self.port)
        self.dispatcher.start()
        self._polling = asyncio.create_task(self._poll_forever())

    async def stop(self) -> None:
        """End every request and connection. Calling it twice is allowed."""
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)
        await self.dispatcher.stop()
        await self._http.stop()
        self._api.close()

    def not_ready(self) -> str | None:
        """Say why requests cannot be served now; `None` when they can."""
        if not self.dispatcher.connected:
            return "no Conductor"
        if self._state is None:
            return "the Conductor has not told of the cluster yet"
        roles = {worker.role for worker in self._state.workers}
        if WorkerRole.COUPLED not in roles and not {
            WorkerRole.PREFILL, WorkerRole.DECODE,
        } <= roles:  # fmt: skip
            return "no prefill and decode worker"
        if self.dispatcher.stalled_s() > self._config.stall_timeout_s:
            return "requests make no progress"
        return None

    async def _poll_forever(self) -> None:
        num_failures = 0
        while True:
            try:
                self._state = await self.dispatcher.cluster_state(POLL_S)
                self.metrics.set_workers(self._state)
                num_failures = 0
            except (HalfmoonError, TimeoutError) as error:
                num_failures += 1
                if num_failures >= 3:
                    self._state = None
                log.debug("no cluster state: %s", error)
            await asyncio.sleep(POLL_S if self.not_ready() is None else NOT_READY_POLL_S)
