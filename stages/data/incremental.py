"""The text of an answer while its tokens come."""

from __future__ import annotations

from stages.data.templates import Codec

UNFINISHED = "\ufffd"
"""Stands for the bytes of a character whose other bytes are in tokens to come."""


class IncrementalText:
    """Hands out text as soon as it can no longer change; the pieces make up the decoded answer.

    All tokens are decoded each time: what a token says can depend on the one before it.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.ids: list[int] = []
        self.told = ""

    def add(self, token: int) -> str:
        """What is certain with one token more; nothing within a character of several tokens."""
        self.ids.append(token)
        return self._fresh(self.codec.decode(self.ids).rstrip(UNFINISHED))

    def rest(self) -> str:
        """What was held back, when no token follows."""
        return self._fresh(self.codec.decode(self.ids))

    def _fresh(self, text: str) -> str:
        if not text.startswith(self.told):
            return ""  # shorter again: what ended the text so far is an unfinished character
        fresh, self.told = text[len(self.told) :], text
        return fresh
