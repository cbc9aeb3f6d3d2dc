"""The one YAML file: every key, its default, and what it means.

`halfmoon config show` prints this whole model with its descriptions. Unknown keys are refused with
the nearest known name. `cluster.deployment` builds the frozen per-component types from it.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from core.errors import ConfigError
from scheduler.policies import POLICIES

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(value: object) -> object:
    """Turn "2GiB" or "500 MB" into a number of bytes. Raises `ValueError` for other text."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    digits = text.rstrip("".join({c for unit in _UNITS for c in unit + unit.lower()}) + " ")
    factor = _UNITS.get(text[len(digits) :].strip().upper())
    if factor is None or not digits.strip().replace(".", "", 1).isdigit():
        raise ValueError('write a number of bytes, or one with its unit such as "2GiB"')
    return int(float(digits) * factor)


def _check_pin(value: object) -> object:
    is_list = isinstance(value, list) and all(
        isinstance(cores, list) and all(type(core) is int and core >= 0 for core in cores)
        for cores in value
    )
    if value not in ("auto", "none") and not is_list:
        raise ValueError('write auto, none, or a list of cores for each worker, as in "[[0, 1]]"')
    return value


def _check_policy(name: str) -> str:
    if name not in POLICIES:
        raise ValueError(f"write one of {', '.join(POLICIES)}")
    return name


def _check_device(name: str) -> str:
    kind, colon, number = name.partition(":")
    if name not in ("auto", "cpu") and (kind != "cuda" or (colon and not number.isdecimal())):
        raise ValueError("write auto, cpu or cuda")
    return name


def _check_keys(keys: list[str]) -> list[str]:
    if not all(key.strip() for key in keys):
        raise ValueError("a key must not be empty")
    if HIDDEN_KEY in keys:
        raise ValueError(f"put the key itself in the place of {HIDDEN_KEY}")
    return keys


HIDDEN_KEY = "<hidden>"
"""Stands for each API key where the configuration is printed."""

