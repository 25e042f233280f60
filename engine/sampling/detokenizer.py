"""Decodes tokens to text as they come.

Text that was emitted never changes: an incomplete character (byte-level tokens of one UTF-8
character) and a tail that may become a stop string are held back. Prompt and text together are what
all tokens decode to, so the space between them is kept. A special token is in no text, but it may
be a stop string.

    decoded text   [0 ........ emitted | held back ....... )
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

REPLACEMENT = "\ufffd"
# A UTF-8 character has at most 4 bytes: after so many tokens, replacement characters are text.
MAX_HELD_TOKENS = 8
_MIN_CONTEXT_TOKENS: Final = 8  # of the prompt, decoded before the first token


class Decoder(Protocol):
    """The method of a tokenizer that is needed to decode."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str:
        """Return the text of ``token_ids``."""


class Detokenizer:
    """Decodes one continuation of ``prompt``, token ids, up to a stop string. Without a ``decoder``
    texts are empty.
    """

    def __init__(
        self, decoder: Decoder | None, stop: tuple[str, ...] = (), prompt: Sequence[int] = ()
    ) -> None:
        self._decoder = decoder
        self._stop = stop
        self._prompt = prompt
        self._tokens: list[int] = []
        self._prefix = 0  # tokens from here on give context to the next
        self._read = 0  # tokens before this are in the text
        self._text = ""
        self._marked = ""  # the text with the names of special tokens that stop strings have
        self._places: list[int] = []  # of each character of ``_marked`` in the text
        self._num_emitted = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """Return all text so far, cut before a stop string if there is one."""
        return self._text

    def add(self, token_id: int) -> bool:
        """Add a token. Returns True if the text now holds a stop string: the text is cut before
        that, and no token may follow.
        """
        if self._decoder is None:
            return False
        if not self._tokens:
            self._tokens = self._context()
            self._read = len(self._tokens)
        self._tokens.append(token_id)
        before = self._decode(self._prefix, self._read)
        now = self._decode(self._prefix, len(self._tokens))
        num_held = len(self._tokens) - self._read
        has_text = len(now) > len(before)
        if not has_text and num_held >= MAX_HELD_TOKENS:
            del self._tokens[self._read :]  # or a long run of them would be decoded again and again
        if not has_text or (now.endswith(REPLACEMENT) and num_held < MAX_HELD_TOKENS):
            return bool(self._stop) and self._add_special(token_id)
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
        return self._decoded(self._tokens[first:last])

    def _decoded(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        if self._decoder is None or not token_ids:
            return ""
        return self._decoder.decode(list(token_ids), skip_special_tokens=not special)

    def _context(self) -> list[int]:
        """Return the prompt's last tokens, so many that they have text, if the prompt has any."""
        num = _MIN_CONTEXT_TOKENS
        while num < len(self._prompt) and not self._decoded(self._prompt[-num:]):
            num *= 2
        return list(self._prompt[-num:])

    def _add_special(self, token_id: int) -> bool:
        """Add the name of a special token, if a stop string may have it."""
        name = "" if self._decoded([token_id]) else self._decoded([token_id], special=True)
        if not name or not any(name in s or s in name for s in self._stop):
            return False
        self.finish()  # no token completes a character from before it
        return self.stopped or self._extend("", name)

    def _extend(self, new: str, name: str = "") -> bool:
        """Add text, or the name of a special token. Returns whether a stop string was found."""
        start, marked_start = len(self._text), len(self._marked)
        self._text += new
        if new:
            self._prefix, self._read = self._read, len(self._tokens)
        hits = [at for s in self._stop if (at := _find(self._text, s, start)) >= 0]
        if self._stop:
            self._marked += new + name
            self._places += [*range(start, len(self._text)), *[len(self._text)] * len(name)]
            marked = (_find(self._marked, s, marked_start) for s in self._stop)
            hits += [self._places[at] for at in marked if at >= 0]
        if hits:
            self._text = self._text[: min(hits)]
            self.stopped = True
        return self.stopped

    def _num_suspect(self) -> int:
        """Return the length of the longest tail that a stop string may begin with."""
        starts = [s[:size] for s in self._stop for size in range(1, len(s))]
        lengths = [len(start) for start in starts if self._text.endswith(start)]
        lengths += [
            len(self._text) - self._places[-len(start)]
            for start in starts
            if self._marked.endswith(start)
        ]
        return max(lengths, default=0)


def _find(text: str, stop: str, start: int) -> int:
    """Return where ``stop`` is in ``text`` if it ends after ``start``, else -1."""
    return text.find(stop, max(0, start - len(stop) + 1))
