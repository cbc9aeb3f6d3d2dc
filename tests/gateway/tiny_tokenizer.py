"""A byte-level tokenizer made on the spot: one token a byte, a few merges, three specials."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer

from cluster.gateway.chat import ChatTemplate
from cluster.gateway.detokenizer import byte_level_alphabet
from cluster.gateway.tokenizer import FastTokenizer

TEMPLATE = (
    "{% for m in messages %}"
    "{% if loop.first and m.role == 'assistant' %}{{ raise_exception('user first') }}{% endif %}"
    "<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
EOS = "<|end|>"


def tiny_tokenizer(padding: int = 0) -> FastTokenizer:
    """Ids 0-255 are not the bytes themselves but the alphabet's order; `padding` adds model ids."""
    alphabet = sorted(byte_level_alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = BackendTokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<|start|>", EOS, "<|x|>")])
    return FastTokenizer(
        backend,
        vocab_size=backend.get_vocab_size(with_added_tokens=True) + padding,
        chat_template=ChatTemplate(TEMPLATE, {"eos_token": EOS}),
    )
