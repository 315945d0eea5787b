"""Which rows an engine is given before a step, and how many: enough to be full, few enough not to pile up.

Owns that choice. It must not know what becomes of rows once the engine has them, nor which rows it gets.
"""

from __future__ import annotations

from collections.abc import Collection

from engine import Engine, RequestRejected
from jobs.lease_reader import Renderer
from jobs.lease_run import LeaseRun
from jobs.rows_in_flight import RowsInFlight
from pipelines.schema import FinishedRow


class Feeder:
    """Adds rows of leases to an engine, and to those ``in_flight``.

    The engine runs ``capacity`` rows at once, and takes ``max_num_batched_tokens`` prompt tokens in a step.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        in_flight: RowsInFlight,
        *,
        capacity: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._engine, self._renderer, self._in_flight = engine, renderer, in_flight
        self._capacity, self._max_num_batched_tokens = capacity, max_num_batched_tokens
        # Rows rendered together, as many again behind them: all are suspects, so no more than run at once.
        self._look_ahead = max(2, capacity // 2)
        self._prompt_lengths: list[int] = []

    def feed(self, runs: Collection[LeaseRun]) -> None:
        """Add rows until the next step is sure to be full, and not so many that prompts pile up.

        A step takes no more prompt tokens than its budget, so that many tokens are enough to wait.
        """
        few = max(2, self._capacity // 4)
        stats = self._engine.stats()
        num_waiting = stats.num_waiting
        # Requests start in the order they came, so the last ones are those that wait.
        num_tokens = sum(self._prompt_lengths[-num_waiting:]) if num_waiting else 0
        while len(self._in_flight) < self._capacity + few and (
            num_waiting < few or num_tokens < self._max_num_batched_tokens
        ):
            run = self._next_run(runs)
            if run is None or not self._may_begin(run):
                break
            # While nothing runs, nothing is held up, and a step that is not full costs more than the wait.
            is_idle = stats.num_running == 0 and not self._engine.is_group_busy
            may_wait = is_idle or run.lease.is_of_suspects
            added = self._try_add_row(run, may_wait=may_wait)
            if added is None:
                break
            num_waiting += added > 0
            num_tokens += added
        self._render_ahead(runs)
        del self._prompt_lengths[: -(self._capacity + few)]

    def _next_run(self, runs: Collection[LeaseRun]) -> LeaseRun | None:
        """Suspects first, but not as the first of all: see ``RowsInFlight.step``."""
        left = [run for run in runs if not run.is_read]
        is_first = self._in_flight.is_before_first_step
        return next((run for run in left if run.lease.is_of_suspects is not is_first), next(iter(left), None))

    def _may_begin(self, run: LeaseRun) -> bool:
        """Whether the next row of ``run`` may start: no more suspects than run at once, one solo one."""
        most = 1 if run.lease.is_solo else self._capacity
        return not run.lease.is_of_suspects or len(self._in_flight) < most

    def _try_add_row(self, run: LeaseRun, *, may_wait: bool) -> int | None:
        """Add the lease's next row; its prompt tokens, 0 when it was refused, None when it is not ready."""
        found = run.rows.try_take(self._renderer, self._look_ahead, may_wait=may_wait)
        if found is None:
            return None
        row, request = found
        run.num_read += 1
        try:
            if isinstance(request, RequestRejected):
                raise request
            self._engine.add_request(request)
        except RequestRejected as rejected:
            run.finished.append(FinishedRow(row=row, error=rejected.code, error_message=rejected.message))
            return 0
        self._in_flight.add(run, row, request)
        self._prompt_lengths.append(len(request.prompt_token_ids))
        return len(request.prompt_token_ids)

    def _render_ahead(self, runs: Collection[LeaseRun]) -> None:
        """Have the next lease's first rows ready when this one's last are taken."""
        waiting = [run for run in runs if not run.is_read and not run.lease.is_of_suspects]
        for run in waiting[:2]:
            run.rows.begin(self._renderer, self._look_ahead)
