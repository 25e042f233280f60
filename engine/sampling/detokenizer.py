"""Decodes tokens to text as they come.

Text that was emitted never changes: an incomplete character (byte-level tokens of one UTF-8
character) and a tail that may become a stop string are held back.

    decoded text   [0 ........ emitted | held back ....... )
"""

from __future__ import annotations

from typing import Protocol

REPLACEMENT = "\ufffd"
# A UTF-8 character has at most 4 bytes: after so many tokens, replacement characters are text.
MAX_HELD_TOKENS = 8


class Decoder(Protocol):
    """The method of a tokenizer that is needed to decode."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str:
        """Return the text of ``token_ids``."""
        ...


class Detokenizer:
    """Decodes one continuation, up to a stop string. Without a ``decoder`` texts are empty."""

    def __init__(self, decoder: Decoder | None, stop: tuple[str, ...] = ()) -> None:
        self._decoder = decoder
        self._stop = stop
        self._tokens: list[int] = []
        self._prefix = 0  # tokens from here on give context to the next
        self._read = 0  # tokens before this are in the text
        self._text = ""
        self._num_emitted = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """All text so far, cut before a stop string if there is one."""
        return self._text

    def add(self, token_id: int) -> bool:
        """Add a token. Returns True if the text now holds a stop string: the text is cut before
        that, and no token may follow.
        """
        if self._decoder is None:
            return False
        self._tokens.append(token_id)
        before = self._decode(self._prefix, self._read)
        now = self._decode(self._prefix, len(self._tokens))
        num_held = len(self._tokens) - self._read
        if len(now) <= len(before) or (now.endswith(REPLACEMENT) and num_held < MAX_HELD_TOKENS):
            return False
        return self._extend(now[len(before) :])

    def finish(self) -> None:
        """Release the text that is held back, as no token follows."""
        if self._decoder is None or self.stopped:
            return
        before = self._decode(self._prefix, self._read)
        now = self._decode(self._prefix, len(self._tokens))
        if len(now) > len(before):
            self._extend(now[len(before) :])

    def take(self, *, final: bool = False) -> str:
        """Return the text that became final since the last call; all of it when ``final``."""
        end = len(self._text) if final or self.stopped else len(self._text) - self._num_suspect()
        new = self._text[self._num_emitted : end]
        self._num_emitted = max(self._num_emitted, end)
        return new

    def _decode(self, first: int, last: int) -> str:
        if self._decoder is None or first == last:
            return ""
        return self._decoder.decode(self._tokens[first:last], skip_special_tokens=True)

    def _extend(self, new: str) -> bool:
        start = len(self._text)
        self._text += new
        self._prefix, self._read = self._read, len(self._tokens)
        hits = [
            at for s in self._stop if (at := self._text.find(s, max(0, start - len(s) + 1))) >= 0
        ]
        if hits:
            self._text = self._text[: min(hits)]
            self.stopped = True
        return self.stopped

    def _num_suspect(self) -> int:
        """Return the length of the longest tail that a stop string may begin with."""
        lengths = (
            size for s in self._stop for size in range(1, len(s)) if self._text.endswith(s[:size])
        )
        return max(lengths, default=0)
