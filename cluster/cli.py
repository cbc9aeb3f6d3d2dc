"""`halfmoon`: the command line. Modules are imported by the command that needs them.

Flags have vLLM's names where they mean the same. Exit codes: 0 done, 1 failed, 2 what the operator
set cannot work (the message says the fix).
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from core.errors import ConfigError, HalfmoonError
from scheduler.policies import POLICIES

if TYPE_CHECKING:
    from rich.console import Console

OVERRIDES = {
    "model": "model",
    "host": "host",
    "port": "port",
    "served_model_name": "served_model_name",
    "max_model_len": "max_model_len",
    "block_size": "block_size",
    "dtype": "dtype",
    "device": "device",
    "engine": "engine",
    "hosts": "hosts",
    "prefill": "prefill.workers",
    "decode": "decode.workers",
    "coupled": "coupled.workers",
    "pool_memory": "pool.memory",
    "policy": "scheduler.policy",
    "api_key": "gateway.api_keys",
    "ray_address": "ray.address",
    "state_dir": "state_dir",
    "enable_forced_tokens": "gateway.enable_forced_tokens",
}
"""Flag to key of the configuration."""

_NO_WRAP = 10_000
"""Columns of what is no terminal."""

_TOOLS: dict[tuple[str, str], tuple[str, str]] = {
    ("bench", "engine"): ("cluster.bench_engine", "the engine against transformers' forward pass"),
    ("bench", "ttft"): ("cluster.bench_ttft", "time to first token of cold and repeated prompts"),
    ("bench", "interference"): (
        "cluster.bench_interference",
        "a stream's token gaps beside long prefills",
    ),
    ("bench", "directory"): (
        "cluster.bench_directory",
        "the Conductor's directory with millions of blocks, and a lease at a pool node",
    ),
    ("check", "parity"): ("cluster.checks.parity", "our tokens against transformers generate"),
    ("check", "kill"): ("cluster.checks.kill", "every stream's tokens when processes are killed"),
}
"""Commands with `add_arguments(parser)` and `run(args)` in a module of their own."""


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    # So that `with` blocks of checks and benchmarks stop the servers that they started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        args = _parser(argv).parse_args(_complete_coupled(argv))
        command: Callable[[argparse.Namespace], int] = args.command
        return command(args)
    except ConfigError as error:
        print(f"halfmoon: {error}", file=sys.stderr)
        return 2
    except (HalfmoonError, TimeoutError) as error:
        print(f"halfmoon: {error or 'timed out'}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser(argv: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="halfmoon",
        description="Serve a large language model with prefill and decode on separate workers.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands.add_parser("serve", help="start a cluster and its HTTP server"))
    status = commands.add_parser("status", help="show the workers, their load and the pool")
    status.add_argument(
        "--state-dir", metavar="DIR", help="state directory of the cluster, if not the default one"
    )
    status.add_argument("--json", action="store_true", help="everything, as JSON")
    status.set_defaults(command=_status)
    _add_config(commands.add_parser("config", help="show or check a configuration"))
    _add_model(commands.add_parser("model", help="fetch, list and inspect models"))
    for group, summary in (("bench", "measure"), ("check", "prove that the answers are right")):
        tools = commands.add_parser(group, help=summary)
        _add_tools(tools, group, argv)
    return parser


def _complete_coupled(argv: list[str]) -> list[str]:
    """Give a `--coupled` before a MODEL its number, or argparse takes the MODEL for it."""
    if argv[:1] not in (["serve"], ["config"]):
        return argv
    made = []
    for word, following in zip(argv, [*argv[1:], "-"], strict=True):
        made.append(word)
        is_coupled = word.startswith("--cou") and "--coupled".startswith(word)
        if is_coupled and not following.startswith("-") and not following.isdecimal():
            made.append("1")
    return made


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        from importlib.metadata import version

        print(f"halfmoon {version('halfmoon')}")
        parser.exit()


# --- serve and config ---


def _add_serve(parser: argparse.ArgumentParser) -> None:
    _add_overrides(parser)
    parser.set_defaults(command=_serve)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a known model, a folder, or a hub id")
    add("--config", type=Path, metavar="FILE", help="YAML; see `halfmoon config show`")
    add("--host", help="where to listen for HTTP (127.0.0.1)")
    add("--port", type=int, help="its port (8000)")
    add("--served-model-name", metavar="NAME", help="what clients call the model")
    add("--max-model-len", type=int, metavar="N", help="longest prompt and output, in tokens")
    add("--block-size", type=int, metavar="N", help="tokens in a block (16)")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"))
    add("--device", metavar="NAME", help="auto, cpu or cuda (auto)")
    add("--engine", choices=("transformers", "toy", "emulated"))
    add("--prefill", type=int, metavar="N", help="prefill workers (1)")
    add("--decode", type=int, metavar="N", help="decode workers (1)")
    add("--coupled", type=int, nargs="?", const=1, metavar="N",
        help="workers that do both, instead; 1 when N is left out")  # fmt: skip
    add("--hosts", type=int, metavar="N", help="pool nodes (1)")
    add("--pool-memory", metavar="SIZE", help="memory of each pool node (2GiB)")
    policies = ", ".join(POLICIES)
    add("--policy", metavar="NAME", help=f"how requests are placed: {policies} (kvcache-centric)")
    add("--api-key", action="append", metavar="KEY",
        help="may be repeated; the process list shows it: see gateway.api_keys")  # fmt: skip
    add("--ray-address", metavar="ADDRESS", help="an existing Ray cluster to join")
    add("--state-dir", metavar="DIR", help="secret, logs and what is running")
    add("--enable-forced-tokens", action="store_true", default=None,
        help=argparse.SUPPRESS)  # fmt: skip


def config_overrides(args: argparse.Namespace) -> dict[str, object]:
    """Return what was given on the command line, by dotted key."""
    values: Mapping[str, object] = vars(args)
    return {key: values[flag] for flag, key in OVERRIDES.items() if values.get(flag) is not None}


def _serve(args: argparse.Namespace) -> int:
    from cluster.config import load_config
    from cluster.launcher import serve

    return serve(load_config(args.config, config_overrides(args)), _console())


def _console() -> Console:
    """Return the console; where it is no terminal, lines are never broken."""
    from rich.console import Console

    console = Console(file=sys.stdout)
    return console if console.is_terminal else Console(file=sys.stdout, width=_NO_WRAP)


def _add_config(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    show = actions.add_parser("show", help="print every key with its meaning, as YAML")
    check = actions.add_parser("check", help="say whether a configuration works on this machine")
    for action, command in ((show, _config_show), (check, _config_check)):
        _add_overrides(action)
        action.set_defaults(command=command)


def _config_show(args: argparse.Namespace) -> int:
    from cluster.config import load_config, render_yaml

    print(render_yaml(load_config(args.config, config_overrides(args))), end="")
    return 0


def _config_check(args: argparse.Namespace) -> int:
    from cluster.config import load_config
    from cluster.deployment import show_bytes
    from cluster.launcher import check_place, plan_for_this_machine

    config, console = load_config(args.config, config_overrides(args)), _console()
    check_place(config, console)
    plan = plan_for_this_machine(config, console)
    for pool in plan.pools:
        size = show_bytes(pool.config.num_slots * pool.config.slot_bytes)
        print(f"{pool.name}: {pool.config.num_slots} blocks, {size}")
    for worker in plan.workers:
        engine, cores = worker.engine, ",".join(map(str, worker.cores)) or "any"
        print(
            f"{worker.name}: {engine.num_blocks} blocks of {engine.block_size} tokens, "
            f"{engine.dtype} on {engine.device}, {engine.threads} thread(s) on cores {cores}, "
            f"pool-{worker.host}"
        )
    return 0


def _status(args: argparse.Namespace) -> int:
    from cluster.state_dir import StateDir
    from cluster.status import show_status

    return show_status(StateDir(args.state_dir), _console(), as_json=args.json)


# --- models ---


def _add_model(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    pull = actions.add_parser("pull", help="fetch and convert a model")
    inspect = actions.add_parser("inspect", help="say what a model is and whether it can be served")
    for action, command in ((pull, _model_pull), (inspect, _model_inspect)):
        action.add_argument("model", metavar="MODEL", help="a known model, a folder, or a hub id")
        action.set_defaults(command=command)
    actions.add_parser("list", help="name the known models").set_defaults(command=_model_list)


def _model_pull(args: argparse.Namespace) -> int:
    from rich.console import Console

    from cluster.launcher import model_progress
    from engine.models import inspect_model, resolve_model

    with model_progress(Console(stderr=True)) as report:
        info = inspect_model(resolve_model(args.model, report=report), report=report)
    print(info.path)
    return 0


def _model_inspect(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from engine.models import inspect_model, resolve_model

    for key, value in asdict(inspect_model(resolve_model(args.model))).items():
        print(f"{key}: {value}")
    return 0


def _model_list(_: argparse.Namespace) -> int:
    from engine.model_pull import KNOWN_MODELS, user_cache_dir

    models = user_cache_dir() / "models"
    here = [p.name for p in models.iterdir() if p.is_dir()] if models.is_dir() else []
    for name in sorted(KNOWN_MODELS):
        fetched = any(folder.startswith(name) for folder in here)
        print(f"{name}\t{'fetched' if fetched else 'not fetched yet'}")
    return 0


# --- bench and check ---


def _add_tools(parser: argparse.ArgumentParser, group: str, argv: list[str]) -> None:
    """Add the tools of a group; only the chosen one is imported, for its own arguments."""
    actions = parser.add_subparsers(required=True, metavar="WHAT")
    for (own_group, name), (module_name, summary) in _TOOLS.items():
        if own_group != group:
            continue
        action = actions.add_parser(name, help=summary)
        if argv[:2] == [group, name]:
            # As for our workers, and before torch reads it: idle threads that spin would take
            # the core of those that work.
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
            module = _import_tool(module_name)
            module.add_arguments(action)
            action.set_defaults(command=lambda args, module=module: _run_tool(module, args))


def _import_tool(module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise
        raise ConfigError("this command is not in this version of Halfmoon") from error


def _run_tool(module: ModuleType, args: argparse.Namespace) -> int:
    from cluster.figures import Report, finish

    result = module.run(args)
    return finish(result, args) if isinstance(result, Report) else 0
