"""One layer's rows to the ranks of their experts and back, without a model: what travelling adds to experts.

Ranks are processes on a GPU each of this machine. Bits are checked before anything is timed.
``--path all_to_all`` takes NCCL instead of the ranks' own memory, for comparison.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.command_line import need_gpus, positive
from benchmarks.environment import describe, device_name
from benchmarks.model_dims import DIMS
from benchmarks.rank_processes import on_ranks
from engine.config import ReplicaPlace
from engine.parallel import ExpertExchange, ExpertGroup
from engine.peer_memory import ExchangeSize
from kernels.moe import (
    ExpertWeight,
    PreparedMxfp4,
    Routes,
    expert_mlp,
    expert_mlp_at_homes,
    fastest_experts,
)
from kernels.number_formats import quantise_activations
from tests.kernels.moe_cases import random_mxfp4

WAIT_S = 120.0


def part_of(weight: ExpertWeight, experts: range) -> ExpertWeight:
    """Some of prepared experts."""
    assert isinstance(weight, PreparedMxfp4), "this GPU has no kernels for prepared experts"
    fields = [field[experts.start : experts.stop] for field in weight[:4]]
    return PreparedMxfp4(*fields, weight.has_wide, weight.is_gated)


def mean_ms(call: Callable[[], object], num_calls: int) -> float:
    """Milliseconds of a call on the device, launches included where they are slower."""
    for _ in range(3):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(num_calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / num_calls


def measure(args: argparse.Namespace, place: ReplicaPlace) -> dict[str, float]:
    """One rank's figures, all ranks at once."""
    torch.cuda.set_device(place.rank)
    device = torch.device(f"cuda:{place.rank}")
    text = DIMS["flash"].text
    hidden, intermediate, top_k, num_experts = (
        text[name]
        for name in ("hidden_size", "moe_intermediate_size", "num_experts_per_tok", "n_routed_experts")
    )
    group = ExpertGroup(place, num_experts=num_experts, num_layers=1)
    size = ExchangeSize(num_rows=args.rows, hidden=hidden, top_k=top_k, dtype=torch.bfloat16, mode="row")
    group.connect(device, "", size if args.path == "peer_memory" else None)
    if group.path != args.path:
        raise SystemExit("these ranks cannot reach each other's memory")
    g = torch.Generator(device).manual_seed(place.rank)
    rows = quantise_activations(
        torch.randn(args.rows, hidden, generator=g, device=device).to(torch.bfloat16), mode="row"
    )
    ids = torch.rand(args.rows, num_experts, generator=g, device=device).topk(top_k).indices
    routes = Routes(ids, torch.rand(args.rows, top_k, generator=g, device=device))
    group.agree([args.rows], has_work=True)
    exchange = ExpertExchange(group, 0)

    # The same on all ranks: each knows what all would answer.
    weights = torch.Generator(device).manual_seed(0)
    w13, w2 = fastest_experts(
        random_mxfp4(weights, (num_experts, 2 * intermediate, hidden)),
        random_mxfp4(weights, (num_experts, hidden, intermediate)),
        torch.bfloat16,
    )
    own = [part_of(weight, group.own_experts) for weight in (w13, w2)]
    options = {"limit": 10.0, "mode": "row", "dtype": torch.bfloat16}

    def keep() -> Tensor:
        """Experts whose outputs stay here."""
        return expert_mlp(arrived, here, *own, **options)

    def finish() -> Tensor:
        """Experts whose outputs go home."""
        if exchange.homes is None:
            return exchange.combine(keep(), routes)
        expert_mlp_at_homes(arrived, here, *own, exchange.homes, **options)
        return exchange.collect(args.rows)

    arrived, here = exchange.dispatch(rows, routes)
    if not torch.equal(finish(), expert_mlp(rows, routes, w13, w2, **options)):
        raise SystemExit("what came back is not what one rank with all experts computes")
    figures = {
        "dispatch_ms": mean_ms(lambda: exchange.dispatch(rows, routes), args.repeats),
        "experts_ms": mean_ms(keep, args.repeats),
        "experts_and_return_ms": mean_ms(finish, args.repeats),
    }
    figures["return_exposed_ms"] = figures["experts_and_return_ms"] - figures["experts_ms"]
    homes = torch.arange(group.size * args.rows, device=device) // args.rows
    is_away = homes != place.rank
    num_slots = int((here.expert_ids[is_away] >= 0).sum())
    num_rows = sum(
        int((ids // group.num_own == other).any(1).sum())
        for other in range(group.size)
        if other != place.rank
    )
    figures["dispatch_mb"] = num_rows * (hidden + 12 * top_k + 1) / 1e6
    figures["return_mb"] = num_slots * hidden * 2 / 1e6
    torch.cuda.synchronize()
    group.agree([0], has_work=False)  # nobody leaves while another one still writes
    group.disconnect()
    return figures


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer_rows", description=__doc__)
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--rows", type=positive, default=4096, help="of each rank (4096)")
    parser.add_argument("--repeats", type=positive, default=50)
    parser.add_argument("--path", choices=["peer_memory", "all_to_all"], default="peer_memory")
    args = parser.parse_args(arguments)
    num_experts = DIMS["flash"].text["n_routed_experts"]
    if args.ranks < 2 or num_experts % args.ranks:
        parser.error(f"--ranks is {args.ranks}: expected 2 or more that divide {num_experts} experts")
    need_gpus(parser, args.ranks, f"--ranks {args.ranks}")
    print(describe(), flush=True)
    figures = on_ranks(args.ranks, measure, args, timeout_s=WAIT_S)
    for name, value in figures.items():
        print(f"{name:22} {value:10.3f}")
    print(
        json.dumps(
            {"suite": "peer_rows", "device": device_name(), "workload": vars(args), "figures": figures}
        )
    )


if __name__ == "__main__":
    main()
