"""Logits to tokens: penalties, filters, the draw, and log-probabilities, each row by itself.

A row's token and the bits of its log-probability depend on that row's logits, parameters and
identity alone. So nothing here reduces over [rows, vocab] with a library kernel whose order may
follow the number of rows: sums are fixed trees or doubling scans of elementwise additions, the
vocabulary is padded to whole vectors (a scalar tail rounds exp and log differently), and the
last few operations of a row are done on the host. It knows nothing of sequences or batches.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.api import SamplingParams, TokenLogprobs
from engine.errors import EngineDead
from kernels.tree_sum import tree_sum

TILE_ROWS = 64
"""Rows worked on at once: bounds the scratch memory, whatever the batch."""

VECTOR = 64
"""The vocabulary is padded to a multiple of this, so that no element falls into a scalar tail."""

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """Who a row of logits belongs to. ``position``: the index the sampled token will have in its sequence.

    ``token_ids`` are the sequence's tokens so far, read for the repetition penalty only; None: none.
    """

    params: SamplingParams
    request_id: str
    sample_index: int
    position: int
    token_ids: SequenceOf[int] | None = None


class SampledTokens(NamedTuple):
    """One entry a row, in the rows' order; log-probabilities are fp32 values, from the raw logits."""

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[TokenLogprobs | None]


def is_greedy(params: SamplingParams) -> bool:
    """Temperature 0 and ``top_k`` 1 are the same request: the most likely token, lowest id on ties."""
    return params.temperature == 0 or params.top_k == 1


