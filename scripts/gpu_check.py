"""Check the engine on a CUDA device: same tokens as `generate`, and tokens per second.

`python scripts/gpu_check.py MODEL` compares greedy tokens in float32 for prompts of several lengths
run together, then times decode steps in float32 and bfloat16. Exit code 1 means a difference.
Without a CUDA device it says so and exits with 0. Attention on CUDA is not the fast path yet.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from core.requests import SamplingParams
from engine.base import SampleRequest, SequenceStep
from engine.models import resolve_model
from engine.transformers_engine import TransformersEngine

BLOCK_SIZE = 16
PROMPT_LENGTHS = (1, 15, 16, 17, 100, 1000)
CHUNK_TOKENS = 256


def make_engine(model_dir: Path, dtype: str, num_sequences: int) -> TransformersEngine:
    """An engine on the GPU with room for `num_sequences` of 1,100 tokens."""
    return TransformersEngine(
        model_dir,
        block_size=BLOCK_SIZE,
        num_blocks=num_sequences * 1100 // BLOCK_SIZE + num_sequences,
        max_model_len=1100,
        device="cuda",
        dtype=dtype,
    )


def generate(
    engine: TransformersEngine, prompts: list[list[int]], num_tokens: int
) -> tuple[list[list[int]], float]:
    """Greedy tokens of each prompt, decoded together, and the seconds of the decode steps."""
    share = engine.num_blocks // len(prompts)
    tables = [range(index * share, (index + 1) * share) for index in range(len(prompts))]
    params = SamplingParams(max_tokens=num_tokens)
    outputs: list[list[int]] = []
    for prompt, table in zip(prompts, tables, strict=True):
        for start in range(0, len(prompt), CHUNK_TOKENS):
            part = prompt[start : start + CHUNK_TOKENS]
            (result,) = engine.step(
                [SequenceStep(part, start, table, SampleRequest(params, prompt, ()))]
            )
        assert result.token_id is not None
        outputs.append([result.token_id])
    started = time.perf_counter()
    for _ in range(num_tokens - 1):
        steps = [
            SequenceStep(
                output[-1:],
                len(prompt) + len(output) - 1,
                table,
                SampleRequest(params, prompt, tuple(output)),
            )
            for prompt, output, table in zip(prompts, outputs, tables, strict=True)
        ]
        for output, result in zip(outputs, engine.step(steps), strict=True):
            assert result.token_id is not None
            output.append(result.token_id)
    return outputs, time.perf_counter() - started


def reference(model_dir: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """What transformers' `generate` gives on the GPU in float32."""
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, use_safetensors=True
    )
    torch.nn.Module.to(model, "cuda")
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
        )
        outputs.append(found[0, len(prompt) :].tolist())
    return outputs


def main() -> int:
    """Run the check; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was checked")
        return 0
    model_dir = resolve_model(args.model)
    engine = make_engine(model_dir, "float32", len(PROMPT_LENGTHS))
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(3, engine.spec.vocab_size, (length,), generator=generator).tolist()
        for length in PROMPT_LENGTHS
    ]
    ours, _ = generate(engine, prompts, args.tokens)
    expected = reference(model_dir, prompts, args.tokens)
    different = [
        length for length, a, b in zip(PROMPT_LENGTHS, ours, expected, strict=True) if a != b
    ]
    print(
        f"{torch.cuda.get_device_name()}: tokens differ for prompts of {different or 'no'} length"
    )
    for dtype in ("float32", "bfloat16"):
        engine = make_engine(model_dir, dtype, 16)
        batch = [prompts[-2]] * 16
        generate(engine, batch, 3)
        _, seconds = generate(engine, batch, args.tokens)
        rate = 16 * (args.tokens - 1) / seconds
        print(f"{dtype}: {rate:.0f} tokens/s, batch 16, from {len(batch[0])} tokens of context")
        engine.close()
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
