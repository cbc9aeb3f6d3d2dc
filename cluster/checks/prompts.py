"""The prompts of `halfmoon check parity`: varied in length, language and form, always the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Encode = Callable[[str], list[int]]
ChatEncode = Callable[[str], list[int]]

SENTENCES = {
    "english": (
        "The capital of France is",
        "A ship in harbour is safe, but that is not what ships are built for.",
        "Water boils at a lower temperature on a mountain because the air is thinner there.",
        "She counted the steps twice, wrote the number down, and closed the heavy door behind her.",
        "Trains were late all morning, so the committee met without its chairman.",
    ),
    "german": (
        "Der Zug nach Hamburg fährt heute wegen Bauarbeiten von Gleis sieben ab.",
        "Wer früh aufsteht, sieht den Nebel über den Feldern, bevor die Sonne ihn auflöst.",
    ),
    "french": (
        "Le marché ouvre à huit heures et les meilleurs fruits partent toujours en premier.",
        "Il pleuvait depuis trois jours, et la rivière avait déjà quitté son lit.",
    ),
    "spanish": (
        "La biblioteca guarda más de un millón de libros y ninguno se presta los domingos.",
        "Cuando llegó la primavera, los niños volvieron a jugar en la plaza.",
    ),
    "russian": ("Зимой солнце садится рано, и фонари зажигаются уже в четыре часа.",),
    "chinese": ("今天的天气很好，我们决定去河边散步，然后在老城里吃晚饭。",),
    "japanese": ("図書館は九時に開きます。静かにしてください。",),
    "arabic": ("يفتح السوق أبوابه في الصباح الباكر ويغلق عند الغروب.",),
    "hindi": ("पुस्तकालय सुबह नौ बजे खुलता है और शाम को बंद होता है।",),
    "code": (
        "def merge(left: list[int], right: list[int]) -> list[int]:\n    result = []\n",
        "SELECT name, count(*) FROM visits WHERE day >= '2024-01-01' GROUP BY name;\n",
        "for (size_t i = 0; i < n; ++i) { sum += weights[i] * inputs[i]; }\n",
    ),
    "figures": (
        "3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597, 2584.",
        "| year | rain (mm) | days |\n| 1998 | 612.5 | 131 |\n| 1999 | 587.0 | 127 |\n",
    ),
    "emoji": ("👩‍👩‍👧‍👦 went to the 🏖️ and sent a 📷 to 🇯🇵, signed é and ñ.",),
}

QUESTIONS = (
    "What is the capital of France?",
    "Explain in one sentence why the sky is blue.",
    "Nenne drei Flüsse in Deutschland.",
    "Écris une phrase sur la mer.",
    "¿Cuántos días tiene una semana?",
    "用一句话介绍北京。",
    "Write a Python function that reverses a string.",
    "List five words that rhyme with light.",
    "What is 17 times 23?",
    "Translate 'good morning' into Japanese.",
    "Give me a title for a story about a lighthouse.",
    "Who wrote Hamlet, and when?",
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: `name` says what is special about it."""

    name: str
    token_ids: tuple[int, ...]


def parity_lengths(block_size: int, chunk_tokens: int, longest: int) -> list[int]:
    """Prompt lengths where off-by-one faults live: around blocks, chunks, and the extremes."""
    lengths = {1, 2, 3, 7, longest // 3, longest * 2 // 3, longest - 1, longest}
    for edge in (*(block_size * k for k in (1, 2, 3, 4, 8, 20)), chunk_tokens, 2 * chunk_tokens):
        lengths |= {edge - 1, edge, edge + 1}
    lengths |= {chunk_tokens + block_size, 2 * chunk_tokens + block_size + 1}
    return sorted(n for n in lengths if 1 <= n <= longest)


def parity_prompts(
    encode: Encode,
    encode_chat: ChatEncode | None,
    *,
    block_size: int,
    chunk_tokens: int,
    longest: int = 3000,
    count: int = 60,
) -> list[Prompt]:
    """Make `count` prompts of 1 to `longest` tokens, the same for the same tokenizer.

    Raw prompts are cut to exact lengths from texts that differ from their first sentence on, so
    that none is a prefix of another by accident; the last few share a prefix on purpose.
    """
    prompts = []
    if encode_chat is not None:
        prompts = [Prompt(f"chat {q[:24]!r}", tuple(encode_chat(q))) for q in QUESTIONS]
    for length in parity_lengths(block_size, chunk_tokens, longest):
        prompts.append(Prompt(f"raw {length}", tuple(_text_tokens(encode, length, length))))
    base = _text_tokens(encode, 40 * block_size, 10_000)
    extra = 1
    while len(prompts) < count:
        shared = base[: 3 * block_size * extra]
        own = _text_tokens(encode, 2 * block_size + extra, 20_000 + extra)
        prompts.append(Prompt(f"shares {len(shared)}", tuple((shared + own)[:longest])))
        extra += 1
    return prompts[:count]


def load_prompts(
    model_dir: Path,
    *,
    block_size: int = 16,
    chunk_tokens: int = 512,
    longest: int = 3000,
    count: int = 60,
) -> list[Prompt]:
    """Make the prompts with a model's own tokenizer; chats too if it has a chat template."""
    from cluster.gateway.chat import ChatTemplateError
    from cluster.gateway.tokenizer import FastTokenizer

    tokenizer = FastTokenizer.load(model_dir)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    def encode_chat(text: str) -> list[int]:
        message = {"role": "user", "content": text}
        return encode(tokenizer.apply_chat_template([message], add_generation_prompt=True))

    chat: ChatEncode | None = encode_chat
    try:
        encode_chat("hello")
    except ChatTemplateError:
        chat = None
    return parity_prompts(
        encode,
        chat,
        block_size=block_size,
        chunk_tokens=chunk_tokens,
        longest=longest,
        count=count,
    )


def _text_tokens(encode: Encode, length: int, seed: int) -> list[int]:
    """`length` tokens of shuffled sentences in all languages."""
    chance = random.Random(seed)
    pool = [s for group in SENTENCES.values() for s in group]
    token_ids: list[int] = []
    while len(token_ids) < length:
        token_ids += encode(f"{chance.choice(pool)} {chance.randrange(1000)}. ")
    return token_ids[:length]
