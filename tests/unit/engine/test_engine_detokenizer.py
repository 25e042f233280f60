"""Text as it comes: never changed once given out, cut before a stop string."""

from __future__ import annotations

import pytest

from engine.sampling.detokenizer import Detokenizer


class Bytes:
    """A byte-level tokenizer: token = byte; 256 and above are special."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(t for t in token_ids if t < 256).decode(errors="replace")


def feed(text: str, *stop: str) -> tuple[list[str], Detokenizer, bool]:
    detokenizer = Detokenizer(Bytes(), stop)
    pieces = []
    for byte in text.encode():
        stopped = detokenizer.add(byte)
        pieces.append(detokenizer.take(final=stopped))
        if stopped:
            return pieces, detokenizer, True
    detokenizer.finish()
    pieces.append(detokenizer.take(final=True))
    return pieces, detokenizer, False


@pytest.mark.parametrize(
    ("text", "stop", "cut"),
    [
        ("plain text", [], "plain text"),
        ("aé€😀b", [], "aé€😀b"),  # characters of several bytes come out whole
        ("one;two;three", [";t"], "one"),
        ("abcd", ["cd", "bcd"], "a"),  # the earliest counts
        ("a;x", [";two"], "a;x"),
        ("a;tw", [";two"], "a;tw"),
    ],
)
def test_pieces_add_up_to_the_text_before_a_stop_string(
    text: str, stop: list[str], cut: str
) -> None:
    pieces, detokenizer, stopped = feed(text, *stop)
    assert "".join(pieces) == cut == detokenizer.text
    assert "\ufffd" not in cut
    assert stopped is (cut != text)


def test_a_beginning_of_a_stop_string_is_held_back_until_it_is_clear() -> None:
    assert feed("a;x", ";two")[0] == ["a", "", ";x", ""]
    assert feed("a;tw", ";two")[0][-1] == ";tw"


def test_bytes_that_are_no_text_come_out_as_replacements_at_the_end() -> None:
    detokenizer = Detokenizer(Bytes())
    detokenizer.add(0x61)
    detokenizer.add(0xE2)
    assert detokenizer.take() == "a"
    detokenizer.finish()
    assert detokenizer.take(final=True) == "\ufffd"


def test_without_a_tokenizer_there_is_no_text() -> None:
    detokenizer = Detokenizer(None, ("x",))
    assert not detokenizer.add(5)
    assert detokenizer.take(final=True) == ""
