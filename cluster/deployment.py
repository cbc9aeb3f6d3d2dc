"""From the configuration and the model's facts to what every process is started with.

Pure arithmetic, so that `halfmoon config check` and the tests can do it without starting anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from pydantic import BaseModel

from cluster.config import Config
from cluster.plans import Deployment, EnginePlan, GatewayPlan, PoolPlan, WorkerPlan
from core.config import ConductorConfig, DecodeConfig, GatewayConfig, PoolNodeConfig, PrefillConfig
from core.errors import ConfigError
from core.latency import LatencyProfile
from core.messages.to_conductor import WorkerRole
from engine.models import ModelInfo, memory_needed_bytes
from engine.toy import toy_spec

T = TypeVar("T")

MAX_DEFAULT_LEN_TOKENS = 8192
CACHE_LENGTHS = 2
"""Where `num_blocks` is null, a paged cache holds this many requests of the greatest length."""

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Machine:
    """What the machine offers. `available_bytes` is memory that can still be used."""

    cores: tuple[int, ...]
    available_bytes: int
    has_gpu: bool


def plan(config: Config, info: ModelInfo, machine: Machine, api_keys: Sequence[str]) -> Deployment:
    """Work out the deployment. Raises `ConfigError`, naming key and fix, for what cannot work."""
    engine = _engine_plan(config, info, machine)
    block_bytes = _block_bytes(engine, info)
    pools = _pools(config, engine, info, block_bytes)
    workers = _workers(config, engine, machine)
    _check_memory(config, info, workers, machine, _least_pool_bytes(engine, block_bytes))
    conductor = _pick(
        ConductorConfig,
        config.scheduler,
        block_size=config.block_size,
        block_bytes=block_bytes,
    )
    gateway = _pick(
        GatewayConfig,
        config.gateway,
        model_name=config.served_model_name or config.model,
        max_model_len=engine.max_model_len,
        block_size=config.block_size,
        api_keys=tuple(api_keys),
    )
    spec = engine.spec
    return Deployment(
        conductor,
        pools,
        workers,
        GatewayPlan(
            config=gateway,
            model_dir=engine.model_dir,
            fingerprint=info.fingerprint if spec is None else spec.fingerprint,
            tokenizer_digest=info.tokenizer_digest,
            kv_dtype=engine.dtype if spec is None else spec.kv_dtype,
            eos_token_ids=info.eos_token_ids,
            host=config.host,
            port=config.port,
        ),
        config.scheduler.event_log,
    )


def check_config(config: Config, machine: Machine) -> None:
    """Refuse what cannot work with any model. Raises `ConfigError`, naming key and fix.

    Where Ray is joined, the workers' machines may be others: their cores and GPUs are not judged.
    """
    total = sum(num_workers(config))
    if config.hosts > total:
        raise ConfigError(
            f"`hosts` is {config.hosts}, but the number of workers is {total}, and a pool node "
            f"without one serves nobody: set `hosts` to {total} or less (--hosts), or start more "
            "workers"
        )
    if config.ray.address is not None:
        return
    if config.device not in ("auto", "cpu") and not machine.has_gpu:
        raise ConfigError(
            f"`device` is {config.device}, but there is no NVIDIA GPU here that this torch can "
            "use: set `device` to cpu or auto (--device)"
        )
    for role in WorkerRole:
        pin = getattr(config, role.value).pin
        named = set() if isinstance(pin, str) else {core for cores in pin for core in cores}
        foreign = sorted(named - {*machine.cores})
        if foreign:
            raise ConfigError(
                f"`{role.value}.pin` names {_list(foreign)}, which this process may not use: give "
                f"cores out of {_list(machine.cores)}"
            )


def warnings(config: Config, machine: Machine) -> Iterator[str]:
    """Yield what works, but badly."""
    if config.ray.address is not None:
        return
    counts = zip(("prefill", "decode", "coupled"), num_workers(config), strict=True)
    for role, threads in ((r, getattr(config, r).threads) for r, count in counts if count):
        if threads is not None and threads > len(machine.cores):
            yield (
                f"`{role}.threads` is {threads}, but this machine has {len(machine.cores)} "
                "core(s) for us: more threads than cores are slower"
            )


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def num_workers(config: Config) -> tuple[int, int, int]:
    """Return the numbers of prefill, decode and coupled workers. Raises `ConfigError`."""
    coupled = config.coupled.workers or 0
    default = 0 if coupled else 1
    prefill = default if config.prefill.workers is None else config.prefill.workers
    decode = default if config.decode.workers is None else config.decode.workers
    if (prefill == 0) != (decode == 0):
        missing, other = ("prefill", "decode") if prefill == 0 else ("decode", "prefill")
        unset = " when it is not set beside `coupled.workers`" if coupled else ""
        raise ConfigError(
            f"`{missing}.workers` is 0{unset}, but `{other}.workers` is {prefill or decode}: "
            "prefill and decode need each other; set both, or use `coupled.workers` alone"
        )
    if prefill + coupled == 0:
        raise ConfigError("there is no worker: set `prefill.workers` and `decode.workers` to 1")
    return prefill, decode, coupled


def _engine_plan(config: Config, info: ModelInfo, machine: Machine) -> EnginePlan:
    """Return the part of the plan that all workers share; `num_blocks` and threads come later."""
    limit = info.context_tokens or MAX_DEFAULT_LEN_TOKENS
    max_model_len = config.max_model_len or min(limit, MAX_DEFAULT_LEN_TOKENS)
    if max_model_len > limit:
        raise ConfigError(
            f"`max_model_len` is {max_model_len}, but the model's context is {limit} tokens: "
            f"set it to {limit} or less"
        )
    device = config.device
    if device == "auto":
        device = "cuda" if machine.has_gpu else "cpu"
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    spec = None
    if config.engine != "transformers":
        spec = toy_spec(
            block_size=config.block_size,
            vocab_size=info.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=info.eos_token_ids,
        )
    return EnginePlan(
        kind=config.engine,
        model_dir=str(info.path),
        block_size=config.block_size,
        num_blocks=-(-max_model_len // config.block_size) * CACHE_LENGTHS,
        max_model_len=max_model_len,
        device=device,
        dtype=dtype,
        threads=1,
        spec=spec,
        profile=LatencyProfile(name="emulation", **config.emulation.model_dump())
        if config.engine == "emulated"
        else None,
    )


def _block_bytes(engine: EnginePlan, info: ModelInfo) -> int:
    if engine.spec is not None:
        return engine.spec.block_bytes
    token_bytes = 2 * info.num_layers * info.num_kv_heads * info.head_dim
    return token_bytes * engine.block_size * _ITEMSIZE[engine.dtype]


def _pools(
    config: Config, engine: EnginePlan, info: ModelInfo, block_bytes: int
) -> tuple[PoolPlan, ...]:
    num_slots = config.pool.memory // block_bytes
    least_bytes = _least_pool_bytes(engine, block_bytes)
    if num_slots * block_bytes < least_bytes:
        raise ConfigError(
            f"`pool.memory` is {show_bytes(config.pool.memory)}: one request of `max_model_len` = "
            f"{engine.max_model_len} tokens needs {show_bytes(least_bytes)} there; set "
            "`pool.memory` to at least that, or a smaller `max_model_len`"
        )
    node = _pick(
        PoolNodeConfig,
        config.pool,
        num_slots=num_slots,
        slot_bytes=block_bytes,
        num_layers=info.num_layers if engine.spec is None else engine.spec.num_layers,
        segment_bytes=max(config.pool.segment_bytes, block_bytes),
    )
    return tuple(PoolPlan(f"pool-{i}", node) for i in range(config.hosts))


def _least_pool_bytes(engine: EnginePlan, block_bytes: int) -> int:
    """Return what one request of the greatest length takes."""
    return -(-engine.max_model_len // engine.block_size) * block_bytes


def _workers(config: Config, engine: EnginePlan, machine: Machine) -> tuple[WorkerPlan, ...]:
    prefill, decode, coupled = num_workers(config)
    roles = [WorkerRole.PREFILL] * prefill
    roles += [WorkerRole.DECODE] * decode
    roles += [WorkerRole.COUPLED] * coupled
    share = max(1, len(machine.cores) // len(roles))
    plans = []
    for number, role in enumerate(roles):
        section = getattr(config, role.value)
        own: PrefillConfig | DecodeConfig
        if role is WorkerRole.PREFILL:
            own = _pick(PrefillConfig, section)
        else:
            own = _pick(DecodeConfig, section)
        plans.append(
            WorkerPlan(
                name=f"{role.value}-{roles[:number].count(role)}",
                role=role,
                host=number % config.hosts,
                engine=replace(
                    engine,
                    num_blocks=section.num_blocks or engine.num_blocks,
                    threads=section.threads or share,
                ),
                config=own,
                cores=(),
                nice=section.nice,
            )
        )
    return tuple(_with_cores(config, plans, machine.cores))


def _with_cores(
    config: Config, plans: Sequence[WorkerPlan], cores: Sequence[int]
) -> Iterator[WorkerPlan]:
    """Deal out cores. Where `auto` cannot serve all workers it pins none: some would starve."""
    pins = [getattr(config, worker.role.value).pin for worker in plans]
    automatic = [w.engine.threads for w, pin in zip(plans, pins, strict=True) if pin == "auto"]
    free = list(cores) if sum(automatic) <= len(cores) else []
    for worker, pin in zip(plans, pins, strict=True):
        if pin == "auto":
            yield replace(worker, cores=tuple(free[: worker.engine.threads]))
            del free[: worker.engine.threads]
        elif pin == "none":
            yield worker
        else:
            index = int(worker.name.rsplit("-", 1)[1])
            if index >= len(pin) or not pin[index]:
                raise ConfigError(
                    f"`{worker.role.value}.pin` names no cores for {worker.name}: give a list for "
                    "each worker"
                )
            yield replace(worker, cores=tuple(pin[index]))


def _check_memory(
    config: Config,
    info: ModelInfo,
    workers: Sequence[WorkerPlan],
    machine: Machine,
    least_pool_bytes: int,
) -> None:
    """Refuse what cannot fit, before anything is started. A GPU's own memory is not looked at."""
    pool_bytes = config.hosts * config.pool.memory
    needed = [
        memory_needed_bytes(info, w.engine.num_blocks, w.engine.block_size)
        for w in workers
        if w.engine.device == "cpu" and w.engine.kind == "transformers"
    ]
    if pool_bytes + sum(needed) <= machine.available_bytes:
        return
    wanted = f"{config.hosts} x {show_bytes(config.pool.memory)}"
    fixes = []
    pool = (machine.available_bytes - sum(needed)) // config.hosts
    if pool >= least_pool_bytes:
        fixes.append(f"set `pool.memory` to {show_bytes(pool)} or less (--pool-memory)")
    if len(needed) > config.hosts and not config.coupled.workers:
        pool = machine.available_bytes // config.hosts - max(needed)
        if pool >= least_pool_bytes:
            less = "" if pool >= config.pool.memory else f" and --pool-memory {show_bytes(pool)}"
            fixes.append(
                f"start {config.hosts} worker(s) that do both, with --coupled {config.hosts}{less} "
                "in place of --prefill and --decode"
            )
    fix = ", or ".join(
        fixes or ["use fewer workers, a smaller `max_model_len`, or a smaller model"]
    )
    raise ConfigError(
        f"too little memory: the pool needs {wanted} and the workers {show_bytes(sum(needed))}, "
        f"but {show_bytes(machine.available_bytes)} are available; {fix}"
    )


def show_bytes(num_bytes: int) -> str:
    """Write a number of bytes so that `parse_bytes` can read it, rounded down."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            tenths = num_bytes * 10 // size
            return f"{tenths // 10}.{tenths % 10}{unit}" if tenths % 10 else f"{tenths // 10}{unit}"
    return f"{num_bytes}B"


def _pick(kind: type[T], section: BaseModel, **more: object) -> T:
    """Make a component's own type from the keys of its section that it knows, and `more`."""
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    values: Mapping[str, Any] = section.model_dump()
    return kind(**{k: v for k, v in values.items() if k in known} | more)
