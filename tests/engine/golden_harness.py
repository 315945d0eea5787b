"""Runs the model as the engine's runner does, with every row's trace kept, and compares it with golden files.

It drives the forward pass through hand-made batches, so that a test chooses the chunks and the neighbours;
it knows no scheduler, no sampler and no queue.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from engine.api import Request
from engine.batch import BatchInputs
from engine.engram_tables import EngramTables
from engine.kv_cache import CacheLayout, KVCache
from engine.layer_rows import DecoderPrefill, ModelShape
from engine.layers.linear import ActivationFormat
from engine.layers.ngrams import NgramTables, build_ngram_tables
from engine.layers.ops import KernelImpl, Ops, build_ops
from engine.loader import WeightReader
from engine.models.deepseek_v41 import DeepseekV41Model
from engine.models.deepseek_v41_config import DeepseekV41Config, load_model_config
from engine.scheduled_batch import ScheduledBatch, ScheduledChunk
from engine.sequence import Sequence
from kernels.number_formats import ActivationMode

ROOT = Path(__file__).resolve().parents[2]
MODEL_FOLDERS = {
    "tiny": ROOT / "tests" / "data" / "tiny",
    "tiny-quant": ROOT / "tests" / "data" / "tiny-quant",
    "bard": ROOT / "examples" / "bard" / "model",
}
CHUNKS = (7, 1, 16, 3, 5, 30)
NUM_BLOCKS = 24
CPU = torch.device("cpu")


# Ops whose results are sums in an order that an implementation chooses.
SUMS = ("linear", "fp8_linear", "grouped_linear", "fp32_linear", "paged_sparse_attention", "combine_experts")


def with_rounding_noise(ops: Ops, seed: int | None, device: torch.device = CPU) -> Ops:
    """``ops`` whose sums are moved by about a last bit, so that what sits at the edge of a rounding step may fall
    to its other side. A change of the model's input would not do: the first rounding takes it away.
    """
    if seed is None:
        return ops
    # A GPU's exponentials and divisions are a few last bits away from a CPU's to begin with.
    relative = 1e-7 if device.type == "cpu" else 5e-7

    def moved(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: object, **options: object) -> Tensor:
            y = op(*args, **options)
            noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed))
            return y * (1 + relative * noise.to(y.device))

        return call

    return dataclasses.replace(ops, **{name: moved(getattr(ops, name)) for name in SUMS})


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with what its batches need."""

    config: DeepseekV41Config
    shape: ModelShape
    tables: NgramTables | None
    model: DeepseekV41Model
    dtype: torch.dtype
    device: torch.device


def load_model(
    folder: Path,
    *,
    activations: ActivationMode = "none",
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    kernel_impl: KernelImpl = "torch",
    noise_seed: int | None = None,
) -> LoadedModel:
    """Load a model folder; with ``noise_seed`` its sums end about a last bit away from where they would."""
    torch.set_num_threads(1)
    config = load_model_config(folder)
    tables, engram = None, None
    if config.engram_layer_ids:
        tables = build_ngram_tables(config, Tokenizer.from_file(str(folder / "tokenizer.json")))
    ops = with_rounding_noise(build_ops(kernel_impl), noise_seed, device)
    reader = WeightReader(folder, dtype=dtype, device=device, keeps_quantised=ops.reads_quantised)
    if tables is not None:
        engram = EngramTables(reader, config, tables, ops)
    model = DeepseekV41Model(reader, config, engram, activations=ActivationFormat(activations, ops), ops=ops)
    shape = ModelShape(
        num_layers=config.num_hidden_layers, window=config.sliding_window, decoder_start=config.decoder_start
    )
    return LoadedModel(config, shape, tables, model, dtype, device)


@dataclass(slots=True)
class PromptRun:
    """One prompt on its way: which chunks are left, and what its rows gave."""

    prompt: list[int]
    chunks: SequenceOf[int] | None = None
    """Chunk lengths, cycled; None is one shot."""
    starts_at_step: int = 0
    sequence: Sequence | None = None
    traces: dict[str, list[Tensor]] = field(default_factory=dict)
    last_logits: Tensor | None = None

    def rows(self, name: str) -> Tensor:
        """All rows of a traced value, in token order."""
        return torch.cat(self.traces[name])

    def next_length(self, num_done: int) -> int:
        """Rows of the next chunk; a full run of the cycle starts over."""
        left = len(self.prompt) - num_done
        if self.chunks is None:
            return left
        position = 0
        index = 0
        while position < num_done:
            position += self.chunks[index % len(self.chunks)]
            index += 1
        return min(self.chunks[index % len(self.chunks)], left)


