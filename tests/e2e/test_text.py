"""Text over the hand-off: half characters and half stop strings (B01, B02, B04, B05)."""

from __future__ import annotations

import pytest

from tests.gateway.tiny_tokenizer import EOS
from tests.harness.local_cluster import CHAT, COMPLETIONS, TOKENIZER, Shape, running

SHAPES = pytest.mark.parametrize(
    "shape", [Shape(), Shape(hosts=1, prefill=0, decode=0, coupled=1)], ids=["2p2d", "coupled"]
)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


async def both_ways(cluster, path, output, **fields):
    """The text, streamed and whole, which must agree, with the pieces of the stream."""
    forced = ids(output)
    fields = {"forced_token_ids": forced, "max_tokens": len(forced)} | fields
    streamed = await cluster.complete("say it", path, stream=True, **fields)
    whole = await cluster.complete("say it", path, **fields)
    assert (streamed.text, streamed.finish) == (whole.text, whole.finish)
    assert streamed.usage == whole.usage | {
        "prompt_tokens_details": streamed.usage["prompt_tokens_details"]
    }
    return whole, streamed.stream.deltas()


@SHAPES
async def test_b01_b02_text_is_that_of_all_tokens_together(monkeypatch, shape):
    """B01, B02: decoding each chunk alone shows U+FFFD, or sends a character twice.

    Each output begins with the first byte of a character, so the hand-off is in the middle of it.
    """
    async with running(monkeypatch, shape) as cluster:
        for text in (
            "👩‍👩‍👧‍👦 世界 é 🇯🇵",
            "世A 世世ab",
            "é a\u0301",
            f"é<|x|>b{EOS[:3]}",
            " hello world",
        ):
            for path in (COMPLETIONS, CHAT):
                made, deltas = await both_ways(cluster, path, text)
                assert made.text == text.replace("<|x|>", "")
                assert "\ufffd" not in "".join(deltas)
                made, _ = await both_ways(cluster, path, text, skip_special_tokens=False)
                assert made.text == text


async def test_b01_broken_bytes_are_shown_as_the_tokenizer_shows_them(monkeypatch):
    """B01: U+FFFD exactly where the model itself made no character."""
    async with running(monkeypatch) as cluster:
        emoji = ids("👩")
        for forced in (emoji[:3], emoji[:1] + ids("a"), emoji[1:], emoji[:2] + emoji):
            fields = {"forced_token_ids": forced, "max_tokens": len(forced)}
            expected = TOKENIZER.decode(forced, skip_special_tokens=True)
            assert (await cluster.complete("x", **fields)).text == expected
            assert (await cluster.complete("x", stream=True, **fields)).text == expected


@SHAPES
async def test_b04_nothing_of_a_stop_string_leaks(monkeypatch, shape):
    """B04: without holding back, the first half is sent before the match is complete."""
    async with running(monkeypatch, shape) as cluster:
        for output, stop, text, finish in (
            ("hi\n\nUser:x", ["\n\nUser:"], "hi", "stop"),
            ("hi\n\nUsex", ["\n\nUser:"], "hi\n\nUsex", "length"),
            ("\n\nUser:x", ["\n\nUser:"], "", "stop"),
            ("👩!", ["👩"], "", "stop"),
            ("x" + "ab" * 100 + "y", "ab" * 100, "x", "stop"),
        ):
            for path in (COMPLETIONS, CHAT):
                made, _ = await both_ways(cluster, path, output, stop=stop)
                assert (made.text, made.finish) == (text, finish)
                included, _ = await both_ways(
                    cluster, path, output, stop=stop, include_stop_str_in_output=True
                )
                matched = stop if isinstance(stop, str) else stop[0]
                assert included.text == (text + matched if finish == "stop" else text)


@SHAPES
async def test_b05_a_stop_string_over_the_hand_off(monkeypatch, shape):
    """B05: a matcher on one side only would never see the whole of it."""
    async with running(monkeypatch, shape) as cluster:
        for output, stop, text, num_tokens in (
            ("##" + "x" * 50, "##", "", 2),
            ("#" + "x" * 50, "#", "", 1),
            ("b#" + "x" * 50, "#", "b", 2),
        ):
            made, _ = await both_ways(cluster, COMPLETIONS, output, stop=stop)
            assert (made.text, made.finish) == (text, "stop")
            assert made.usage["completion_tokens"] == num_tokens
            await cluster.settle()
        forced = {"forced_token_ids": ids("b!"), "max_tokens": 2}
        made = await cluster.complete("aa", stop="ab", **forced)
        assert (made.text, made.finish) == ("b!", "length")


async def test_b05_generation_stops_within_a_step_of_the_match(monkeypatch):
    """B05: nobody works on for a client that has its answer."""
    async with running(monkeypatch, Shape(hosts=1, prefill=1, decode=1)) as cluster:
        forced = ids("ab#" + "x" * 150)
        before = cluster.engines["decode-0"].num_steps
        made = await cluster.complete("p", stop="b#", forced_token_ids=forced, max_tokens=150)
        await cluster.settle()
        assert made.usage["completion_tokens"] == 3
        # Two steps made tokens 2 and 3; others may have run until the cancel came.
        assert cluster.engines["decode-0"].num_steps - before < 40
