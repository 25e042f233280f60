"""Text as it comes: never changed once given out, cut before a stop string."""

from __future__ import annotations

import pytest

from engine.sampling.detokenizer import Detokenizer


class Bytes:
    """A byte-level tokenizer: token = byte; 256 and above are special, 256 is "<end>"."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        special = b"" if skip_special_tokens else b"<end>"
        return b"".join(bytes([t]) if t < 256 else special for t in token_ids).decode(
            errors="replace"
        )


class Words:
    """Each token is a word after a space. As Llama 2's, the decoder drops the first space; 0 is
    special.
    """

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(f" w{t}" for t in token_ids if t)[1:]


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


@pytest.mark.parametrize("prompt", [[5, 6, 7], [], [0], [5, *[0] * 40], list(range(1, 60))])
def test_prompt_and_text_are_what_all_tokens_decode_to(prompt: list[int]) -> None:
    detokenizer = Detokenizer(Words(), (), prompt)
    tokens, pieces = [8, 0, 9, 0, 0, 1], []
    for token in tokens:
        detokenizer.add(token)
        pieces.append(detokenizer.take())
    detokenizer.finish()
    pieces.append(detokenizer.take(final=True))
    whole = Words().decode(prompt + tokens)
    assert Words().decode(prompt) + "".join(pieces) == whole
    assert detokenizer.text == "".join(pieces)


@pytest.mark.parametrize(
    ("tokens", "stop", "pieces"),
    [
        ([*b"ab", 256], "<end>", ["a", "b", ""]),
        ([*b"ab", 256], "b<end>", ["a", "", ""]),  # "b" is held back
        ([*b"ab", 256, *b"cd"], "<end>c", ["a", "b", "", ""]),
        ([*b"a", 256, *b"b"], "ab", ["", "", ""]),  # a special token is in no text
        ([*b"a", 256, *b"b", 256], "b<end>", ["a", "", "", ""]),
        ([*b"a", 0xE2, 256], "<end>", ["a", "", "\ufffd"]),
    ],
)
def test_a_special_token_may_be_a_stop_string(
    tokens: list[int], stop: str, pieces: list[str]
) -> None:
    detokenizer, found = Detokenizer(Bytes(), (stop,)), []
    for token in tokens:
        stopped = detokenizer.add(token)
        found.append(detokenizer.take(final=stopped))
        if stopped:
            break
    assert stopped
    assert found == pieces
    assert detokenizer.text == "".join(pieces)


def test_a_special_token_that_stops_nothing_is_in_no_text() -> None:
    detokenizer = Detokenizer(Bytes(), ("x", "<end>!"))
    for token in [*b"a", 256, *b"b", 256, 256]:
        assert not detokenizer.add(token)
    detokenizer.finish()
    assert detokenizer.take(final=True) == "ab"


def test_without_a_tokenizer_there_is_no_text() -> None:
    detokenizer = Detokenizer(None, ("x",))
    assert not detokenizer.add(5)
    assert detokenizer.take(final=True) == ""


def test_a_long_run_without_text_is_decoded_in_linear_time() -> None:
    class Counting(Words):
        num_decoded = 0

        def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
            self.num_decoded += len(token_ids)
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    decoder = Counting()
    detokenizer = Detokenizer(decoder, (), [5, 6])
    for token in [7, *[0] * 2000, 8]:
        detokenizer.add(token)
    assert detokenizer.take(final=True) == " w7 w8"
    assert decoder.num_decoded < 2000 * 40
