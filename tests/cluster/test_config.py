"""Configuration: what is read, refused and printed, and what is made of it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from cluster.config import Config, load_config, parse_bytes, render_yaml, walk
from cluster.deployment import (
    Machine,
    check_config,
    num_workers,
    plan,
    show_bytes,
    warnings,
)
from core.config import DecodeConfig, PrefillConfig
from core.errors import ConfigError
from core.messages.to_conductor import WorkerRole
from engine.models import ModelInfo

INFO = ModelInfo(
    path=Path("/models/small"),
    architecture="LlamaForCausalLM",
    model_type="llama",
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    context_tokens=8192,
    eos_token_ids=(2,),
    fingerprint="f" * 64,
    tokenizer_digest="d" * 64,
    num_parameters=134_515_008,
    weight_bytes=538_060_032,
)
BLOCK_BYTES = 737_280
MACHINE = Machine(cores=(0, 1), available_bytes=16 << 30, has_gpu=False)


def load(tmp_path: Path, text: str, **overrides: object) -> Config:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    return str(caught.value)


def plan_for(config: Config, machine: Machine = MACHINE, info: ModelInfo = INFO):
    return plan(config, info, machine, config.gateway.api_keys)


def test_what_is_printed_loads_again_and_says_everything():
    config = load_config(None, {"prefill.workers": 3, "pool.memory": "3GiB", "model": "a: b # c"})
    text = render_yaml(config)
    assert Config.model_validate(yaml.safe_load(text)) == config
    assert "workers: 3" in text
    for dotted, description, _ in walk(Config()):
        assert description, f"{dotted} is not documented"
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line.strip() and not line.lstrip().startswith("#"):
            assert lines[number - 1].lstrip().startswith("#"), f"no comment above {line!r}"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("prefil: {workers: 2}", "unknown key `prefil`; did you mean `prefill`?"),
        ("prefill: {wrokers: 2}", "`prefill.wrokers`; did you mean `prefill.workers`?"),
        ("max_batch: 2", "`max_batch`; did you mean `decode.max_batch`?"),
        ("xyzzy: 1", "unknown key `xyzzy`; `halfmoon config show`"),
        ("prefill: 3", "`prefill` is a section"),
        ("decode: {workers: -1}", "`decode.workers`: input should be greater than or equal to 0"),
        ("port: '80'", "`port`: input should be a valid integer"),
        ("prefill: {workers: true}", "`prefill.workers`"),
        ("pool: {memory: lots}", "`pool.memory`: write a number of bytes, or one with its unit"),
        ("pool: {lease_ttl_s: .nan}", "`pool.lease_ttl_s`"),
        ("- a", "must hold keys and values"),
        ("host: [", "line 1, column 8 is not YAML: "),
        ("a: b: c", "cluster.yaml, line 1, column 5 is not YAML: mapping values"),
        ("host: \0", "is not YAML: "),
        ("host: 2026-99-99", "is not YAML: month"),
        ("1: x", "unknown key `1`"),
        ("prefill: null", "`prefill` is a section"),
        ("decode: {pin: 3}", "cluster.yaml: `decode.pin`: write auto, none, or a list of cores"),
        ("decode: {pin: [0, [1]]}", "`decode.pin`: write auto"),
        ("decode: {pin: [[true]]}", "`decode.pin`: write auto"),
        ("scheduler: {policy: fast}", "`scheduler.policy`: write one of random, round-robin"),
        ("scheduler: {policy: [x]}", "`scheduler.policy`: input should be a valid string"),
        ("device: gpu", "`device`: write auto, cpu or cuda, not 'gpu'"),
        ("device: 'cuda:x'", "`device`: write auto, cpu or cuda"),
        ("gateway: {api_keys: ['']}", "`gateway.api_keys`: a key must not be empty"),
    ],
)
def test_mistakes_are_named(tmp_path, text, hint):
    message = refusal(tmp_path, text)
    assert hint in message
    assert "\n" not in message


def test_each_mistake_is_told_once(tmp_path):
    assert refusal(tmp_path, "decode: {pin: [0, 1]}").count("decode.pin") == 1


def test_a_key_that_is_no_text_is_not_repeated(tmp_path):
    message = refusal(tmp_path, "gateway: {api_keys: [123456]}")
    assert "`gateway.api_keys.0`" in message
    assert "123456" not in message


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_bytes(b"host: \xff")
    with pytest.raises(ConfigError, match="is not YAML"):
        load_config(path)


def test_mistakes_that_a_flag_would_hide_are_told(tmp_path):
    for text, flag, value in (("port: x", "port", 1), ("prefill: 3", "prefill.workers", 2)):
        with pytest.raises(ConfigError, match=r"cluster\.yaml: `"):
            load(tmp_path, text, **{flag: value})
    with pytest.raises(ConfigError, match="command line: `port`"):
        load(tmp_path, "host: localhost", port=-1)


def test_all_mistakes_are_told_at_once(tmp_path):
    message = refusal(tmp_path, "prot: 1\nblock_size: 0")
    assert "`prot`" in message
    assert "`block_size`" in message


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*none\.yaml.*--config"):
        load_config(tmp_path / "none.yaml")


def test_the_command_line_wins_over_the_file(tmp_path):
    config = load(tmp_path, "port: 1\nprefill: {workers: 2}", port=2, **{"decode.workers": 3})
    assert (config.port, config.prefill.workers, config.decode.workers) == (2, 2, 3)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("2GiB", 2 << 30), ("500 MB", 500_000_000), ("1.5gib", 3 << 29), ("12", 12), ("7B", 7)],
)
def test_byte_sizes(text, num_bytes):
    assert parse_bytes(text) == num_bytes
    assert parse_bytes(show_bytes(num_bytes)) <= num_bytes


def test_defaults_make_one_of_each():
    made = plan_for(Config())
    assert [w.name for w in made.workers] == ["prefill-0", "decode-0"]
    assert [p.name for p in made.pools] == ["pool-0"]
    assert made.pools[0].config.slot_bytes == BLOCK_BYTES == made.conductor.block_bytes
    assert made.pools[0].config.num_slots == (2 << 30) // BLOCK_BYTES
    assert made.workers[0].engine.max_model_len == 8192
    assert made.workers[0].engine.dtype == "float32"
    assert made.gateway.config.model_name == "smollm2-135m-instruct"
    assert isinstance(made.workers[0].config, PrefillConfig)
    assert isinstance(made.workers[1].config, DecodeConfig)


def test_component_defaults_are_those_of_the_yaml():
    made = plan_for(Config())
    assert made.workers[0].config == PrefillConfig()
    assert made.workers[1].config == DecodeConfig()


def test_workers_are_dealt_out_so_that_hand_offs_cross_hosts():
    made = plan_for(load_config(None, {"hosts": 2}))
    assert {w.name: w.host for w in made.workers} == {"prefill-0": 0, "decode-0": 1}
    made = plan_for(load_config(None, {"hosts": 2, "prefill.workers": 2, "decode.workers": 2}))
    hosts = {w.name: w.host for w in made.workers}
    assert hosts == {"prefill-0": 0, "prefill-1": 1, "decode-0": 0, "decode-1": 1}


def test_coupled_workers_replace_the_others_unless_they_are_asked_for():
    assert num_workers(load_config(None, {"coupled.workers": 2})) == (0, 0, 2)
    mixed = {"coupled.workers": 1, "prefill.workers": 1, "decode.workers": 2}
    assert num_workers(load_config(None, mixed)) == (1, 2, 1)
    made = plan_for(load_config(None, {"coupled.workers": 1}))
    assert [w.role for w in made.workers] == [WorkerRole.COUPLED]


@pytest.mark.parametrize(
    ("overrides", "hint"),
    [
        ({"prefill.workers": 0}, "`prefill.workers` is 0"),
        ({"prefill.workers": 0, "decode.workers": 0}, "there is no worker"),
        ({"max_model_len": 9000}, "the model's context is 8192"),
        ({"pool.memory": "64GiB"}, r"too little memory.*2 x 64GiB.*`pool.memory` to .*GiB or less"),
        ({"pool.memory": "64MiB"}, "`pool.memory` is 64MiB: one request"),
        ({"decode.pin": [[0]], "decode.workers": 2}, "`decode.pin` names no cores for decode-1"),
    ],
)
def test_what_cannot_work_is_refused_with_the_fix(overrides, hint):
    with pytest.raises(ConfigError, match=hint):
        plan_for(load_config(None, {"hosts": 2, **overrides}))


@pytest.mark.parametrize(
    ("available_mib", "overrides"),
    [(4500, {}), (3000, {}), (2400, {}), (6000, {"hosts": 2, "decode.workers": 2})],
)
def test_what_is_advised_for_too_little_memory_works(available_mib, overrides):
    machine = replace(MACHINE, available_bytes=available_mib << 20)
    with pytest.raises(ConfigError, match=r"too little memory.*--coupled") as caught:
        plan_for(load_config(None, overrides), machine)
    smaller = re.search(r"`pool.memory` to (\S+) or less", str(caught.value))
    coupled = re.search(r"--coupled (\d+)(?: and --pool-memory (\S+))? in", str(caught.value))
    advised: list[dict[str, object]] = []
    if smaller:
        advised.append({**overrides, "pool.memory": smaller[1]})
    assert coupled
    without = {k: v for k, v in overrides.items() if not k.startswith(("prefill", "decode"))}
    pool = {"pool.memory": coupled[2]} if coupled[2] else {}
    advised.append({**without, "coupled.workers": int(coupled[1]), **pool})
    for changed in advised:
        assert plan_for(load_config(None, changed), machine).workers


@pytest.mark.parametrize(
    ("overrides", "hint"),
    [
        ({"hosts": 3}, "`hosts` is 3, but the number of workers is 2.*`hosts` to 2 or less"),
        ({"hosts": 2, "coupled.workers": 1}, "`hosts` is 2.* is 1"),
        ({"device": "cuda"}, "`device` is cuda, but there is no NVIDIA GPU"),
        ({"decode.pin": [[0, 7]]}, "`decode.pin` names 7, .*out of 0, 1"),
        (
            {"coupled.workers": 1, "prefill.workers": 1},
            "`decode.workers` is 0 when it is not set.*but `prefill.workers` is 1",
        ),
    ],
)
def test_what_no_model_can_mend_is_refused_before_one_is_fetched(overrides, hint):
    with pytest.raises(ConfigError, match=hint):
        check_config(load_config(None, overrides), MACHINE)


def test_the_machines_of_a_joined_ray_are_not_judged_by_this_one():
    joined = {"ray.address": "head:6379", "device": "cuda", "decode.pin": [[7]]}
    config = load_config(None, joined | {"prefill.threads": 9})
    check_config(config, MACHINE)
    assert list(warnings(config, MACHINE)) == []


def test_a_gpu_can_be_asked_for_where_there_is_one():
    check_config(load_config(None, {"device": "cuda:0"}), replace(MACHINE, has_gpu=True))


def test_more_threads_than_cores_are_warned_of():
    given = {"prefill.threads": 3, "decode.threads": 2, "coupled.threads": 9}
    (line,) = warnings(load_config(None, given), MACHINE)
    assert "`prefill.threads` is 3" in line


def test_cores_are_given_out_only_when_there_are_enough():
    assert [w.cores for w in plan_for(Config()).workers] == [(0,), (1,)]
    four = {"prefill.workers": 2, "decode.workers": 2}
    assert [w.cores for w in plan_for(load_config(None, four)).workers] == [()] * 4
    own = load_config(None, {"prefill.pin": [[1]], "decode.pin": "none"})
    assert [w.cores for w in plan_for(own).workers] == [(1,), ()]
    wide = plan_for(Config(), replace(MACHINE, cores=(4, 5, 6, 7)))
    assert [(w.cores, w.engine.threads) for w in wide.workers] == [((4, 5), 2), ((6, 7), 2)]


def test_a_gpu_is_used_where_there_is_one():
    engine = plan_for(Config(), replace(MACHINE, has_gpu=True)).workers[0].engine
    assert (engine.device, engine.dtype) == ("cuda", "bfloat16")
    kept = plan_for(load_config(None, {"device": "cpu"}), replace(MACHINE, has_gpu=True))
    assert kept.workers[0].engine.dtype == "float32"


def test_toy_engines_have_blocks_of_their_own_size():
    made = plan_for(load_config(None, {"engine": "emulated"}))
    spec = made.workers[0].engine.spec
    assert spec is not None
    assert made.pools[0].config.slot_bytes == spec.block_bytes == made.conductor.block_bytes
    assert made.pools[0].config.num_layers == spec.num_layers
    assert made.workers[0].engine.profile is not None
    assert (spec.vocab_size, spec.eos_token_ids) == (INFO.vocab_size, INFO.eos_token_ids)
    assert made.gateway.fingerprint == spec.fingerprint
