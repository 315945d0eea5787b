"""Small jobs for tests: their inputs, their plans, ranks without Ray, and what must come out."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from engine import Engine, EngineConfig, EngineDead, Request, RequestRejected, SamplingParams
from jobs.lease_reader import Renderer
from jobs.worker import RankWorker, Serving
from pipelines.driver import Driver
from pipelines.manifest import OutputFolder, check_folder, claim_run, write_plan
from pipelines.plan import PartOptions, Plan, build_plan
from pipelines.rank_protocol import Orders, RankDied, RankReport
from pipelines.schema import build_contract
from pipelines.source import find_input
from tests.fake_engine import FakeEngine, expected_text


def write_prompts(path: Path, prompts: list[list[int] | None], **columns: Any) -> None:
    """One input file of token prompts and pass-through columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = {"prompt_token_ids": pa.array(prompts, pa.list_(pa.int32())), **columns}
    pq.write_table(pa.table(table), path)


def error_codes(output: pa.Table) -> dict[str, str]:
    """The error of each error row, by row id."""
    return {row["row_id"]: row["error"] for row in output.to_pylist() if row["status"] == "error"}


def random_prompts(random_: random.Random, count: int) -> list[list[int] | None]:
    """Prompts of a few harmless ids; no two need differ."""
    return [[random_.randrange(1, 100) for _ in range(random_.randrange(1, 6))] for _ in range(count)]


def make_plan(
    input_path: Path | str,
    rows_per_shard: int = 10,
    num_samples: int = 1,
    *,
    contract: dict[str, Any] | None = None,
    parts: PartOptions | None = None,
    **settings: Any,
) -> Plan:
    """A plan without a JobConfig. ``contract`` are further options of ``build_contract``."""
    found = find_input(str(input_path))
    columns = build_contract(
        [(file.path, schema) for file, schema in zip(found.files, found.schemas, strict=True)],
        prefix="",
        num_samples=num_samples,
        has_logprobs=False,
        is_requests=found.kind == "openai_batch",
        **(contract or {}),
    )
    return build_plan(
        found, columns, rows_per_shard=rows_per_shard, settings=settings, parts=parts or PartOptions()
    )


class InlineExecutor(Executor):
    """Does work where it is handed over, so that a test has one thread and one order of things."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class TokenRenderer:
    """Rows of token ids to requests; null and empty rows are refused."""

    def __init__(self, sampling: SamplingParams | None = None) -> None:
        self._sampling = sampling if sampling is not None else SamplingParams()

    def render(self, row: Any, row_id: str) -> Request:
        ids = row["prompt_token_ids"]
        if ids is None:
            raise RequestRejected("null_prompt", "null")
        if not ids:
            raise RequestRejected("empty_prompt", "empty")
        return Request(request_id=row_id, prompt_token_ids=ids, sampling=self._sampling)


EngineMaker = Callable[[int], Engine]
"""Makes the engine of the n-th rank started."""


class InProcessFleet:
    """Real rank workers without processes: each wait gives every live rank a few turns.

    ``chance`` (0..1) is how probably a rank dies in a turn, its files left as they are.
    """

    def __init__(
        self,
        folder: OutputFolder,
        plan: Plan,
        run: int,
        num_slots: int,
        *,
        capacity: int = 4,
        ranks_per_replica: int = 1,
        make_engine: EngineMaker | None = None,
        renderer: Renderer | None = None,
        random_: random.Random | None = None,
        chance: float = 0.0,
    ) -> None:
        self.num_slots, self.ranks_per_replica = num_slots, ranks_per_replica
        self.workers: dict[int, RankWorker] = {}
        self.num_started = 0
        self.num_deaths = 0
        self._folder, self._plan, self._run = folder, plan, run
        self._capacity = capacity
        config = EngineConfig(model="fake", max_num_seqs=capacity)
        self._make_engine = make_engine if make_engine is not None else lambda n: FakeEngine(config)
        self._renderer = renderer if renderer is not None else TokenRenderer()
        self._random = random_ if random_ is not None else random.Random(0)
        self._chance = chance
        self._asked: dict[int, Orders] = {}

    def has_place(self, slot: int) -> bool:
        return True

    def start(self, slot: int) -> None:
        number = self.num_started
        self.num_started += 1

        def build() -> Serving:
            return Serving(
                engine=self._make_engine(number),
                renderer=self._renderer,
                capacity=self._capacity,
                max_num_batched_tokens=64,
            )

        inline = InlineExecutor()
        self.workers[slot] = RankWorker(
            self._folder, self._plan, self._run, build, publisher=inline, syncer=inline, renderer=inline
        )
        self.exchange(slot, Orders())

    def exchange(self, slot: int, orders: Orders) -> None:
        assert slot not in self._asked
        self._asked[slot] = orders

    def wait(self, timeout_s: float) -> list[tuple[int, RankReport | RankDied]]:
        events: list[tuple[int, RankReport | RankDied]] = []
        asked, self._asked = self._asked, {}
        for slot, orders in asked.items():
            events.append((slot, self._exchange(slot, orders)))
        self._random.shuffle(events)
        return events

    def _exchange(self, slot: int, orders: Orders) -> RankReport | RankDied:
        worker = self.workers[slot]
        try:
            for _ in range(self._random.randrange(1, 4)):
                if self._random.random() < self._chance:
                    self.num_deaths += 1
                    return RankDied("killed by the test")
                worker.turn()
            return worker.exchange(orders, 0.0)
        except EngineDead as error:
            return RankDied(str(error))

    def kill(self, slot: int) -> None:
        self.workers.pop(slot, None)
        self._asked.pop(slot, None)


def start_run(
    folder: OutputFolder,
    plan: Plan,
    num_slots: int = 2,
    max_errors: int | None = None,
    max_error_rate: float = 1.0,
    **fleet: Any,
) -> tuple[Driver, InProcessFleet]:
    """What a new driver process does before its loop."""
    check_folder(folder, plan)
    write_plan(folder, plan)
    run = claim_run(folder)
    ranks = InProcessFleet(folder, plan, run, num_slots, **fleet)
    driver = Driver(folder, plan, ranks, run=run, max_errors=max_errors, max_error_rate=max_error_rate)
    return driver, ranks


def read_output(path: Path) -> pa.Table:
    """A plain read of the output folder."""
    files = sorted(path.glob("*.parquet"))
    return pa.concat_tables([pq.read_table(file) for file in files])


def check_answers(output: pa.Table, prompts: list[list[int] | None]) -> None:
    """Every row once, in input order, with its own answer."""
    assert output.column("prompt_token_ids").to_pylist() == prompts
    assert len(set(output.column("row_id").to_pylist())) == len(prompts)
    for row in output.to_pylist():
        if row["status"] == "ok":
            assert row["completion"] == expected_text(row["prompt_token_ids"]), row
            assert (row["error"], row["error_message"]) == (None, None)
        else:
            assert row["completion"] is None, row
            assert row["error"], row
