"""The paged attention, kernel and torch, against attention written out in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.errors import InvariantError
from engine.attention import (
    AttentionStep,
    KernelStep,
    LayerInputs,
    TorchStep,
    UnsupportedAttentionError,
    make_tables,
    paged_attention,
)
from engine.base import ModelSpec, SequenceStep
from engine.cache import PagedCache
from tests.engine.test_kernels import ISAS, kernels_or_skip

LAYER = 1


def spec(block_size, kv_heads, head_dim):
    return ModelSpec(
        "f", 2, kv_heads, head_dim, "float32", 4, block_size, vocab_size=9, max_model_len=999,
        eos_token_ids=(),
    )  # fmt: skip


class Case:
    """Sequences of (positions already cached, new tokens) over shuffled blocks."""

    def __init__(self, lengths, *, block_size=16, heads=6, kv_heads=2, head_dim=16, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.lengths = lengths
        self.scale = 1.2 * head_dim**-0.5
        self.group = heads // kv_heads
        needed = [-(-(start + new) // block_size) for start, new in lengths]
        order = torch.randperm(sum(needed) + 2, generator=generator).tolist()
        self.spec = spec(block_size, kv_heads, head_dim)
        self.cache = PagedCache(self.spec, len(order), torch.float32, torch.device("cpu"))
        self.cache.blocks.normal_(generator=generator)
        self.full = [  # every position's K and V, [2, kv_heads, context, head_dim]
            torch.randn(2, kv_heads, start + new, head_dim, generator=generator)
            for start, new in lengths
        ]
        self.sequences = []
        for (start, new), blocks, kv in zip(lengths, needed, self.full, strict=True):
            table = [order.pop() for _ in range(blocks)]
            self.sequences.append(SequenceStep([0] * new, start, table))
            for position in range(start):
                block, offset = table[position // block_size], position % block_size
                self.cache.blocks[block, LAYER, :, :, offset] = kv[:, :, position]
        self.tables = make_tables(self.sequences, block_size, self.cache.num_blocks)
        num_tokens = sum(new for _, new in lengths)
        self.q = torch.randn(num_tokens, heads, head_dim, generator=generator).transpose(0, 1)
        new = [kv[:, :, start:] for (start, _), kv in zip(lengths, self.full, strict=True)]
        self.k, self.v = torch.cat(new, dim=2)

    def inputs(self, window=0, softcap=0.0):
        return LayerInputs(LAYER, self.q, self.k, self.v, self.scale, window, softcap)

    def expected(self, window=0, softcap=0.0):
        outputs, first = [], 0
        for (start, new), kv in zip(self.lengths, self.full, strict=True):
            k, v = kv.double().repeat_interleave(self.group, dim=1)
            logits = self.q[:, first : first + new].double() @ k.transpose(1, 2) * self.scale
            if softcap:
                logits = softcap * torch.tanh(logits / softcap)
            now = torch.arange(start, start + new)[:, None]
            then = torch.arange(start + new)
            visible = (then <= now) & ((then > now - window) if window else (then >= 0))
            weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
            outputs.append((weights @ v).transpose(0, 1))
            first += new
        return torch.cat(outputs).float()

    def step(self, isa, layer_done=None) -> AttentionStep:
        if isa == "torch":
            return TorchStep(self.cache, self.tables, layer_done)
        return KernelStep(self.cache, self.tables, kernels_or_skip(isa), layer_done)


IMPLEMENTATIONS = ("torch", *ISAS)
MIXED = [(37, 1), (0, 70), (130, 1), (16, 16), (3, 45), (0, 1)]


@pytest.mark.parametrize("isa", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "shape",
    [
        {"block_size": 16},
        {"block_size": 4, "head_dim": 8},
        {"block_size": 20, "head_dim": 80, "heads": 5, "kv_heads": 5},
        {"block_size": 64, "head_dim": 64, "heads": 9, "kv_heads": 3},
        {"block_size": 1, "head_dim": 24, "heads": 12, "kv_heads": 1},
        {"block_size": 128, "head_dim": 256, "heads": 2, "kv_heads": 1},
    ],
    ids=lambda shape: "-".join(f"{k}={v}" for k, v in shape.items()),
)
def test_equals_plain_attention_for_any_mix_of_lengths(shape, isa):
    case = Case(MIXED, **shape)
    out = case.step(isa).attend(case.inputs())
    assert torch.allclose(out, case.expected(), atol=3e-6)


@pytest.mark.parametrize("isa", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [1, 5, 16, 64, 100])
def test_a_window_hides_what_is_before_it(window, isa):
    case = Case([*MIXED, (300, 1), (290, 20)])
    out = case.step(isa).attend(case.inputs(window=window))
    assert torch.allclose(out, case.expected(window=window), atol=3e-6)


@pytest.mark.parametrize("isa", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [0, 7])
def test_soft_capping_bounds_the_logits(window, isa):
    case = Case(MIXED)
    out = case.step(isa).attend(case.inputs(window, softcap=2.0))
    assert torch.allclose(out, case.expected(window, softcap=2.0), atol=3e-6)
    assert not torch.allclose(out, case.expected(window), atol=1e-3)


@pytest.mark.parametrize("isa", IMPLEMENTATIONS)
def test_large_logits_neither_overflow_nor_vanish(isa):
    case = Case(MIXED)
    case.q *= 300.0
    out = case.step(isa).attend(case.inputs())
    assert torch.allclose(out, case.expected(), atol=1e-3)


@pytest.mark.parametrize("isa", IMPLEMENTATIONS)
def test_writes_the_new_positions_of_this_layer_and_nothing_else(isa):
    case = Case(MIXED, block_size=4)
    before = case.cache.blocks.clone()
    case.step(isa).attend(case.inputs())
    after = case.cache.blocks
    for sequence, (start, new), kv in zip(case.sequences, case.lengths, case.full, strict=True):
        for position in range(start, start + new):
            block, offset = sequence.block_ids[position // 4], position % 4
            assert torch.equal(after[block, LAYER, :, :, offset], kv[:, :, position])
            before[block, LAYER, :, :, offset] = kv[:, :, position]
    assert torch.equal(after, before)


@pytest.mark.parametrize("isa", ISAS)
def test_a_sequence_gives_the_same_bits_beside_any_others(isa):
    together, alone = Case(MIXED), Case(MIXED)
    many = together.step(isa).attend(together.inputs())
    alone.tables = make_tables(alone.sequences[2:3], 16, alone.cache.num_blocks)
    row = slice(71, 72)
    inputs = LayerInputs(
        LAYER, alone.q[:, row], alone.k[:, row], alone.v[:, row], alone.scale, 0, 0.0
    )
    assert torch.equal(alone.step(isa).attend(inputs), many[row])


@pytest.mark.parametrize("isa", IMPLEMENTATIONS)
def test_tells_of_a_layer_when_its_keys_and_values_are_in_the_cache(isa):
    case = Case([(5, 3)])
    told = []

    def layer_done(layer):
        block = case.sequences[0].block_ids[0]
        told.append((layer, case.cache.blocks[block, LAYER, 0, :, 7].clone()))

    case.step(isa, layer_done).attend(case.inputs())
    assert [layer for layer, _ in told] == [LAYER]
    assert torch.equal(told[0][1], case.full[0][0, :, 7])


@pytest.mark.parametrize(
    "sequence",
    [
        SequenceStep([1, 2, 3], 15, [0]),
        SequenceStep([], 0, [0]),
        SequenceStep([1], -1, [0]),
        SequenceStep([1], 0, [4]),
        SequenceStep([1], 0, [-1]),
    ],
)
def test_a_table_that_does_not_hold_its_tokens_is_refused(sequence):
    with pytest.raises(InvariantError):
        make_tables([sequence], block_size=16, num_blocks=4)


def test_attention_of_another_kind_is_refused_by_name():
    module = torch.nn.Module()
    x = torch.zeros(1, 1, 1, 8)
    case = Case([(0, 1)], heads=1, kv_heads=1, head_dim=8)
    extras: list[dict[str, Any]] = [{"s_aux": x}, {"position_bias": x}]
    for extra in extras:
        with pytest.raises(UnsupportedAttentionError, match=next(iter(extra))):
            paged_attention(module, x, x, x, None, halfmoon_step=case.step("torch"), **extra)
    with pytest.raises(UnsupportedAttentionError, match="attention_mask"):
        paged_attention(module, x, x, x, x, halfmoon_step=case.step("torch"))
    with pytest.raises(UnsupportedAttentionError, match="keyword"):
        paged_attention(module, x, x, x, None)
