"""Configuration: what is read, refused and printed, and what is made of it."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from cluster.config import Config, load_config, parse_bytes, render_yaml, walk
from cluster.deployment import Machine, num_workers, plan, show_bytes
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
        ("host: [", "is not YAML"),
    ],
)
def test_mistakes_are_named(tmp_path, text, hint):
    assert hint in refusal(tmp_path, text)


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
