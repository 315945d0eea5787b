"""The architecture written down a second time: float64, one prompt, one shot, token by token, no caches.

Slow and obvious on purpose, and without the cache's rounding. It shares no code with the engine or the
kernels, so that agreement of the two is evidence.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

INF = float("inf")


class SpecModel:
    """A model folder in the bf16 layout, and the logits of a prompt. ``token_classes`` maps ids to classes."""

    def __init__(self, folder: Path, token_classes: list[int]) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.c: dict[str, Any] = config["text_config"]
        weights = load_file(folder / "model.safetensors")
        self.w = {name: tensor.double() for name, tensor in weights.items()}
        self.token_classes = token_classes
        self.primes = self._primes()

    def logits(self, ids: list[int]) -> Tensor:
        """[len(ids), vocab] float64."""
        c, w = self.c, self.w
        n, k = len(ids), c["hc_mult"]
        x = w["embed.weight"][ids][:, None].repeat(1, k, 1)
        pre = torch.zeros(n, k, dtype=torch.float64)
        pre[:, 0] = 1
        self.entries: dict[int, list[Tensor]] = {}
        self.keys: dict[int, list[Tensor]] = {}
        self.selected: list[list[int]] = []
        self.kept: list[set[int]] | None = None
        for layer in range(c["num_hidden_layers"]):
            p = f"layers.{layer}."
            if layer in c["engram_layer_ids"]:
                x = self._engram(x, ids, layer)
            a_pre, a_post, a_comb = self._mix(x, p + "hc_attn")
            u = rms_norm((pre[..., None] * x).sum(1), w[p + "attn_norm.weight"], c["rms_norm_eps"])
            x = expand(self._attention(u, layer), x, a_post, a_comb)
            f_pre, f_post, f_comb = self._mix(x, p + "hc_ffn")
            u = rms_norm((a_pre[..., None] * x).sum(1), w[p + "ffn_norm.weight"], c["rms_norm_eps"])
            x = expand(torch.stack([self._moe(row, layer) for row in u]), x, f_post, f_comb)
            pre = f_pre
        h = rms_norm((pre[..., None] * x).sum(1), w["norm.weight"], c["rms_norm_eps"])
        return h @ w["head.weight"].T

    # Hyper-connections

    def _mix(self, x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        c, w = self.c, self.w
        k, eps = c["hc_mult"], c["hc_eps"]
        scale, base = w[name + "_scale"], w[name + "_base"]
        pres, posts, combs = [], [], []
        for row in x:
            v = row.flatten()
            z = w[name + "_fn"] @ (v / torch.sqrt((v * v).mean() + c["rms_norm_eps"]))
            pres.append(torch.sigmoid(z[:k] * scale[0] + base[:k]) + eps)
            posts.append(2 * torch.sigmoid(z[k : 2 * k] * scale[1] + base[k : 2 * k]))
            a = torch.softmax((z[2 * k :] * scale[2] + base[2 * k :]).reshape(k, k), dim=1) + eps
            a = a / (a.sum(0, keepdim=True) + eps)
            for _ in range(c["hc_sinkhorn_iters"] - 1):
                a = a / (a.sum(1, keepdim=True) + eps)
                a = a / (a.sum(0, keepdim=True) + eps)
            combs.append(a)
        return torch.stack(pres), torch.stack(posts), torch.stack(combs)

    # Attention

    def _attention(self, u: Tensor, layer: int) -> Tensor:
        c, w = self.c, self.w
        p = f"layers.{layer}.attn."
        ratio, heads, dim = c["compress_ratios"][layer], c["num_attention_heads"], c["head_dim"]
        n, eps = len(u), c["rms_norm_eps"]
        qr = rms_norm(u @ w[p + "wq_a.weight"].T, w[p + "q_norm.weight"], eps)
        q = (qr @ w[p + "wq_b.weight"].T).reshape(n, heads, dim)
        kv = rms_norm(u @ w[p + "wkv.weight"].T, w[p + "kv_norm.weight"], eps)
        kv = torch.stack([self._rotate(kv[t], t, ratio) for t in range(n)])
        if layer in c["kv_source_layer_ids"]:
            self._compress(u, layer)
        if layer in c["index_source_layer_ids"]:
            self.selected = self._select(u, qr, layer)
        out = []
        for t in range(n):
            own = [kv[i] for i in range(max(0, t - c["sliding_window"] + 1), t + 1)]
            if ratio:
                source = max(s for s in c["kv_source_layer_ids"] if s <= layer)
                own += [self.entries[source][j] for j in self.selected[t]]
            keys = torch.stack(own)
            rows = []
            for h in range(heads):
                scores = keys @ self._rotate(q[t, h], t, ratio) / math.sqrt(dim)
                total = torch.cat([scores, w[p + "attn_sink"][h : h + 1]])
                rows.append(self._rotate(torch.softmax(total, 0)[:-1] @ keys, -t, ratio))
            out.append(torch.cat(rows))
        width = heads * dim // c["o_groups"]
        rank = c["o_lora_rank"]
        groups = torch.stack(out).split(width, dim=1)
        wo_a = w[p + "wo_a.weight"].split(rank)
        low = torch.cat([group @ weight.T for group, weight in zip(groups, wo_a, strict=True)], dim=1)
        return low @ w[p + "wo_b.weight"].T

    def _compress(self, u: Tensor, layer: int) -> None:
        c, w = self.c, self.w
        p = f"layers.{layer}.attn."
        ratio = c["compress_ratios"][layer]
        self.entries[layer], self.keys[layer] = [], []
        for j in range(len(u) // ratio):
            group = u[j * ratio : (j + 1) * ratio]
            lat = group @ w[p + "compressor.wkv.weight"].T
            if ratio == 1:
                lat = lat[0]
            else:
                gates = group @ w[p + "compressor.wgate.weight"].T
                lat = (torch.softmax(gates, dim=0) * lat).sum(0)
            lat = rms_norm(lat, w[p + "compressor.norm.weight"], c["rms_norm_eps"])
            key = rms_norm(
                w[p + "indexer.wk.weight"] @ lat, w[p + "indexer.k_norm.weight"], c["rms_norm_eps"]
            )
            self.entries[layer].append(self._rotate(lat, j * ratio, ratio))
            self.keys[layer].append(self._rotate(key, j * ratio, ratio))

    def _select(self, u: Tensor, qr: Tensor, layer: int) -> list[list[int]]:
        c, w = self.c, self.w
        p = f"layers.{layer}.attn.indexer."
        ratio, heads, dim = c["compress_ratios"][layer], c["index_n_heads"], c["index_head_dim"]
        size, source = c["candidate_block_size"], max(s for s in c["kv_source_layer_ids"] if s <= layer)
        candidates = c.get("candidate_source_layer_id")
        is_reindex = candidates is not None and layer > candidates and source == candidates
        kept, chosen = [], []
        for t in range(len(u)):
            visible = (t + 1) // ratio
            q = (w[p + "wq_b.weight"] @ qr[t]).reshape(heads, dim)
            q = torch.stack([self._rotate(row, t, ratio) for row in q])
            a = w[p + "weights_proj.weight"] @ u[t] / math.sqrt(dim * heads)
            score = {j: float(a @ torch.relu(q @ self.keys[source][j])) for j in range(visible)}
            if layer == candidates:
                best: dict[int, float] = {}
                for j, s in score.items():
                    best[j // size] = max(best.get(j // size, -INF), s)
                if visible:
                    best[(visible - 1) // size] = INF
                kept.append(set(sorted(best, key=lambda b: (-best[b], b))[: c["candidate_topk_blocks"]]))
            if is_reindex:
                score = {j: s for j, s in score.items() if j // size in self.kept[t]}
            chosen.append(sorted(sorted(score, key=lambda j: (-score[j], j))[: c["index_topk"]]))
        if layer == candidates:
            self.kept = kept
        return chosen

    def _rotate(self, x: Tensor, position: int, ratio: int) -> Tensor:
        c = self.c
        d = c["qk_rope_head_dim"]
        out = x.clone()
        for i in range(d // 2):
            angle = position * self._frequency(i, ratio)
            at = len(x) - d + 2 * i
            out[at] = x[at] * math.cos(angle) - x[at + 1] * math.sin(angle)
            out[at + 1] = x[at] * math.sin(angle) + x[at + 1] * math.cos(angle)
        return out

    def _frequency(self, i: int, ratio: int) -> float:
        c, d = self.c, self.c["qk_rope_head_dim"]
        if ratio == 0:
            return c["rope_theta"] ** (-2 * i / d)
        theta, yarn = c["compress_rope_theta"], c["rope_scaling"]

        def turns(n: float) -> float:
            return (
                d
                * math.log(yarn["original_max_position_embeddings"] / (2 * math.pi * n))
                / (2 * math.log(theta))
            )

        low, high = (
            max(math.floor(turns(yarn["beta_fast"])), 0),
            min(math.ceil(turns(yarn["beta_slow"])), d - 1),
        )
        ramp = min(max((i - low) / (high - low), 0), 1)
        slow = theta ** (-2 * i / d)
        return slow * (1 - ramp) + slow / yarn["factor"] * ramp

    # Experts

    def _moe(self, u: Tensor, layer: int) -> Tensor:
        c, w = self.c, self.w
        p = f"layers.{layer}.ffn."
        scores = torch.sqrt(torch.log1p(torch.exp(w[p + "gate.weight"] @ u)))
        biased = (scores + w[p + "gate.bias"]).tolist()
        chosen = sorted(range(len(biased)), key=lambda e: (-biased[e], e))[: c["num_experts_per_tok"]]
        total = sum(scores[e] for e in chosen) + 1e-20
        y = self._expert(u, p + "shared_experts", 1.0)
        for e in chosen:
            y = y + self._expert(u, f"{p}experts.{e}", float(scores[e] / total * c["routed_scaling_factor"]))
        return y

    def _expert(self, u: Tensor, name: str, weight: float) -> Tensor:
        w, limit = self.w, self.c["swiglu_limit"]
        g = (w[name + ".w1.weight"] @ u).clamp(max=limit)
        v = (w[name + ".w3.weight"] @ u).clamp(-limit, limit)
        return w[name + ".w2.weight"] @ (g * torch.sigmoid(g) * v * weight)

    # Engram

    def _primes(self) -> list[list[list[int]]]:
        used: set[int] = set()
        layers = []
        for _ in self.c["engram_layer_ids"]:
            grams = []
            for _ in range(self.c["engram_max_ngram_size"] - 1):
                number, heads = self.c["engram_vocab_size"] - 1, []
                while len(heads) < self.c["engram_n_heads"]:
                    number += 1
                    if number not in used and all(number % d for d in range(2, number)):
                        heads.append(number)
                        used.add(number)
                grams.append(heads)
            layers.append(grams)
        return layers

    def _engram(self, x: Tensor, ids: list[int], layer: int) -> Tensor:
        c, w = self.c, self.w
        p = f"layers.{layer}.engram."
        hidden, k, size = c["hidden_size"], c["hc_mult"], c["engram_max_ngram_size"]
        bound = (2**63 - 1) // c["engram_compressed_vocab_size"] // 2
        multipliers = [
            int(m) * 2 + 1 for m in np.random.default_rng(10007 * layer).integers(0, bound, size=size)
        ]
        pad = self.token_classes[c["engram_pad_token_id"]]
        out = []
        for t in range(len(ids)):
            classes = [self.token_classes[ids[t - i]] if t >= i else pad for i in range(size)]
            hashed, offset, rows = classes[0] * multipliers[0], 0, []
            for i in range(1, size):
                hashed ^= classes[i] * multipliers[i]
                for prime in self.primes[c["engram_layer_ids"].index(layer)][i - 1]:
                    rows.append(hashed % prime + offset)
                    offset += prime
            kv = w[p + "wkv.weight"] @ w[p + "embed.weight"][rows].flatten()
            value, streams = kv[k * hidden :], []
            for j in range(k):
                key, s = kv[j * hidden : (j + 1) * hidden], x[t, j]
                d = (s * w[p + "q_weight"][j] * w[p + "k_weight"][j] * key).sum() / math.sqrt(hidden)
                d = (
                    d
                    / torch.sqrt((s * s).mean() + c["rms_norm_eps"])
                    / torch.sqrt((key * key).mean() + c["rms_norm_eps"])
                )
                gate = torch.sigmoid(torch.sign(d) * torch.sqrt(d.abs().clamp(min=1e-6)))
                streams.append(s + gate * value)
            out.append(torch.stack(streams))
        return torch.stack(out)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last axis."""
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def expand(y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """[n, hidden] and [n, K, hidden] -> [n, K, hidden]; the summed index is the matrix's first."""
    return post[..., None] * y[:, None] + torch.einsum("tjk,tjd->tkd", comb, x)
