"""Token ids to text, one id at a time, never splitting a character and ending before a stop string.

Byte-level BPE makes this exact: every token is a run of bytes, and text is the UTF-8 decoding of the
runs joined. So the work for one token depends on its own bytes alone. It knows nothing of sequences,
limits or end tokens.
"""

from __future__ import annotations

import codecs

from tokenizers import Tokenizer, decoders, pre_tokenizers

from engine.errors import ConfigError


class TokenBytes:
    """The bytes each token stands for; none for special tokens and for ids the tokenizer lacks."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not isinstance(tokenizer.decoder, decoders.ByteLevel):
            raise ConfigError(
                f"the tokenizer must be byte-level BPE, but its decoder is {type(tokenizer.decoder).__name__}"
            )
        self._tokenizer = tokenizer
        self._byte_of = _byte_of_letter()
        added = tokenizer.get_added_tokens_decoder()
        self._known = {token_id: b"" for token_id, token in added.items() if token.special}

    def __getitem__(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._look_up(token_id)
        return known

    def _look_up(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        letters = [self._byte_of.get(letter) for letter in token]
        as_bytes = [byte for byte in letters if byte is not None]
        # An added token is written in plain text, not in the byte alphabet.
        return bytes(as_bytes) if len(as_bytes) == len(letters) else token.encode()


class IncrementalDetokenizer:
    """One completion's text as it grows.

    Text is given out once nothing that follows can change it: an unfinished character is held back,
    and so is an ending that may be the start of a stop string.
    """

    def __init__(self, token_bytes: TokenBytes, stop: tuple[str, ...] = ()) -> None:
        self._token_bytes = token_bytes
        self._stop = stop
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._shown: list[str] = []
        self._held = ""
        self._is_stopped = False

    @property
    def text(self) -> str:
        """What has been given out so far; after ``finish`` or a stop string, the completion's text."""
        return "".join(self._shown)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has been reached; nothing may be pushed after it."""
        return self._is_stopped

    def push(self, token_id: int) -> str:
        """Take one more token; return the text that it makes final."""
        if self._is_stopped:
            raise ValueError("the completion ended at a stop string: no token can follow")
        return self._take(self._decoder.decode(self._token_bytes[token_id]))

    def finish(self) -> str:
        """The completion ends here: return what was held back (an unfinished character as U+FFFD)."""
        if self._is_stopped:
            return ""
        shown = self._take(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        self._shown.append(rest)
        return shown + rest

    def _take(self, new_text: str) -> str:
        text = self._held + new_text
        # Only held text can belong to a match, so no match starts earlier than `text` does.
        starts = [start for start in map(text.find, self._stop) if start >= 0]
        if starts:
            self._is_stopped = True
            cut, self._held = min(starts), ""
        else:
            cut = len(text) - self._num_held(text)
            self._held = text[cut:]
        self._shown.append(text[:cut])
        return text[:cut]

    def _num_held(self, text: str) -> int:
        """Length of the longest ending of ``text`` that begins a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0


def _byte_of_letter() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 letters stand for themselves, the others follow 0xFF."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    letters = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    assert set(letters) == set(pre_tokenizers.ByteLevel.alphabet())
    return letters
