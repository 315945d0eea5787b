"""Engram's host-side tables: token classes, primes, row offsets and multipliers; the model page's section 8.

All of it follows from the tokenizer and the config; nothing is learned, nothing is read from a file
of its own. On numpy: tables once per engine, the classes of a step's tokens before it runs.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from engine.errors import ConfigError
from engine.models.deepseek_v41_config import DeepseekV41Config

_BLANKS = re.compile(r"[ \t\r\n]+")
# A private-use character stands in for a lone space while the text is stripped.
_LONE_SPACE = "\ue000"


@dataclass(frozen=True, slots=True)
class NgramTables:
    """What hashing needs. ``token_classes`` [vocab]; the rest per engram layer, in config order."""

    token_classes: np.ndarray  # [vocab] int64
    pad_class: int
    multipliers: np.ndarray  # [num_engram_layers, N] int64
    primes: np.ndarray  # [num_engram_layers, N - 1, num_heads] int64
    offsets: np.ndarray  # [num_engram_layers, N - 1, num_heads] int64


def build_ngram_tables(config: DeepseekV41Config, tokenizer: Tokenizer) -> NgramTables:
    """Derive the tables. Raises ``ConfigError`` where they do not fit the config's own counts."""
    classes = token_classes(tokenizer)
    num_classes = int(classes.max()) + 1
    if num_classes != config.engram_compressed_vocab_size:
        raise ConfigError(
            f"the tokenizer has {num_classes} token classes, engram_compressed_vocab_size is "
            f"{config.engram_compressed_vocab_size}"
        )
    primes, offsets, sums = bucket_primes(config)
    if sums != config.engram_num_embeddings:
        raise ConfigError(
            f"engram tables need {sums} rows, engram_num_embeddings is {config.engram_num_embeddings}"
        )
    size = config.engram_max_ngram_size
    bound = (2**63 - 1) // config.engram_compressed_vocab_size // 2
    multipliers = [
        np.random.default_rng(10007 * layer).integers(0, bound, size=size, dtype=np.int64) * 2 + 1
        for layer in config.engram_layer_ids
    ]
    padded = np.zeros(config.vocab_size, dtype=np.int64)
    padded[: len(classes)] = classes[: config.vocab_size]
    return NgramTables(
        padded, int(classes[config.engram_pad_token_id]), np.stack(multipliers), primes, offsets
    )


def ngram_classes(tables: NgramTables, token_ids: Sequence[int], first: int, end: int) -> np.ndarray:
    """[end - first, N] int64 classes of the last N tokens of positions first..end, newest first.

    Pad where a look-back crosses the start of ``token_ids``.
    """
    size = tables.multipliers.shape[1]
    classes = np.full((max(0, end - first), size), tables.pad_class, dtype=np.int64)
    history = max(0, first - size + 1)
    known = tables.token_classes[np.asarray(token_ids[history:end], dtype=np.int64)]
    for back in range(size):
        low = max(first, back)
        if low < end:
            classes[low - first :, back] = known[low - back - history : end - back - history]
    return classes


def packed_ngram_classes(
    tables: NgramTables, spans: Sequence[tuple[Sequence[int], int, int]], num_rows: int
) -> np.ndarray:
    """[num_rows, N]: ``ngram_classes`` of spans (token ids, first, end), one behind the other; then pad."""
    classes = np.full((num_rows, tables.multipliers.shape[1]), tables.pad_class, dtype=np.int64)
    begin = 0
    for span in spans:
        found = ngram_classes(tables, *span)
        classes[begin : begin + len(found)] = found
        begin += len(found)
    return classes


def token_classes(tokenizer: Tokenizer) -> np.ndarray:
    """Class of every token id: ids whose normalised texts agree share one, numbered by first appearance."""
    first_seen: dict[str, int] = {}
    classes = np.empty(tokenizer.get_vocab_size(with_added_tokens=True), dtype=np.int64)
    for token_id in range(len(classes)):
        key = _class_key(tokenizer, token_id)
        classes[token_id] = first_seen.setdefault(key, len(first_seen))
    return classes


def _class_key(tokenizer: Tokenizer, token_id: int) -> str:
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    if "\ufffd" in text:
        return tokenizer.id_to_token(token_id) or text
    folded = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    folded = "".join(c for c in folded if unicodedata.category(c) != "Mn").lower()
    folded = _BLANKS.sub(" ", folded)
    folded = _LONE_SPACE if folded == " " else folded
    return folded.strip().replace(_LONE_SPACE, " ") or text


def bucket_primes(config: DeepseekV41Config) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Primes and row offsets, both [num_engram_layers, N - 1, num_heads], and each table's rows."""
    used: set[int] = set()
    all_primes, all_offsets, sums = [], [], []
    for _ in config.engram_layer_ids:
        layer_primes = []
        for _ in range(config.engram_max_ngram_size - 1):
            previous = config.engram_vocab_size - 1
            heads = []
            for _ in range(config.engram_n_heads):
                previous = _next_unused_prime(previous, used)
                used.add(previous)
                heads.append(previous)
            layer_primes.append(heads)
        primes = np.array(layer_primes, dtype=np.int64)
        ends = np.cumsum(primes.flatten())
        all_primes.append(primes)
        all_offsets.append((ends - primes.flatten()).reshape(primes.shape))
        sums.append(int(ends[-1]))
    return np.array(all_primes), np.array(all_offsets), tuple(sums)


def _next_unused_prime(after: int, used: set[int]) -> int:
    candidate = after + 1
    while candidate in used or not _is_prime(candidate):
        candidate += 1
    return candidate


def _is_prime(n: int) -> bool:
    if n < 2:
        return False
    return all(n % divisor for divisor in range(2, int(n**0.5) + 1))
