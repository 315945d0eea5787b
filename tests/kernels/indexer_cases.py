"""Contract cases of the indexer's ops, shared by its test and its benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from kernels.indexer import (
    KeyPages,
    candidate_scores,
    candidate_scores_reference,
    index_scores,
    paged_index_scores_reference,
    select_entries,
    select_topk,
    select_topk_reference,
)
from kernels.number_formats import pack_fp4_index, unpack_fp4_index
from tests.kernels.contract import EXACT, ROW_COUNTS, Inputs, OpCase, Outputs, Tolerance

ENTRIES_PER_BLOCK = 32
BLOCK_SIZE = 8
HEAD_SUM = Tolerance(1e-6, 2e-6, "fp32 sum over the heads in another order; the products are exact")
FLOAT_PRODUCT = Tolerance(3e-6, 1e-5, "fp32 accumulation of 128 products in another order")

Chunks = Sequence[tuple[int, int]]
"""(visible entries of a sequence's last row, number of its rows); a row sees one entry less than the next."""
ONE: Chunks = ((140, 20),)
SHORT: Chunks = ((10, 10), (7, 7), (90, 3), (1, 1), (130, 2))
SMALL_MIXED: Chunks = (*((9 * i + 1, 1) for i in range(10)), (100, 66), (33, 2))
DECODE: Chunks = tuple((17 * i % 290 + 1, 1) for i in range(70))
MIXED: Chunks = (*DECODE, (260, 75), (33, 3), (140, 1))


def index_vectors(
    shape: tuple[int, ...], spread: int, generator: torch.Generator, dtype: torch.dtype
) -> Tensor:
    """Random vectors whose groups of 32 differ by up to ``2^spread``; packed for uint8."""
    x = torch.randn(shape, generator=generator)
    powers = torch.randint(0, spread + 1, (*shape[:-1], shape[-1] // 32), generator=generator)
    x = (x.unflatten(-1, (-1, 32)) * torch.exp2(powers - spread / 2)[..., None]).flatten(-2)
    return pack_fp4_index(x) if dtype == torch.uint8 else x.to(dtype)


def build(
    seed: int,
    device: torch.device,
    *,
    chunks: Chunks,
    heads: int,
    dim: int,
    spread: int,
    dtype: torch.dtype,
    num_listed: int = 12,
) -> Inputs:
    g = torch.Generator().manual_seed(seed)
    num_rows = sum(n for _, n in chunks)
    max_blocks = max(-(-visible // ENTRIES_PER_BLOCK) for visible, _ in chunks)
    num_slots = len(chunks) * max_blocks * ENTRIES_PER_BLOCK + 1
    tables = torch.randperm(len(chunks) * max_blocks, generator=g).view(len(chunks), max_blocks)
    num_visible = torch.cat([torch.arange(v - n + 1, v + 1).clamp_min(0) for v, n in chunks])
    num_blocks = -(-int(num_visible.max()) // BLOCK_SIZE)
    order = torch.rand((num_rows, max(num_blocks, num_listed)), generator=g).argsort(1)[:, :num_listed]
    listed = torch.where(order * BLOCK_SIZE < num_visible[:, None], order, num_blocks).sort(1).values
    inputs = {
        "q": index_vectors((num_rows, heads, dim), spread, g, dtype),
        "head_weights": torch.randn((num_rows, heads), generator=g) * (heads * dim) ** -0.5,
        "sequences": torch.arange(len(chunks)).repeat_interleave(torch.tensor([n for _, n in chunks])),
        "num_visible": num_visible,
        "blocks": torch.where(listed < num_blocks, listed, -1).to(torch.int32),
        "keys": index_vectors((num_slots, dim), spread, g, dtype),
        "block_tables": tables,
    }
    return {name: tensor.to(device) for name, tensor in inputs.items()} | {
        "max_entries": max(v for v, _ in chunks)
    }


ROW_INPUTS = ("q", "head_weights", "sequences", "num_visible", "blocks")


def pages_of(inputs: Inputs) -> KeyPages:
    return KeyPages(
        inputs["keys"],
        inputs["block_tables"],
        inputs["sequences"],
        inputs["num_visible"],
        ENTRIES_PER_BLOCK,
        inputs["max_entries"],
    )


def wide_scores(inputs: Inputs) -> Outputs:
    """float64 scores of every entry."""
    pages = pages_of(inputs)
    entries = torch.arange(pages.max_entries, device=pages.keys.device)
    slots = (
        pages.block_tables[:, entries // ENTRIES_PER_BLOCK] * ENTRIES_PER_BLOCK + entries % ENTRIES_PER_BLOCK
    )
    is_packed = pages.keys.dtype == torch.uint8
    keys = (unpack_fp4_index(pages.keys) if is_packed else pages.keys).double()
    q = (unpack_fp4_index(inputs["q"]) if is_packed else inputs["q"]).double()
    products = torch.relu(q @ keys[slots[pages.sequences]].transpose(1, 2))
    scores = (products * inputs["head_weights"].double()[..., None]).sum(1)
    return {"scores": scores.masked_fill(entries >= pages.num_visible[:, None], float("-inf"))}


def scores_case(
    name: str, chunks: Chunks, heads: int, dim: int, spread: int, dtype: torch.dtype, gpu: bool
) -> OpCase:
    return OpCase(
        name=f"index_scores-{name}",
        build=partial(build, chunks=chunks, heads=heads, dim=dim, spread=spread, dtype=dtype),
        row_inputs=ROW_INPUTS,
        outputs=lambda i, n: {"scores": torch.empty((n, i["max_entries"]), device=i["q"].device)},
        run=lambda i, out: index_scores(
            i["q"], i["head_weights"], pages_of(i), out=out["scores"][: i["q"].shape[0]]
        ),
        reference=lambda i: {"scores": paged_index_scores_reference(i["q"], i["head_weights"], pages_of(i))},
        float64=wide_scores,
        tolerances={"scores": HEAD_SUM if dtype == torch.uint8 else FLOAT_PRODUCT},
        row_counts=ROW_COUNTS if gpu else (3, 17),
        needs_gpu=gpu,
    )


def candidates_case(
    name: str, chunks: Chunks, heads: int, dim: int, spread: int, gpu: bool, num_listed: int = 12
) -> OpCase:
    dtype = torch.uint8

    def run(i: Inputs, out: Outputs) -> None:
        target = out["scores"][: i["q"].shape[0]]
        candidate_scores(
            i["q"], i["head_weights"], pages_of(i), i["blocks"], block_size=BLOCK_SIZE, out=target
        )

    def reference(i: Inputs) -> Outputs:
        arguments = (i["q"], i["head_weights"], pages_of(i), i["blocks"])
        return {"scores": candidate_scores_reference(*arguments, block_size=BLOCK_SIZE)}

    return OpCase(
        name=f"candidate_scores-{name}",
        build=partial(
            build,
            chunks=chunks,
            heads=heads,
            dim=dim,
            spread=spread,
            dtype=dtype,
            num_listed=num_listed,
        ),
        row_inputs=ROW_INPUTS,
        outputs=lambda i, n: {
            "scores": torch.empty((n, i["blocks"].shape[1] * BLOCK_SIZE), device=i["q"].device)
        },
        run=run,
        reference=reference,
        tolerances={"scores": HEAD_SUM},
        row_counts=ROW_COUNTS if gpu else (3, 17),
        needs_gpu=gpu,
    )


def build_values(
    seed: int, device: torch.device, *, num_rows: int, num_values: int, is_coarse: bool
) -> Inputs:
    """Random values, coarse ones with many ties; limits from none to all."""
    g = torch.Generator().manual_seed(seed)
    values = torch.randn((num_rows, num_values), generator=g)
    if is_coarse:
        values = (
            (values * 2).round() / 2 * torch.where(torch.rand(values.shape, generator=g) < 0.5, 1.0, -1.0)
        )
        values[torch.rand(values.shape, generator=g) < 0.3] = float("-inf")
    limits = torch.randint(0, num_values + 1, (num_rows,), generator=g)
    limits[: num_rows // 2] = num_values - torch.arange(num_rows // 2)
    return {"values": values.to(device), "limits": limits.to(device)}


def topk_case(name: str, num_values: int, k: int, *, is_coarse: bool, pins: bool, gpu: bool) -> OpCase:
    def reference(i: Inputs) -> Outputs:
        numbers = torch.arange(num_values, device=i["values"].device)
        values = i["values"]
        if pins:
            values = values.masked_fill(numbers == i["limits"][:, None] - 1, float("inf"))
        return {"numbers": select_topk_reference(values, numbers < i["limits"][:, None], k)}

    def run(i: Inputs, out: Outputs) -> None:
        target = out["numbers"][: i["values"].shape[0]]
        select_topk(i["values"], i["limits"], k=k, pins_newest=pins, out=target)

    return OpCase(
        name=f"select_topk-{name}",
        build=partial(build_values, num_rows=300 if gpu else 12, num_values=num_values, is_coarse=is_coarse),
        row_inputs=("values", "limits"),
        outputs=lambda i, n: {"numbers": torch.empty((n, k), dtype=torch.int64, device=i["values"].device)},
        run=run,
        reference=reference,
        tolerances={"numbers": EXACT},
        row_counts=ROW_COUNTS if gpu else (1, 3),
        needs_gpu=gpu,
    )


def entries_case(
    name: str,
    chunks: Chunks,
    heads: int,
    dim: int,
    spread: int,
    dtype: torch.dtype,
    k: int,
    *,
    listed: bool,
    gpu: bool,
) -> OpCase:
    """Selection equals a full sort of the op's own scores, which has its own cases."""
    num_blocks = 0 if listed else max(k // 4, 2)

    def run(i: Inputs, out: Outputs) -> None:
        n = i["q"].shape[0]
        selected = select_entries(
            i["q"], i["head_weights"], pages_of(i), k=k, block_size=BLOCK_SIZE, num_blocks=num_blocks,
            blocks=i["blocks"] if listed else None, scratch_bytes=3 << 20,
        )  # fmt: skip
        out["entries"][:n] = selected.entries
        if selected.blocks is not None:
            out["blocks"][:n] = selected.blocks

    def outputs(i: Inputs, n: int) -> Outputs:
        widths = {"entries": k} if listed else {"entries": k, "blocks": num_blocks}
        return {m: torch.empty((n, w), dtype=torch.int64, device=i["q"].device) for m, w in widths.items()}

    def reference(i: Inputs) -> Outputs:
        scores = index_scores(i["q"], i["head_weights"], pages_of(i))
        numbers = torch.arange(scores.shape[1], device=scores.device)
        exists = numbers < i["num_visible"][:, None]
        if listed:
            is_kept = (numbers[None, :, None] // BLOCK_SIZE == i["blocks"][:, None, :]).any(-1)
            return {"entries": select_topk_reference(scores, exists & is_kept, k)}
        padding = -scores.shape[1] % BLOCK_SIZE
        padded = torch.nn.functional.pad(scores, (0, padding), value=float("-inf"))
        maxima = padded.unflatten(1, (-1, BLOCK_SIZE)).amax(-1)
        blocks = torch.arange(maxima.shape[1], device=scores.device)
        newest = (i["num_visible"][:, None] - 1) // BLOCK_SIZE
        pinned = maxima.masked_fill(blocks == newest, float("inf"))
        every = torch.ones_like(pinned, dtype=torch.bool)
        return {
            "entries": select_topk_reference(scores, exists, k),
            "blocks": select_topk_reference(pinned, every, num_blocks),
        }

    return OpCase(
        name=f"select_entries-{name}",
        build=partial(build, chunks=chunks, heads=heads, dim=dim, spread=spread, dtype=dtype),
        row_inputs=ROW_INPUTS,
        outputs=outputs,
        run=run,
        reference=reference,
        tolerances={"entries": EXACT, "blocks": EXACT},
        row_counts=ROW_COUNTS if gpu else (3,),
        needs_gpu=gpu,
    )


U8, F32, BF16 = torch.uint8, torch.float32, torch.bfloat16
LONG: Chunks = ((9000, 300),)
LONG_MIXED: Chunks = ((4000, 90), *DECODE, (6001, 130), (2500, 9))

# On the CPU an interpreted kernel takes seconds a call: one packed case of each op runs there.
CASES = [
    scores_case("small-one", ONE, 16, 32, 2, U8, False),
    scores_case("small-mixed", SMALL_MIXED, 16, 32, 2, U8, True),
    scores_case("small-fp32", SHORT, 16, 32, 2, F32, False),
    candidates_case("small-spread5", SHORT, 16, 64, 5, True),
    topk_case("small-ties", 1200, 64, is_coarse=True, pins=True, gpu=False),
    entries_case("small-one", ONE, 16, 32, 2, U8, 24, listed=False, gpu=False),
    *(scores_case(f"spread{spread}", LONG_MIXED, 32, 128, spread, U8, True) for spread in (0, 2, 4, 14, 40)),
    scores_case("decode", DECODE, 32, 128, 3, U8, True),
    scores_case("bf16", LONG_MIXED, 32, 128, 2, BF16, True),
    scores_case("fp32", MIXED, 32, 128, 2, F32, True),
    *(candidates_case(f"spread{spread}", LONG_MIXED, 32, 128, spread, True) for spread in (2, 14)),
    *(candidates_case(f"relaid-spread{spread}", LONG, 32, 128, spread, True, 300) for spread in (2, 4, 14)),
    candidates_case("relaid-uneven", LONG, 32, 128, 3, True, 13),
    topk_case("ties", 20_000, 512, is_coarse=True, pins=True, gpu=True),
    topk_case("normal", 131_072, 512, is_coarse=False, pins=False, gpu=True),
    topk_case("blocks", 20_000, 2048, is_coarse=False, pins=True, gpu=True),
    entries_case("long", LONG, 32, 128, 2, U8, 512, listed=False, gpu=True),
    entries_case("deep", LONG, 32, 128, 3, U8, 64, listed=False, gpu=True),
    entries_case("mixed", LONG_MIXED, 32, 128, 14, U8, 64, listed=False, gpu=True),
    entries_case("listed", LONG_MIXED, 32, 128, 2, U8, 64, listed=True, gpu=True),
    entries_case("relaid", LONG, 32, 128, 3, U8, 64, listed=True, gpu=True),
    entries_case("bf16", LONG_MIXED, 32, 128, 2, BF16, 64, listed=False, gpu=True),
]