def new_cache(loaded: LoadedModel, *, is_quantised: bool, num_states: int) -> KVCache:
    """A device cache whose every byte is junk, so that a row nobody wrote shows."""
    cache = KVCache(
        CacheLayout(loaded.config, is_quantised, loaded.dtype),
        num_blocks=NUM_BLOCKS,
        num_states=num_states,
        num_host_blocks=0,
        num_host_states=0,
        device=loaded.device,
    )
    pools = cache._memory["device"]
    for pool in (
        *pools.entries.values(),
        *pools.index_keys.values(),
        *pools.windows,
        *pools.open_groups.values(),
    ):
        pool.fill_(0x7F if pool.dtype == torch.uint8 else float("nan"))
    return cache


def run_prompts(
    loaded: LoadedModel,
    runs: SequenceOf[PromptRun],
    *,
    is_quantised: bool,
    mode: DecoderPrefill = "full",
    is_traced: bool = True,
) -> SequenceOf[PromptRun]:
    """Run all prompts, those that have a chunk left sharing each step's batch.

    Block tables are disjoint and out of order. ``is_traced`` keeps every row and needs ``mode`` "full".
    """
    cache = _start(loaded, runs, is_quantised=is_quantised)
    step = 0
    with torch.inference_mode():
        while any(run.sequence.num_uncomputed_tokens for run in runs):
            _run_step(loaded, [run for run in runs if run.starts_at_step <= step], cache, mode, is_traced)
            step += 1
    return runs


def run_after_reference(
    reference: LoadedModel, loaded: LoadedModel, prompt: list[int], *, is_quantised: bool
) -> PromptRun:
    """One row a step, each after the cache that ``reference`` left: what ``loaded`` makes of a row.

    A value that falls to the other side of a rounding step changes its row alone here, not all rows after it.
    """
    models = (reference, loaded)
    runs = [PromptRun(prompt, (1,)) for _ in models]
    caches = [
        _start(model, [run], is_quantised=is_quantised) for model, run in zip(models, runs, strict=True)
    ]
    sources, targets = (
        [*memory.block_views(), *memory.state_views()]
        for memory in (cache._memory["device"] for cache in caches)
    )
    with torch.inference_mode():
        for _ in prompt:
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)
            for model, run, cache in zip(models, runs, caches, strict=True):
                _run_step(model, [run], cache, "full", is_traced=True)
    return runs[1]


