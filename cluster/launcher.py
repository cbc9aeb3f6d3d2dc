"""`halfmoon serve`: check everything, start everything, watch, and leave nothing behind.

1. Take the state directory, clean up after a killed run, check port, model and memory.
2. Start or join Ray, then all processes at once; each waits for what it needs.
3. Wait until the gateway says that it is ready, and watch. Ray restarts what dies.
4. On SIGINT, SIGTERM or SIGHUP stop in order: gateway, workers, pool nodes, Conductor, Ray.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cluster.config import Config
from cluster.deployment import check_config, plan, warnings
from cluster.machine import check_addresses, this_machine
from cluster.plans import Deployment
from cluster.state_dir import ProcessRecord, StateDir, is_alive, remove_run_dir
from cluster.watch import Lives
from core.errors import ConfigError, HalfmoonError

if TYPE_CHECKING:
    from ray import ObjectRef

READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 12.0
_POLL_S = 0.2
_WATCH_S = 1.0


def serve(config: Config, console: Console) -> int:
    """Run a cluster until a signal comes; return the exit code. Raises `ConfigError`."""
    state = StateDir(config.state_dir)
    state.prepare()
    lock = state.lock()
    try:
        reaped = state.reap()
        if reaped:
            console.print(f"cleaned up after a killed run: ended {len(reaped)} processes")
        state.ensure_secret()
        state.read_secret()
        config = config.model_copy(update={"port": check_addresses(config)})
        deployment = plan_for_this_machine(config, console)
        # Ray prints what it thinks of its processes; the console has the real output.
        with (
            (state.logs / "ray.log").open("w", buffering=1) as log,
            contextlib.redirect_stdout(log),
        ):
            return _Run(config, deployment, state, console).run()
    finally:
        os.close(lock)


def plan_for_this_machine(config: Config, console: Console) -> Deployment:
    """Find the model, fetching it if need be, and plan. Raises `ConfigError`."""
    from engine.models import inspect_model, resolve_model

    machine = this_machine()
    check_config(config, machine)
    for line in warnings(config, machine):
        console.print(f"[yellow]warning:[/] {line}")
    with model_progress(console) as report:
        info = inspect_model(resolve_model(config.model, report=report), report=report)
    return plan(config, info, machine, config.gateway.api_keys)


def check_place(config: Config, console: Console) -> None:
    """Check state directory and addresses as `serve` does. Raises `ConfigError`.

    Beside a cluster that runs with this state directory the addresses are not looked at: they may
    be taken by that cluster itself.
    """
    state = StateDir(config.state_dir)
    state.prepare()
    if state.is_locked():
        console.print(
            f"[yellow]warning:[/] a cluster runs in {state.path}: stop it before you start this "
            "one; `host` and `port` were not checked"
        )
    else:
        check_addresses(config)


@contextlib.contextmanager
def model_progress(console: Console) -> Iterator[Callable[[str, float], None]]:
    """Show what `engine.models` reports: a bar on a terminal, a line for each stage elsewhere."""
    if not console.is_terminal:
        told: set[str] = set()

        def tell(stage: str, _: float) -> None:
            if stage not in told:
                told.add(stage)
                console.print(stage)

        yield tell
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("looking at the model", total=1.0)

        def report(stage: str, fraction: float) -> None:
            progress.update(task, description=stage, completed=fraction)

        yield report


class _Run:
    """One run of a cluster: its Ray, its actors, its end."""

    def __init__(
        self, config: Config, deployment: Deployment, state: StateDir, console: Console
    ) -> None:
        self._config, self._deployment = config, deployment
        self._state, self._console = state, console
        self._run_dir = state.make_run_dir()
        self._namespace = f"halfmoon-{secrets.token_hex(4)}"
        self._actors: dict[str, Any] = {}
        self._started_s = time.monotonic()
        self._signal: int | None = None
        host = "127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{config.port}"

    def run(self) -> int:
        """Start, watch, stop."""
        self._take_signals()
        try:
            self._state.write_run(self._run_dir, [], self.url)
            with self._stages() as stage:
                stage("starting Ray")
                self._start_ray()
                stage("starting the processes")
                self._start_actors()
                self._state.write_run(self._run_dir, _descendants(), self.url)
                self._await_actors(stage)
                stage("waiting until the gateway is ready")
                self._await_ready()
            self._announce()
            return self._watch()
        except _Stopped:
            return 0
        finally:
            self._stop()

    # --- start ---

    def _take_signals(self) -> None:
        def note(number: int, _: FrameType | None) -> None:
            if self._signal is None:
                self._console.print("stopping")
            self._signal = number

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, note)

    @contextlib.contextmanager
    def _stages(self) -> Iterator[Any]:
        """Show what is going on, as a moving line on a terminal and as plain lines elsewhere."""
        if not self._console.is_terminal:
            yield lambda text: self._console.print(f"{self._elapsed_s():5.1f} s: {text}")
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(
            *columns, console=self._console, transient=True, redirect_stdout=False
        ) as progress:
            task = progress.add_task("")
            yield lambda text: progress.update(task, description=text)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def _start_ray(self) -> None:
        from cluster import ray_runtime

        num_slots = len(self._deployment.workers) + len(self._deployment.pools) + 2
        address = self._config.ray.address
        if address is None:
            ray_runtime.start_embedded(
                self._run_dir,
                num_slots=num_slots,
                object_store_bytes=self._config.ray.object_store_bytes,
            )
        else:
            ray_runtime.join(address, num_slots=num_slots)
        self._take_signals()  # Ray has put its own handler for SIGTERM in place
        self._raise_if_stopped()

    def _start_actors(self) -> None:
        from cluster import actors, ray_runtime

        plan = self._deployment
        on_gpu = [w for w in plan.workers if w.engine.device != "cpu"]
        share = ray_runtime.gpu_share(len(on_gpu))
        # Ray starts only a few at a time, so what takes longest comes first.
        pools = []
        for index, pool in enumerate(plan.pools):
            workers = [w for w in plan.workers if w.host == index]
            shares = [0.0, *(share if w in on_gpu else 0.0 for w in workers)]
            places = ray_runtime.place_together(pool.name, shares)
            for worker, place, gpu in zip(workers, places[1:], shares[1:], strict=True):
                is_prefill = worker.role.value == "prefill"
                kind = actors.PrefillActor if is_prefill else actors.DecodeActor
                role = "prefill" if is_prefill else "decode"
                self._start(worker.name, role, kind, place, worker, pool.name, num_gpus=gpu)
            pools.append((pool, places[0]))
        control = ray_runtime.place_together("control", [0.0, 0.0])
        self._start("gateway", "gateway", actors.GatewayActor, control[1], plan.gateway)
        self._start(actors.CONDUCTOR, "conductor", actors.ConductorActor, control[0],
                    plan.conductor, plan.event_log)  # fmt: skip
        for pool, place in pools:
            self._start(pool.name, "pool", actors.PoolNodeActor, place, pool)

    def _start(
        self,
        name: str,
        kind: str,
        actor: type,
        place: object,
        *arguments: object,
        num_gpus: float = 0.0,
    ) -> None:
        import ray

        from cluster.actors import ProcessSetup
        from cluster.ray_runtime import SLOT

        setup = ProcessSetup(
            name=name,
            kind=kind,
            namespace=self._namespace,
            state_dir=str(self._state.path),
            run_dir=str(self._run_dir),
            listen=self._config.listen,
            log_level=self._config.log_level,
        )
        options: dict[str, Any] = {
            "name": name,
            "namespace": self._namespace,
            "num_cpus": 0,
            "num_gpus": num_gpus,
            "resources": {SLOT: 1},
            "scheduling_strategy": place,
            "max_restarts": -1,
            "max_task_retries": 0,
            "max_concurrency": 8,
        }
        remote: Any = ray.remote(actor)
        self._actors[name] = remote.options(**options).remote(setup, *arguments)

    def _await_actors(self, stage: Callable[[str], None]) -> None:
        """Wait for every process. Raises what kept one from starting."""
        import ray

        names = {actor.ready.remote(): name for name, actor in self._actors.items()}
        pending = list(names)
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=_POLL_S)
            for ref in done:
                self._result(ref, names[ref])
            if done:
                missing = ", ".join(sorted(names[ref] for ref in pending))
                stage(f"{len(names) - len(pending)} of {len(names)} processes run"
                      + (f"; waiting for {missing}" if missing else ""))  # fmt: skip
            self._raise_if_stopped()
            if time.monotonic() > deadline_s:
                raise HalfmoonError(f"{names[pending[0]]} did not start; see {self._state.logs}")

    def _result(self, ref: ObjectRef[Any], name: str) -> ProcessRecord:
        import ray
        from ray.exceptions import RayError, RayTaskError

        try:
            record: ProcessRecord = ray.get(ref)
            return record
        except RayTaskError as error:
            if isinstance(error.cause, ConfigError):
                raise ConfigError(f"{name}: {error.cause}") from error
            reason = f"{type(error.cause).__name__}: {error.cause}"
            log = self._state.logs / f"{name}.log"
            raise HalfmoonError(f"{name} did not start: {reason}; see {log}") from error
        except RayError as error:
            raise HalfmoonError(f"{name} did not start: {error}; see {self._state.logs}") from error

    def _await_ready(self) -> None:
        keys = self._config.gateway.api_keys
        headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        request = urllib.request.Request(f"{self.url}/ready", headers=headers)
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while True:
            try:
                with urllib.request.urlopen(request, timeout=5):
                    return
            except (urllib.error.URLError, OSError) as error:
                reason = error
            self._raise_if_stopped()
            if time.monotonic() > deadline_s:
                raise HalfmoonError(f"the gateway is not ready: {reason}; see {self._state.logs}")
            time.sleep(_POLL_S)

    def _raise_if_stopped(self) -> None:
        if self._signal is not None:
            raise _Stopped

    def _announce(self) -> None:
        config, seconds = self._config, self._elapsed_s()
        name = self._deployment.gateway.config.model_name
        workers = ", ".join(worker.name for worker in self._deployment.workers)
        self._console.print(f"[bold green]ready[/] after {seconds:.1f} s: {name} at {self.url}/v1")
        self._console.print(f"{workers}; {config.hosts} pool node(s); logs in {self._state.logs}")
        if not config.gateway.api_keys and config.host not in ("127.0.0.1", "localhost", "::1"):
            self._console.print(
                f"[yellow]anybody who reaches {config.host}:{config.port} may use it; "
                "set keys with --api-key[/]"
            )

    # --- watch ---

    def _watch(self) -> int:
        """Tell of restarts until a signal comes; return the exit code."""
        seen = self._state.read_processes()
        lives = Lives(seen)
        ray_processes = [p for p in _descendants() if p.name() in ("raylet", "gcs_server")]
        while self._signal is None:
            time.sleep(_WATCH_S)
            if any(not p.is_running() or p.status() == psutil.STATUS_ZOMBIE for p in ray_processes):
                self._tell("[red]Ray died; stopping[/]")
                return 1
            now = self._state.read_processes()
            for line in lives.look(now, is_alive):
                self._tell(line)
            if now != seen:
                self._state.write_run(self._run_dir, _descendants(), self.url)
            seen = now
        return 0

    def _tell(self, line: str) -> None:
        self._console.print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}")

    # --- stop ---

    def _stop(self) -> None:
        """Stop everything that was started, in order; nothing is left afterwards."""
        family = _descendants()
        with contextlib.suppress(ImportError):
            import ray

            if ray.is_initialized():
                self._stop_actors()
                ray.shutdown()
        family = [p for p in {*family, *_descendants()} if p.is_running()]
        _, alive = psutil.wait_procs(family, timeout=5)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=5)
        remove_run_dir(self._run_dir)
        self._state.clear_run()

    def _stop_actors(self) -> None:
        for group in (
            ("gateway",),
            ("prefill-", "decode-", "coupled-"),
            ("pool-",),
            ("conductor",),
        ):
            members = [a for name, a in self._actors.items() if name.startswith(group)]
            _stop_all(members)


class _Stopped(Exception):  # noqa: N818 (an event, not an error)
    """A signal came while the cluster was starting."""


def _stop_all(actors: Sequence[Any]) -> None:
    """Let the actors stop by themselves, then end their processes."""
    import ray

    stopping = [actor.stop.remote() for actor in actors]
    if stopping:
        ray.wait(stopping, num_returns=len(stopping), timeout=STOP_TIMEOUT_S)
    for actor in actors:
        ray.kill(actor, no_restart=True)


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)
