"""Convert one GGUF file to a Hugging Face folder: safetensors, tokenizer, chat template.

Run as `python -m engine.gguf_convert FILE.gguf FOLDER` in a process of its own, so that the
caller neither imports torch nor keeps the memory. Progress goes to standard output, one line
`fraction<TAB>stage` at a time; whatever the libraries say goes to standard error.

Transformers reads the file. It does so here without its `from_pretrained(gguf_file=...)`, which
asks for the accelerate package for no more than this.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

# The `no-untyped-call` exceptions below: these functions of transformers have no annotations.


class ConversionError(Exception):
    """The file does not hold the whole model."""


def convert(gguf_file: Path, folder: Path) -> None:
    """Write the model of `gguf_file`, in float32, to the existing `folder`.

    Raises `ConversionError` when weights are missing or left over.
    """
    _report(0.0, "reading the tokenizer")
    _save_tokenizer(gguf_file, folder)
    _report(0.25, "reading the weights")
    model = _load_model(gguf_file)
    _report(0.85, "writing safetensors")
    model.save_pretrained(folder)
    _report(1.0, "converted")


def _save_tokenizer(gguf_file: Path, folder: Path) -> None:
    """Save the tokenizer with the chat template, putting right what transformers leaves out."""
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    fields = load_gguf_checkpoint(str(gguf_file))  # type: ignore[no-untyped-call]
    if fields["tokenizer"].get("pre_tokenizer_type") == "smollm":
        # SmolLM2 was trained with every digit a token of its own; transformers drops that.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    tokenizer.model_max_length = fields["config"]["max_position_embeddings"]
    tokenizer.save_pretrained(folder)


def _load_model(gguf_file: Path) -> PreTrainedModel:
    """Build the model and fill in its weights."""
    config = AutoConfig.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    del config._model_name_or_path
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.float32
        )
    loaded = load_gguf_checkpoint(  # type: ignore[no-untyped-call]
        str(gguf_file), return_tensors=True, model_to_load=model, torch_dtype=torch.float32
    )
    outcome = model.load_state_dict(loaded["tensors"], strict=False, assign=True)
    missing = set(outcome.missing_keys) - set(model.all_tied_weights_keys)
    if missing or outcome.unexpected_keys:
        raise ConversionError(
            f"{gguf_file.name} lacks {sorted(missing)} and has {outcome.unexpected_keys} besides"
        )
    model.tie_weights()
    return model


def _report(fraction: float, stage: str) -> None:
    print(f"{fraction}\t{stage}", flush=True)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