class Sampler:
    """Samples with randomness keyed by (seed, request, sample, position, token id), not by order of calls."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1, got {vocab_size}")
        self.vocab_size = vocab_size
        self.seed = seed
        self._padded_size = -(-vocab_size // VECTOR) * VECTOR
        self._counters: dict[torch.device, Tensor] = {}

    def sample(self, logits: Tensor, rows: SequenceOf[SamplingRow]) -> SampledTokens:
        """Sample one token for every row.

        Args:
            logits: [num_rows, vocab_size] float32, the model's raw output; not modified.
            rows: one entry for each row of ``logits``.

        Raises:
            EngineDead: a row's largest logit is NaN or infinite; nothing sampled from it would be true.
        """
        if logits.shape != (len(rows), self.vocab_size) or logits.dtype != torch.float32:
            raise ValueError(
                f"logits must be float32 [{len(rows)}, {self.vocab_size}], "
                f"got {logits.dtype} {list(logits.shape)}"
            )
        result = SampledTokens([], [], [])
        for start in range(0, len(rows), TILE_ROWS):
            tile = self._sample_tile(logits[start : start + TILE_ROWS], rows[start : start + TILE_ROWS])
            for column, values in zip(result, tile, strict=True):
                column.extend(values)  # type: ignore[attr-defined]
        return result

    def _sample_tile(self, logits: Tensor, rows: SequenceOf[SamplingRow]) -> SampledTokens:
        raw = self._padded(logits)  # [n, padded]
        scores = _penalised(raw, rows)
        token_ids = scores.argmax(dim=-1)  # the first of equal maxima
        drawn = [i for i, row in enumerate(rows) if not is_greedy(row.params)]
        if drawn:
            index = torch.tensor(drawn, device=raw.device)
            token_ids[index] = self._draw(scores[index], [rows[i] for i in drawn])

        largest = raw.amax(dim=-1, keepdim=True)
        total = tree_sum(torch.exp(raw - largest))
        chosen = raw.gather(1, token_ids[:, None])[:, 0]
        columns = torch.stack([token_ids.double(), chosen.double(), largest[:, 0].double(), total.double()])
        ids, chosens, maxima, totals = columns.tolist()  # the one wait for the device
        for row, value in zip(rows, maxima, strict=True):
            if not math.isfinite(value):
                raise EngineDead(f"the logits of {row.request_id} at position {row.position} are not finite")
        log_totals = [math.log(value) for value in totals]
        logprobs = [_fp32(c - m - t) for c, m, t in zip(chosens, maxima, log_totals, strict=True)]
        normalisers = list(zip(maxima, log_totals, strict=True))
        return SampledTokens([int(i) for i in ids], logprobs, _top_logprobs(raw, rows, normalisers))

    def _padded(self, logits: Tensor) -> Tensor:
        if self._padded_size == self.vocab_size:
            return logits.contiguous()
        raw = logits.new_full((logits.shape[0], self._padded_size), -math.inf)
        raw[:, : self.vocab_size] = logits
        return raw

    def _draw(self, scores: Tensor, rows: SequenceOf[SamplingRow]) -> Tensor:
        """Gumbel-max over what the filters leave: [m, padded] -> [m] ids."""
        temperature = _column([row.params.temperature for row in rows], scores)
        scaled = scores.double() / temperature
        noise = self._gumbel([self._key(row) for row in rows], scores.device)
        return (scaled + noise).masked_fill(~_kept(scores, temperature, rows), -math.inf).argmax(dim=-1)

    def _key(self, row: SamplingRow) -> int:
        """64 bits (signed) that name this draw and no other."""
        seed = self.seed if row.params.seed is None else row.params.seed
        identity = struct.pack("<qqq", seed, row.sample_index, row.position)
        identity += row.request_id.encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little", signed=True)

    def _gumbel(self, keys: list[int], device: torch.device) -> Tensor:
        """[m, padded] float64 Gumbel noise: splitmix64's stream of each key, one number a token id."""
        counters = self._counters.get(device)
        if counters is None:
            steps = np.arange(1, self._padded_size + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
            counters = self._counters[device] = torch.from_numpy(steps.view(np.int64)).to(device)
        bits = torch.tensor(keys, dtype=torch.int64, device=device)[:, None] + counters
        bits = (bits ^ _shift_right(bits, 30)) * _signed(_MIX_1)
        bits = (bits ^ _shift_right(bits, 27)) * _signed(_MIX_2)
        bits = bits ^ _shift_right(bits, 31)
        uniform = (_shift_right(bits, 11).double() + 0.5) * 2.0**-53  # in (0, 1), both ends open
        return -torch.log(-torch.log(uniform))


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift: torch's is arithmetic on int64."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _fp32(value: float) -> float:
    return float(np.float32(value))


def _column(values: SequenceOf[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def _penalised(raw: Tensor, rows: SequenceOf[SamplingRow]) -> Tensor:
    """Divide the positive logits of seen tokens by the row's penalty, multiply the negative ones."""
    seen_rows: list[int] = []
    seen_ids: list[int] = []
    penalties: list[float] = []
    for i, row in enumerate(rows):
        if row.params.repetition_penalty != 1.0 and row.token_ids:
            ids = set(row.token_ids)
            seen_rows += [i] * len(ids)
            seen_ids += ids
            penalties += [row.params.repetition_penalty] * len(ids)
    if not seen_rows:
        return raw
    where = (torch.tensor(seen_rows, device=raw.device), torch.tensor(seen_ids, device=raw.device))
    penalty = torch.tensor(penalties, dtype=torch.float32, device=raw.device)
    scores = raw.clone()
    values = scores[where]
    scores[where] = torch.where(values < 0, values * penalty, values / penalty)
    return scores


def _kept(scores: Tensor, temperature: Tensor, rows: SequenceOf[SamplingRow]) -> Tensor:
    """[m, padded] bool: the tokens that top_k, top_p and min_p leave, in that order."""
    kept = torch.ones_like(scores, dtype=torch.bool)
    cut = [i for i, row in enumerate(rows) if row.params.top_k > 0 or row.params.top_p < 1.0]
    if cut:
        index = torch.tensor(cut, device=scores.device)
        kept[index] = _kept_by_rank(scores[index], temperature[index], [rows[i].params for i in cut])
    if any(row.params.min_p > 0 for row in rows):
        # p >= min_p * p_max, which no other filter changes, as a difference of logits.
        floors = [math.log(row.params.min_p) if row.params.min_p > 0 else -math.inf for row in rows]
        below_best = (scores.double() - scores.amax(dim=-1, keepdim=True).double()) / temperature
        kept &= below_best >= _column(floors, scores)
    return kept


def _kept_by_rank(scores: Tensor, temperature: Tensor, params: SequenceOf[SamplingParams]) -> Tensor:
    """top_k keeps exactly k (ties by lowest id); top_p the fewest of those whose share reaches p."""
    values, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    size = scores.shape[-1]
    num_kept = torch.tensor([p.top_k or size for p in params], device=scores.device)[:, None]
    kept = torch.arange(size, device=scores.device) < num_kept
    if any(p.top_p < 1.0 for p in params):
        values = values.double()
        weights = torch.exp((values - values[:, :1]) / temperature).masked_fill(~kept, 0.0)
        upto = _prefix_sum(weights)
        before = torch.nn.functional.pad(upto[:, :-1], (1, 0))
        # Infinity for rows without top_p: their smallest tokens must not fall to rounding.
        shares = _column([p.top_p if p.top_p < 1.0 else math.inf for p in params], scores)
        kept = kept & (before < shares * upto[:, -1:])
    return torch.zeros_like(kept).scatter_(1, order, kept)


def _prefix_sum(x: Tensor) -> Tensor:
    """Inclusive sums along the last axis by doubling: elementwise additions, so the order is fixed."""
    offset = 1
    while offset < x.shape[-1]:
        x = torch.cat([x[:, :offset], x[:, offset:] + x[:, :-offset]], dim=-1)
        offset *= 2
    return x


def _top_logprobs(
    raw: Tensor, rows: SequenceOf[SamplingRow], normalisers: SequenceOf[tuple[float, float]]
) -> list[TokenLogprobs | None]:
    """The most likely tokens of the rows that asked, best first, ties by lowest id."""
    result: list[TokenLogprobs | None] = [None] * len(rows)
    asked = [(i, row.params.logprobs) for i, row in enumerate(rows) if row.params.logprobs is not None]
    if not asked:
        return result
    most = max(count for _, count in asked)
    index = torch.tensor([i for i, _ in asked], device=raw.device)
    values, order = torch.sort(raw[index], dim=-1, descending=True, stable=True)
    top_values, top_ids = values[:, :most].tolist(), order[:, :most].tolist()
    for (i, count), row_values, row_ids in zip(asked, top_values, top_ids, strict=True):
        largest, log_total = normalisers[i]
        logprobs = tuple(_fp32(value - largest - log_total) for value in row_values[:count])
        result[i] = TokenLogprobs(token_ids=tuple(row_ids[:count]), logprobs=logprobs)
    return result
