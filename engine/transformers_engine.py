"""The engine for real models: any decoder-only architecture of transformers, over a paged cache.

The life of a step: the sequences' tokens are packed into one row of tokens, the model
runs over it with their positions, each layer's attention goes through `engine.attention`, and the
head is computed only for the tokens whose logits somebody wants.

The model is transformers' own, forward included: the reference path of every architecture. On CPUs
in float32, linears, norms, MLPs and the whole layers of known architectures are replaced by
kernels, each only after it agreed with the original on random input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from core.errors import ConfigError
from core.requests import PositionLogprobs
from engine.attention import (
    ATTENTION_NAME,
    AttentionStep,
    KernelStep,
    StepTables,
    TorchStep,
    make_tables,
)
from engine.base import LayerDone, ModelSpec, SequenceResult, SequenceStep
from engine.cache import PagedCache
from engine.fused_layers import replace_layers
from engine.kernels import Kernels, load_kernels
from engine.model_probe import check_config, probe_layers
from engine.models import inspect_model
from engine.packed_modules import replace_modules
from engine.sampling import prompt_logprobs, sample

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class TransformersEngine:
    """`engine.base.Engine` for the Hugging Face model in `model_dir`, weights in safetensors.

    `device` and `dtype` as torch names them ("cpu", "cuda", "cuda:1"; "float32", "bfloat16").
    `num_threads` holds for torch (of the whole process) and the kernels. `isa` chooses the CPU
    kernels: "auto" the best there are, "none" torch alone, or an instruction set by name; they
    run float32 on the CPU, anything else goes through torch. Raises `ConfigError`, with the
    reason, for what it cannot run.
    """

    def __init__(
        self,
        model_dir: Path | str,
        *,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        device: str = "cpu",
        dtype: str = "float32",
        num_threads: int = 1,
        isa: str = "auto",
    ) -> None:
        if dtype not in _DTYPES:
            raise ConfigError(f"dtype {dtype!r} is none of {', '.join(_DTYPES)}")
        info = inspect_model(Path(model_dir))
        if max_model_len > info.context_tokens:
            raise ConfigError(f"max_model_len {max_model_len} is over {info.context_tokens}, "
                              "the model's own context")  # fmt: skip
        torch.set_num_threads(num_threads)
        self._device = torch.device(device)
        model = _load_model(info.path, _DTYPES[dtype], self._device)
        check_config(model.config)
        shape = probe_layers(model)
        self._kernels: Kernels | None = None
        if self._device.type == "cpu" and dtype == "float32":
            self._kernels = load_kernels(isa, num_threads=num_threads)
        self.num_blocks = num_blocks
        self.spec = ModelSpec(
            fingerprint=info.fingerprint,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            kv_dtype=dtype,
            kv_itemsize=_DTYPES[dtype].itemsize,
            block_size=block_size,
            vocab_size=info.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=info.eos_token_ids,
        )
        if self._kernels is not None:
            replace_layers(model, self._kernels, self.spec)
            replace_modules(model, self._kernels)
        cache = PagedCache(self.spec, num_blocks, _DTYPES[dtype], self._device)
        self.isa = "none" if self._kernels is None else self._kernels.isa
        self._loaded: tuple[PreTrainedModel, PagedCache] | None = (model, cache)

    def step(
        self, sequences: Sequence[SequenceStep], layer_done: LayerDone | None = None
    ) -> list[SequenceResult]:
        """Run one forward pass over all `sequences`; see `engine.base.Engine`."""
        if not sequences:
            return []
        tables = make_tables(sequences, self.spec.block_size, self.num_blocks)
        wanted = [_wanted_rows(sequence) for sequence in sequences]
        starts = tables.query_start[:-1].tolist()
        rows = [
            start + row
            for start, own in zip(starts, wanted, strict=True)
            for row in (*own.prompt_rows, *own.sample_rows)
        ]
        logits = self._forward(sequences, tables, rows, layer_done)
        return _results(sequences, wanted, logits)

    @torch.inference_mode()
    def _forward(
        self,
        sequences: Sequence[SequenceStep],
        tables: StepTables,
        rows: list[int],
        layer_done: LayerDone | None,
    ) -> torch.Tensor:
        """Logits, float32 `[len(rows), vocab]`, of the packed tokens number `rows`."""
        model, cache = self._resources()
        token_ids = list(chain.from_iterable(sequence.token_ids for sequence in sequences))
        positions = np.concatenate(
            [np.arange(s.start, s.start + len(s.token_ids)) for s in sequences]
        )
        attention: AttentionStep
        if self._kernels is not None:
            attention = KernelStep(cache, tables, self._kernels, layer_done)
        else:
            attention = TorchStep(cache, tables, layer_done)
        output = model(
            input_ids=torch.tensor([token_ids], device=self._device),
            position_ids=torch.from_numpy(positions)[None].to(self._device),
            logits_to_keep=torch.tensor(rows, dtype=torch.int64, device=self._device),
            use_cache=False,
            halfmoon_step=attention,
        )
        logits: torch.Tensor = output.logits
        return logits[0].float()

    def read_slice(self, block_id: int, layer: int) -> memoryview:
        """Bytes of one layer of a block, read-only; a view of the cache on the CPU."""
        size = self.spec.layer_slice_bytes
        return self._resources()[1].read(block_id, layer * size, size)

    def read_block(self, block_id: int) -> memoryview:
        """Bytes of a whole block, read-only; a view of the cache on the CPU."""
        return self._resources()[1].read(block_id, 0, self.spec.block_bytes)

    def write_block(self, block_id: int, data: memoryview) -> None:
        """Replace a block's bytes by `data`, `block_bytes` long."""
        self._resources()[1].write(block_id, data)

    def zero_block(self, block_id: int) -> None:
        """Fill a block with zeros."""
        self._resources()[1].zero(block_id)

    def close(self) -> None:
        """Give model and cache back; views handed out keep the cache's memory until they go."""
        if self._loaded is not None:
            self._loaded[1].close()
        self._loaded = None

    def _resources(self) -> tuple[PreTrainedModel, PagedCache]:
        if self._loaded is None:
            raise RuntimeError("the engine is closed")
        return self._loaded


