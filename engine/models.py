"""Say what a model folder holds, and whether it can be served, without importing torch."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from engine.model_checks import Config, ModelRefused, context_tokens, refusal_reason
from engine.model_pull import Report, no_report, pull_smollm2, resolve_model, user_cache_dir

__all__ = [
    "ModelInfo",
    "ModelRefused",
    "Report",
    "inspect_model",
    "memory_needed_bytes",
    "pull_smollm2",
    "resolve_model",
    "user_cache_dir",
]

_WEIGHT_DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_MASK_DTYPES = {"BOOL", "U8", "I64", "I32"}
"""Old checkpoints keep attention masks and position ids; they are not weights."""

_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
_HASH_CHUNK_BYTES = 1 << 22
_MAX_HEADER_BYTES = 100_000_000
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")
_TOKENIZER_SETTINGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a model folder holds. Sizes in bytes, lengths in tokens.

    `fingerprint` and `tokenizer_digest` are hex digests of file contents: configuration and
    weights, and everything that turns text into tokens. `num_parameters` counts what is stored,
    so tied weights count once.
    """

    path: Path
    architecture: str
    model_type: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    tokenizer_digest: str
    num_parameters: int
    weight_bytes: int


def inspect_model(
    model_dir: Path, cache_dir: Path | None = None, report: Report = no_report
) -> ModelInfo:
    """Read what a model folder holds, or raise `ModelRefused` if it cannot be served.

    The first time all weights are read to digest them; the digests are kept in the user's cache,
    by path, size and modification time, so that later calls read headers only.
    """
    config = _read_config(model_dir)
    reason = refusal_reason(config)
    if reason is not None:
        raise ModelRefused(f"{model_dir}: {reason}")
    weights = _weight_files(model_dir)
    tensors = {name: entry for file in weights for name, entry in _tensors(file).items()}
    num_parameters, weight_bytes = _count_weights(model_dir, tensors)
    num_layers, num_kv_heads, head_dim = _kv_shape(model_dir, config, tensors)
    digests = _DigestCache((cache_dir or user_cache_dir()) / "digests", model_dir, report)
    tokenizer = [model_dir / name for name in (*_TOKENIZER_FILES, *_TOKENIZER_SETTINGS)]
    if not any(file.is_file() for file in tokenizer[: len(_TOKENIZER_FILES)]):
        raise ModelRefused(f"{model_dir}: it has no tokenizer; add its tokenizer.json")
    return ModelInfo(
        path=model_dir,
        architecture=str((config.get("architectures") or [config["model_type"]])[0]),
        model_type=config["model_type"],
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_number(model_dir, config, "vocab_size"),
        context_tokens=context_tokens(config) or 0,
        eos_token_ids=_eos_token_ids(model_dir, config),
        fingerprint=digests.combined([model_dir / "config.json", *weights]),
        tokenizer_digest=digests.combined([file for file in tokenizer if file.is_file()]),
        num_parameters=num_parameters,
        weight_bytes=weight_bytes,
    )


def memory_needed_bytes(
    info: ModelInfo,
    num_blocks: int,
    block_size: int,
    *,
    weight_itemsize: int = 4,
    kv_itemsize: int = 4,
    overhead_bytes: int = 512 << 20,
) -> int:
    """Return what one worker's engine needs: its weights, its paged cache, and an allowance.

    `overhead_bytes` is that allowance, for Python, torch and the activations of a step.
    """
    token_bytes = 2 * info.num_layers * info.num_kv_heads * info.head_dim * kv_itemsize
    weights = info.num_parameters * weight_itemsize
    return weights + num_blocks * block_size * token_bytes + overhead_bytes


def _read_config(model_dir: Path) -> Config:
    if not model_dir.is_dir():
        raise ModelRefused(f"{model_dir}: there is no such folder")
    path = model_dir / "config.json"
    if path.is_file():
        return _read_json(path)
    if any(model_dir.glob("*.gguf")):
        hint = "a GGUF file is not served as it is; give the safetensors folder it was made from"
    elif (model_dir / "adapter_config.json").is_file():
        hint = "it is an adapter; merge it into its base model and give the merged folder"
    else:
        hint = "give a Hugging Face model folder (config.json, *.safetensors, tokenizer.json)"
    raise ModelRefused(f"{model_dir}: it has no config.json; {hint}")


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelRefused(f"{path}: not valid JSON ({error}); fetch the file again") from error
    if not isinstance(content, dict):
        raise ModelRefused(f"{path}: not a JSON object; fetch the file again")
    return content


def _weight_files(model_dir: Path) -> list[Path]:
    """Return the safetensors files that transformers would load, all of them there."""
    single, index = model_dir / "model.safetensors", model_dir / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (model_dir / name).is_file()]
        if missing:
            raise ModelRefused(f"{model_dir}: it lacks {', '.join(missing)}; fetch the model again")
        return [model_dir / name for name in names]
    if any(model_dir.glob("model-*.safetensors")):
        raise ModelRefused(f"{model_dir}: it lacks {index.name}; fetch the model again")
    pickled = sorted(f.name for f in model_dir.iterdir() if f.suffix in _PICKLE_SUFFIXES)
    if pickled:
        raise ModelRefused(
            f"{model_dir}: its weights are pickled ({pickled[0]}), which can run any code; save "
            "them as safetensors"
        )
    raise ModelRefused(f"{model_dir}: it has no weights; add its model.safetensors")