def _start(loaded: LoadedModel, runs: SequenceOf[PromptRun], *, is_quantised: bool) -> KVCache:
    """Sequences for all runs, their blocks out of order, and the cache that they share."""
    cache = new_cache(loaded, is_quantised=is_quantised, num_states=len(runs) + 1)
    free = list(range(1, NUM_BLOCKS))
    for index, run in enumerate(runs):
        run.sequence = Sequence.build(
            Request(request_id=f"p{index}", prompt_token_ids=run.prompt),
            sample_index=0,
            seq_id=index,
            max_model_len=4096,
        )
        run.sequence.state_slot = index + 1
        num_blocks = -(-len(run.prompt) // 64)
        blocks = (free.pop((7 * index + 5) % len(free)) for _ in range(num_blocks))
        run.sequence.block_table = array("q", blocks)
    return cache


def _run_step(
    loaded: LoadedModel, runs: SequenceOf[PromptRun], cache: KVCache, mode: DecoderPrefill, is_traced: bool
) -> None:
    active = [run for run in runs if run.sequence.num_uncomputed_tokens]
    chunks = []
    for run in active:
        done = run.sequence.num_computed_tokens
        length = run.next_length(done)
        chunks.append(
            ScheduledChunk(
                seq=run.sequence,
                start=done,
                num_tokens=length,
                tail_end=len(run.prompt),
                cached_until=0,
                mode=mode,
                samples=done + length == len(run.prompt),
            )
        )
    if not chunks:
        return
    lengths = [chunk.num_tokens for chunk in chunks]

    def trace(name: str, rows: Tensor) -> None:
        for run, part in zip(active, rows[: sum(lengths)].split(lengths), strict=True):
            run.traces.setdefault(name, []).append(part.cpu())

    batch = BatchInputs(
        ScheduledBatch(chunks=chunks), loaded.shape, loaded.tables, loaded.device, num_states=cache.num_states
    )
    logits = loaded.model.forward(batch, cache, trace if is_traced else None)
    sampled = [run for run, chunk in zip(active, chunks, strict=True) if chunk.samples]
    for run, row in zip(sampled, logits, strict=True):
        run.last_logits = row.cpu()
    for run, chunk in zip(active, chunks, strict=True):
        run.sequence.num_computed_tokens = chunk.end
        if is_traced:
            last = loaded.config.num_hidden_layers - 1
            streams, pre = run.traces[f"streams.layer{last}"][-1], run.traces[f"pre_mix.layer{last}"][-1]
            logits = loaded.model.logits(streams.to(loaded.device), pre.to(loaded.device))
            run.traces.setdefault("logits", []).append(logits.cpu())


@dataclass(frozen=True, slots=True)
class Golden:
    """One golden file."""

    name: str
    tensors: dict[str, Tensor]

    @property
    def prompt(self) -> list[int]:
        """The prompt's ids."""
        return self.tensors["input_ids"].tolist()

    @property
    def logit_rows(self) -> Tensor:
        """Which rows ``logits`` holds."""
        return self.tensors.get("logit_rows", torch.arange(len(self.prompt)))


def load_goldens(model: str, mode: str) -> list[Golden]:
    """All golden files of a model in a mode, short prompts first."""
    folder = ROOT / "tests" / "data" / model / "golden"
    files = sorted(folder.glob(f"*.{mode}.safetensors"))
    return [Golden(f"{model}-{file.name.split('.')[0]}", load_file(file)) for file in files]


def logit_errors(run: PromptRun, golden: Golden) -> Tensor:
    """Largest absolute error of each golden row's logits."""
    return (run.rows("logits")[golden.logit_rows] - golden.tensors["logits"]).abs().amax(-1)


def mean_error(run: PromptRun, golden: Golden) -> float:
    """Mean absolute error over all golden logits."""
    return (run.rows("logits")[golden.logit_rows] - golden.tensors["logits"]).abs().mean().item()


def top1_agreement(run: PromptRun, golden: Golden) -> float:
    """Share of golden rows whose best token agrees."""
    best = run.rows("logits")[golden.logit_rows].argmax(-1)
    return (best == golden.tensors["logits"].argmax(-1)).float().mean().item()


def wrong_rows(run: PromptRun, golden: Golden, loaded: LoadedModel) -> dict[str, int]:
    """For each discrete choice in the file, how many rows differ; only those with any."""
    counts = {}
    for name, expected in golden.tensors.items():
        kind, _, layer = name.partition(".")
        if kind == "topk":
            differs = run.rows(name) != expected
        elif kind == "route_ids":
            differs = run.rows(name).sort(-1).values != expected.long().sort(-1).values
        elif kind == "candidates":
            differs = (
                _candidate_mask(run.rows(f"blocks.{layer}"), loaded.config, len(golden.prompt))
                != expected.bool()
            )
        elif kind == "hash_ids":
            layers = [run.rows(f"hash_ids.layer{engram}") for engram in loaded.config.engram_layer_ids]
            differs = (torch.stack(layers, dim=1) != expected).flatten(1)
        else:
            continue
        if (count := int(differs.any(-1).sum())) > 0:
            counts[name] = count
    return counts


def value_errors(run: PromptRun, golden: Golden) -> dict[str, float]:
    """Largest error of each traced value in the file; route weights are compared expert by expert."""
    errors = {}
    for name, expected in golden.tensors.items():
        kind, _, layer = name.partition(".")
        if kind in ("streams", "pre_mix", "attn_out"):
            errors[name] = (run.rows(name) - expected).abs().max().item()
        elif kind == "route_weights":
            order = run.rows(f"route_ids.{layer}").argsort(-1)
            expected_order = golden.tensors[f"route_ids.{layer}"].long().argsort(-1)
            weights = run.rows(name).gather(1, order)
            errors[name] = (weights - expected.gather(1, expected_order)).abs().max().item()
    return errors


def _candidate_mask(blocks: Tensor, config: DeepseekV41Config, num_entries: int) -> Tensor:
    """Kept blocks [n, k] -> [n, num_entries] bool: whole blocks, as the golden mask holds them."""
    num_blocks = -(-num_entries // config.candidate_block_size)
    kept = torch.zeros(blocks.shape[0], num_blocks + 1, dtype=torch.bool)
    kept.scatter_(1, torch.where(blocks >= 0, blocks, num_blocks), True)
    return kept[:, :num_blocks].repeat_interleave(config.candidate_block_size, 1)[:, :num_entries]
