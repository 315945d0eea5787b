"""Rows that a rank's engine holds, and a step of them: who is in it, noted before it in their journals.

Owns both. It must not know where rows come from, nor what a death means for them: the driver learns from
the notes who may have caused it (``pipelines.suspects``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from engine import Engine, Request, RequestOutput
from jobs.lease_run import LeaseRun
from pipelines.sink import NOT_IN_STEP


class RowInFlight(NamedTuple):
    """A row, and the request that it is to the engine."""

    run: LeaseRun
    row: int
    request: Request


class RowsInFlight:
    """Rows that were added to an engine and have no answer yet."""

    def __init__(self) -> None:
        self._rows: dict[str, RowInFlight] = {}
        self._num_steps = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def is_before_first_step(self) -> bool:
        """Whether no row is or was in any step."""
        return not (self._num_steps or self._rows)

    def add(self, run: LeaseRun, row: int, request: Request) -> None:
        """The engine has taken a row."""
        self._rows[request.request_id] = RowInFlight(run, row, request)

    def remove(self, request_id: str) -> RowInFlight:
        """The engine has answered this row."""
        return self._rows.pop(request_id)

    def step(self, engine: Engine) -> list[RequestOutput]:
        """One step; before it, which rows are in it and how far each is, for whoever finds this rank dead.

        A suspect that is as far as it was at a death is in its step alone: another death is then its doing,
        and no other row's. When none of those has room, the others go on without them. The others also make
        this rank's first step, if there are any: a rank that is broken itself shows it before one is blamed.
        """
        num_tokens = engine.num_generated_tokens()
        due = [
            request_id
            for request_id, (run, row, _) in self._rows.items()
            if num_tokens[request_id] in run.lease.tokens_at_deaths.get(row, ())
        ]
        if due:
            engine.await_device()  # what an earlier step did must not end the rank in a suspect's own
        groups: list[Collection[str]] = [{request_id} for request_id in due]
        if due and (others := self._rows.keys() - due):
            groups.insert(len(groups) if self._num_steps else 0, others)
        for group in groups:
            self._note(num_tokens, group)
            outputs = engine.try_step_only(group)
            if outputs is not None:
                break
        else:
            self._note(num_tokens, self._rows)
            outputs = engine.step()
        self._num_steps += bool(self._rows)
        return outputs

    def _note(self, num_tokens: Mapping[str, int], in_step: Collection[str]) -> None:
        of_runs: dict[LeaseRun, dict[int, int]] = {}
        for request_id, (run, row, _) in self._rows.items():
            has = num_tokens[request_id] if request_id in in_step else NOT_IN_STEP
            of_runs.setdefault(run, {})[row] = has
        for run, rows in of_runs.items():
            run.journal.note_step(self._num_steps, rows)