@dataclass(frozen=True, slots=True)
class _Tensor:
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int

    @property
    def num_values(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count


def _tensors(path: Path) -> dict[str, _Tensor]:
    """Read the header of a safetensors file: u64 length, then JSON, then the data."""
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        raw = file.read(length) if 0 < length <= _MAX_HEADER_BYTES else b""
    try:
        header = json.loads(raw)
        tensors = {
            name: _Tensor(
                entry["dtype"],
                tuple(entry["shape"]),
                entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelRefused(f"{path}: not a safetensors file; fetch it again") from error
    expected_bytes = 8 + length + sum(tensor.size_bytes for tensor in tensors.values())
    if path.stat().st_size != expected_bytes:
        raise ModelRefused(f"{path}: cut short or damaged; fetch it again")
    return tensors


def _count_weights(model_dir: Path, tensors: Mapping[str, _Tensor]) -> tuple[int, int]:
    """Return number and bytes of all weights; refuse what is stored in a quantised type."""
    weights = [tensor for tensor in tensors.values() if tensor.dtype in _WEIGHT_DTYPES]
    for name, tensor in tensors.items():
        is_mask = tensor.dtype in _MASK_DTYPES and not name.endswith("weight")
        if tensor.dtype not in _WEIGHT_DTYPES and not is_mask:
            raise ModelRefused(
                f"{model_dir}: {name} is stored as {tensor.dtype}, a quantised type; give "
                "float32, bfloat16 or float16 weights"
            )
    return sum(w.num_values for w in weights), sum(w.size_bytes for w in weights)


def _kv_shape(
    model_dir: Path, config: Config, tensors: Mapping[str, _Tensor]
) -> tuple[int, int, int]:
    """Return layers, K/V heads and head size.

    Where the configuration leaves them to its class's defaults, the K projection's shape tells.
    """
    num_layers = _number(model_dir, config, "num_hidden_layers", "n_layer", "num_layers")
    num_heads = _number(model_dir, config, "num_attention_heads", "n_head", "num_heads")
    num_kv_heads = num_heads
    if config.get("num_key_value_heads"):
        num_kv_heads = _number(model_dir, config, "num_key_value_heads")
    k_rows = {t.shape[0] for name, t in tensors.items() if name.endswith("k_proj.weight")}
    if len(k_rows) > 1:
        raise ModelRefused(f"{model_dir}: its layers have K of different shapes; that cannot run")
    if k_rows:
        rows = k_rows.pop()
        head_dim = config.get("head_dim") or rows // num_kv_heads
        if num_kv_heads * head_dim != rows:
            raise ModelRefused(
                f"{model_dir}: config.json says {num_kv_heads} K/V heads of {head_dim}, but its K "
                f"projections have {rows} rows; configuration and weights do not belong together"
            )
        return num_layers, num_kv_heads, head_dim
    hidden = _number(model_dir, config, "hidden_size", "n_embd", "d_model")
    return num_layers, num_kv_heads, config.get("head_dim") or hidden // num_heads


def _number(model_dir: Path, config: Config, *keys: str) -> int:
    """Return the first of `keys` that the configuration has, a positive whole number."""
    value = next((config[key] for key in keys if key in config), None)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        said = "does not say" if value is None else f"says {value!r} for"
        raise ModelRefused(
            f"{model_dir}: its config.json {said} `{keys[0]}`; set it to a positive number"
        )
    return value


def _eos_token_ids(model_dir: Path, config: Config) -> tuple[int, ...]:
    """Return every end token that configuration or generation configuration names."""
    generation = model_dir / "generation_config.json"
    stated = [config.get("eos_token_id")]
    if generation.is_file():
        stated.append(_read_json(generation).get("eos_token_id"))
    ids: set[int] = set()
    for value in stated:
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(ids))


class _DigestCache:
    """Content digests of one model's files, kept in one JSON file of the user's cache."""

    def __init__(self, folder: Path, model_dir: Path, report: Report) -> None:
        resolved = str(model_dir.resolve())
        self._path = folder / f"{blake2b(resolved.encode(), digest_size=16).hexdigest()}.json"
        self._report = report
        self._known: dict[str, Any] = {}
        if self._path.is_file():
            try:
                self._known = json.loads(self._path.read_bytes())
            except ValueError:
                self._path.unlink(missing_ok=True)

    def combined(self, files: list[Path]) -> str:
        """Return a digest over names and contents of `files`."""
        total = blake2b(digest_size=32)
        changed = False
        for file in files:
            stat = file.stat()
            key = [stat.st_size, stat.st_mtime_ns]
            entry = self._known.get(file.name)
            if not isinstance(entry, dict) or entry.get("key") != key:
                entry = {"key": key, "digest": self._digest(file, stat.st_size)}
                self._known[file.name] = entry
                changed = True
            total.update(f"{file.name}\0{entry['digest']}\0".encode())
        if changed:
            self._save()
        return total.hexdigest()

    def _digest(self, file: Path, size_bytes: int) -> str:
        digest, done = blake2b(digest_size=32), 0
        for chunk in _chunks(file):
            digest.update(chunk)
            done += len(chunk)
            self._report(f"digesting {file.name}", done / size_bytes)
        return digest.hexdigest()

    def _save(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draft = self._path.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps(self._known))
            draft.replace(self._path)
        except OSError as error:
            # Only time is lost: the next start digests the files again.
            self._report(f"the digests cannot be kept: {error}", 1.0)


def _chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while chunk := opened.read(_HASH_CHUNK_BYTES):
            yield chunk