@dataclass(frozen=True, slots=True)
class _WantedRows:
    """Tokens of a sequence, from 0, whose logits are needed."""

    prompt_rows: range
    sample_rows: range


def _wanted_rows(sequence: SequenceStep) -> _WantedRows:
    length = len(sequence.token_ids)
    reported = 0 if sequence.prompt_logprobs is None else len(sequence.next_token_ids)
    return _WantedRows(
        prompt_rows=range(min(reported, length)),
        sample_rows=range(length - 1, length if sequence.sample is not None else length - 1),
    )


def _results(
    sequences: Sequence[SequenceStep], wanted: Sequence[_WantedRows], logits: torch.Tensor
) -> list[SequenceResult]:
    """Sample and report; the rows of `logits` are those wanted, sequence after sequence."""
    prompts: list[tuple[PositionLogprobs, ...]] = []
    sample_rows: list[int] = []
    row = 0
    for sequence, own in zip(sequences, wanted, strict=True):
        count = len(own.prompt_rows)
        prompts.append(
            prompt_logprobs(
                logits[row : row + count],
                sequence.next_token_ids[:count],
                sequence.prompt_logprobs or 0,
            )
            if count
            else ()
        )
        row += count
        sample_rows += range(row, row + len(own.sample_rows))
        row += len(own.sample_rows)
    requests = [sequence.sample for sequence in sequences if sequence.sample is not None]
    picked = logits if len(sample_rows) == len(logits) else logits[sample_rows]
    sampled = iter(sample(picked, requests))
    results = []
    for sequence, prompt in zip(sequences, prompts, strict=True):
        if sequence.sample is None:
            results.append(SequenceResult(prompt_logprobs=prompt))
        else:
            token_id, logprobs = next(sampled)
            results.append(SequenceResult(token_id, logprobs, prompt))
    return results


def _load_model(model_dir: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load the model with our attention; safetensors only, no code from the folder."""
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model_dir,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load the model in {model_dir}: {error}") from error
    loaded: PreTrainedModel = torch.nn.Module.to(model, device)
    loaded.train(False)
    return loaded
