"""Text as it comes: never changed once given out, cut before a stop string."""

from __future__ import annotations

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


def test_pieces_add_up_to_the_text() -> None:
    pieces, detokenizer, _ = feed("plain text")
    assert "".join(pieces) == "plain text" == detokenizer.text


def test_a_character_of_several_bytes_comes_out_whole() -> None:
    pieces, _, _ = feed("aé€😀b")
    assert "".join(pieces) == "aé€😀b"
    assert "\ufffd" not in "".join(pieces)


def test_bytes_that_are_no_text_come_out_as_replacements_at_the_end() -> None:
    detokenizer = Detokenizer(Bytes())
    detokenizer.add(0x61)
    detokenizer.add(0xE2)
    assert detokenizer.take() == "a"
    detokenizer.finish()
    assert detokenizer.take(final=True) == "\ufffd"


def test_the_text_is_cut_before_a_stop_string() -> None:
    pieces, detokenizer, stopped = feed("one;two;three", ";t")
    assert stopped
    assert "".join(pieces) == "one" == detokenizer.text


def test_a_beginning_of_a_stop_string_is_held_back_until_it_is_clear() -> None:
    pieces, _, stopped = feed("a;x", ";two")
    assert not stopped
    assert pieces == ["a", "", ";x", ""]


def test_a_held_back_tail_comes_out_at_the_end() -> None:
    pieces, detokenizer, _ = feed("a;tw", ";two")
    assert pieces[-1] == ";tw"
    assert detokenizer.text == "a;tw"


def test_the_earliest_of_several_stop_strings_counts() -> None:
    _, detokenizer, stopped = feed("abcd", "cd", "bcd")
    assert stopped
    assert detokenizer.text == "a"


def test_without_a_tokenizer_there_is_no_text() -> None:
    detokenizer = Detokenizer(None, ("x",))
    assert not detokenizer.add(5)
    assert detokenizer.take(final=True) == ""