ByteSize = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
Count = Annotated[int, Field(ge=0, le=4096)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _WorkerSection(_Section):
    workers: Count | None = Field(
        default=None, description="How many; null: 1, or 0 with coupled workers."
    )
    threads: int | None = Field(
        default=None, ge=1, description="Compute threads of each; null shares the cores out evenly."
    )
    num_blocks: int | None = Field(
        default=None,
        ge=2,
        description="Blocks in each one's paged cache; null: a few times max_model_len.",
    )
    pin: Annotated[Literal["auto", "none"] | list[list[int]], BeforeValidator(_check_pin)] = Field(
        default="auto",
        description="Which cores: auto gives each worker cores of its own where there are enough, "
        "none leaves it to the kernel, or a list of cores for each worker.",
    )
    nice: int = Field(default=0, ge=0, le=19, description="Niceness of the processes, 0 to 19.")
    max_queued_requests: int = Field(
        default=1024, ge=1, description="Requests that may wait in each."
    )
    max_chunk_tokens: int = Field(
        default=512, ge=1, description="Most tokens computed in one step."
    )
    load_timeout_s: Seconds = Field(
        default=10.0, description="Longest wait for blocks from the pool."
    )


class PrefillSection(_WorkerSection):
    """Workers that compute prompts."""

    max_chunk_requests: int = Field(
        default=16, ge=1, description="Most prompts that share one chunk."
    )
    handoff_timeout_s: Seconds = Field(
        default=30.0, description="Longest wait for a decode worker to take a finished prompt over."
    )


class DecodeSection(_WorkerSection):
    """Workers that generate tokens."""

    max_batch: int = Field(default=64, ge=1, description="Most requests in one decode step.")
    queue_timeout_s: Seconds = Field(
        default=600.0, description="Longest wait for a prompt that stands in its prefill queue."
    )
    handoff_timeout_s: Seconds = Field(
        default=60.0, description="Longest wait for blocks of a computed prompt, or for slots."
    )


class CoupledSection(_WorkerSection):
    """Workers that do both, the baseline that disaggregation is compared with."""

    workers: Count = Field(default=0, description="How many.")
    max_batch: int = Field(default=64, ge=1, description="Most requests in one step.")


class PoolSection(_Section):
    """The pooled KV cache: one pool node a host."""

    memory: ByteSize = Field(
        default=2 << 30, description='Host memory of each pool node, in bytes or as "2GiB".'
    )
    segment_bytes: ByteSize = Field(
        default=1 << 30, description="Largest single piece of that memory."
    )
    reserve_ttl_s: Seconds = Field(
        default=30.0, description="A reservation without a write for this long is given back."
    )
    lease_ttl_s: Seconds = Field(
        default=30.0, description="A reader's promise ends after this long."
    )
    max_transfers: int = Field(default=4096, ge=1, description="Most transfers at once.")


class SchedulerSection(_Section):
    """The Conductor's policy and admission."""

    policy: Annotated[str, AfterValidator(_check_policy)] = Field(
        default="kvcache-centric",
        description="How prefill workers are chosen: kvcache-centric (Mooncake's Algorithm 1), "
        "cache-aware-local (the same without fetching), least-loaded, round-robin, random.",
    )
    seed: int = Field(default=0, ge=0, description="Seed of what the policy draws at random.")
    balancing_threshold: float = Field(
        default=2.0,
        ge=1,
        description="Fetch a prefix when the best one is this many times the local one.",
    )
    ttft_slo_s: Seconds | None = Field(
        default=None,
        description="Refuse (429) what would wait longer for its first token; null: never.",
    )
    tbt_slo_s: Seconds | None = Field(
        default=None, description="Refuse what would get tokens slower than this; null: never."
    )
    link_bytes_per_s: float = Field(
        default=1e9,
        gt=0,
        description="Assumed speed between pool nodes until it has been measured.",
    )
    event_log: bool = Field(
        default=False, description="Record every decision in the state directory, for replay."
    )


class GatewaySection(_Section):
    """The HTTP server. Limits hold before anything is tokenised."""

    api_keys: Annotated[list[str], AfterValidator(_check_keys)] = Field(
        default_factory=list,
        description="Keys that clients may use; none: everybody may. Each one is a tenant.",
    )
    max_body_bytes: ByteSize = Field(
        default=10_000_000, description="Largest request body (413 above)."
    )
    max_header_bytes: ByteSize = Field(
        default=16_384, description="Largest request head (431 above)."
    )
    max_json_depth: int = Field(default=64, ge=4, description="Deepest nesting of a JSON body.")
    max_choices: int = Field(default=128, ge=1, description="Largest n of a request.")
    max_prompts: int = Field(default=128, ge=1, description="Most prompts in one call.")
    max_inflight_requests: int = Field(
        default=1024, ge=1, description="Most requests at once (429 above)."
    )
    max_connections: int = Field(
        default=2048, ge=1, description="Most HTTP connections, idle ones too (503 above)."
    )
    max_attempts: int = Field(default=8, ge=1, description="Most placements of one request.")
    place_timeout_s: Seconds = Field(
        default=10.0, description="Longest wait for the Conductor (then 503)."
    )
    retry_window_s: Seconds = Field(
        default=60.0, description="A request that lost its worker is placed anew for this long."
    )
    stall_timeout_s: Seconds = Field(
        default=120.0, description="No progress for this long although work is pending: not ready."
    )
    attempt_timeout_s: Seconds = Field(
        default=600.0, description="A placement that gives no token for this long has failed."
    )
    keep_alive_s: Seconds = Field(
        default=75.0, description="Idle HTTP connections are kept this long."
    )
    ping_interval_s: Seconds = Field(
        default=15.0, description="A stream without tokens gets a comment at this interval."
    )
    stream_buffer_bytes: ByteSize = Field(
        default=1 << 20, description="A client that does not read is cut off beyond this."
    )
    enable_forced_tokens: bool = Field(
        default=False,
        description="Test hook: let requests force output tokens. Never in production.",
    )


class RaySection(_Section):
    """Where the processes run."""

    address: str | None = Field(
        default=None,
        description="An existing Ray cluster to join; null starts one on this machine alone.",
    )
    object_store_bytes: ByteSize = Field(
        default=80 << 20,
        description="Ray's object store, which Halfmoon does not use (at least 75 MB).",
    )


class EmulationSection(_Section):
    """Times of the emulated engine, in milliseconds; see `core/latency.py`."""

    prefill_base_ms: float = Field(
        default=5.0, ge=0, description="A prefill step, before any token."
    )
    prefill_token_ms: float = Field(default=1.0, ge=0, description="Each token computed.")
    prefill_pair_ms: float = Field(default=1e-4, ge=0, description="Each pair of tokens attended.")
    decode_base_ms: float = Field(
        default=20.0, ge=0, description="A decode step, before any request."
    )
    decode_sequence_ms: float = Field(default=1.0, ge=0, description="Each request in the batch.")
    decode_context_token_ms: float = Field(
        default=1e-3, ge=0, description="Each token of context in the batch."
    )


class Config(_Section):
    """The whole configuration of one cluster."""

    model: str = Field(
        default="smollm2-135m-instruct",
        description="A known model, a Hugging Face folder (safetensors), or a hub id.",
    )
    served_model_name: str | None = Field(
        default=None, description="The name clients use; null: the model's own."
    )
    engine: Literal["transformers", "toy", "emulated"] = Field(
        default="transformers",
        description="transformers runs the model; toy and emulated (the toy at a real one's pace) "
        "are for experiments and give tokens without meaning.",
    )
    device: Annotated[str, AfterValidator(_check_device)] = Field(
        default="auto", description="cpu, cuda, or auto: cuda where there is one."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Of weights and KV; auto: float32 on the CPU, bfloat16 on a GPU.",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=16,
        description="Longest prompt and output together, in tokens; null: the model's own limit, "
        "at most 8192.",
    )
    block_size: int = Field(default=16, ge=1, le=512, description="Tokens in a block, everywhere.")
    host: str = Field(default="127.0.0.1", description="Where the gateway listens for HTTP.")
    port: int = Field(default=8000, ge=0, le=65535, description="Its port; 0 takes a free one.")
    listen: str = Field(
        default="127.0.0.1",
        description="Where workers, pool nodes and Conductor listen for one another; node: the "
        "address Ray knows the machine by.",
    )
    hosts: int = Field(
        default=1, ge=1, le=64, description="Pool nodes. Workers are dealt out to them in turn."
    )
    state_dir: str | None = Field(
        default=None,
        description="Secret, logs and what is running; null: $XDG_STATE_HOME/halfmoon/default or "
        "~/.local/state/halfmoon/default. One cluster each.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="How much the processes write to their logs."
    )
    prefill: PrefillSection = Field(default=PrefillSection())
    decode: DecodeSection = Field(default=DecodeSection())
    coupled: CoupledSection = Field(default=CoupledSection())
    pool: PoolSection = Field(default=PoolSection())
    scheduler: SchedulerSection = Field(default=SchedulerSection())
    gateway: GatewaySection = Field(default=GatewaySection())
    ray: RaySection = Field(default=RaySection())
    emulation: EmulationSection = Field(default=EmulationSection())


def load_config(path: Path | None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read the YAML at `path` (none: all defaults), with `overrides` laid over it.

    `overrides` maps dotted keys to values. Raises `ConfigError` that names the key and the fix.
    """
    values = {} if path is None else _read_yaml(path)
    config = _validate(values, str(path))  # before the flags: they could hide a mistake
    if not overrides:
        return config
    for dotted, value in overrides.items():
        *sections, key = dotted.split(".")
        target = values
        for section in sections:
            target = target.setdefault(section, {})
        target[key] = value
    return _validate(values, "command line")


def _validate(values: Mapping[str, Any], source: str) -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        problems = dict.fromkeys(_explain(dict(entry)) for entry in error.errors())
        raise ConfigError(f"{source}: " + "; ".join(problems)) from error


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; check --config") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{where} is not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or no such date
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold keys and values; see `halfmoon config show`")
    return content


def _explain(problem: Mapping[str, Any]) -> str:
    location: Sequence[str | int] = problem["loc"]
    name = ".".join(str(part) for part in location)
    if problem["type"] == "invalid_key":
        return f"unknown key `{problem['input']}`; `halfmoon config show` lists the known ones"
    if problem["type"] == "extra_forbidden":
        near = nearest_key(name)
        hint = f"did you mean `{near}`?" if near else "`halfmoon config show` lists the known ones"
        return f"unknown key `{name}`; {hint}"
    if problem["type"] in ("model_type", "dict_type"):
        return f"`{name}` is a section: give its keys below it, indented"
    message = problem["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if name.startswith("gateway.api_keys"):
        return f"`{name}`: {message}"  # a message is not the place for a key
    return f"`{name}`: {message}, not {problem['input']!r}"


def nearest_key(name: str) -> str | None:
    """Return the known dotted key that looks most like `name`, in any section."""
    known = [dotted for dotted, _, _ in walk(Config())]
    leaf = name.rsplit(".", 1)[-1]
    same_section = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    by_leaf = {dotted.rsplit(".", 1)[-1]: dotted for dotted in reversed(known)}
    elsewhere = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.7)
    if same_section:
        return same_section[0]
    return by_leaf[elsewhere[0]] if elsewhere else None


def walk(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, str, object]]:
    """Yield `(dotted key, description, value)` of every key, sections before their keys."""
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield prefix + name, type(value).__doc__ or "", value
            yield from walk(value, f"{prefix}{name}.")
        else:
            yield prefix + name, info.description or "", value


def render_yaml(config: Config) -> str:
    """Return the whole configuration as YAML that can be loaded again, a comment on every key.

    Keys of clients are hidden; YAML with hidden keys is refused until they are filled in.
    """
    lines: list[str] = []
    hidden = [HIDDEN_KEY] * len(config.gateway.api_keys)
    gateway = config.gateway.model_copy(update={"api_keys": hidden})
    for dotted, description, value in walk(config.model_copy(update={"gateway": gateway})):
        indent = "  " * dotted.count(".")
        key = dotted.rsplit(".", 1)[-1]
        if isinstance(value, BaseModel):
            lines.append("")
        comment = indent + "# "
        lines += textwrap.wrap(description, 96, initial_indent=comment, subsequent_indent=comment)
        if isinstance(value, BaseModel):
            lines.append(f"{indent}{key}:")
        else:
            flow = yaml.safe_dump({key: value}, default_flow_style=True, width=10_000).strip()
            lines.append(indent + flow[1:-1])
    return "\n".join(lines) + "\n"
