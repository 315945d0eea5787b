"""The job on disk: the layout of the output folder, its plan, run numbers and the lock.

Owns every name under the output folder and the rule that a folder belongs to one plan for ever. It
must not know how rows are answered or who answers them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO

from engine.errors import ConfigError
from pipelines.lengths import add_counts
from pipelines.plan import Plan, describe_difference

STATE_FOLDER = "_overnight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Rows by outcome; tokens and preemptions of the answered ones, and the most of one row.

    ``prompt_lengths`` and ``completion_lengths`` count answered rows (completions) by ``pipelines.lengths``.
    """

    num_ok: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    most_row_preemptions: int = 0
    prompt_lengths: Mapping[str, int] = field(default_factory=dict)
    completion_lengths: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_error(self) -> int:
        """Error rows of every code."""
        return sum(self.errors.values())

    @property
    def num_rows(self) -> int:
        """All rows counted."""
        return self.num_ok + self.num_error

    @property
    def cache_hit_rate(self) -> float:
        """The share of prompt tokens that came from the prefix cache."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            num_ok=self.num_ok + other.num_ok,
            errors=add_counts(self.errors, other.errors),
            num_prompt_tokens=self.num_prompt_tokens + other.num_prompt_tokens,
            num_completion_tokens=self.num_completion_tokens + other.num_completion_tokens,
            num_cached_tokens=self.num_cached_tokens + other.num_cached_tokens,
            num_preemptions=self.num_preemptions + other.num_preemptions,
            most_row_preemptions=max(self.most_row_preemptions, other.most_row_preemptions),
            prompt_lengths=add_counts(self.prompt_lengths, other.prompt_lengths),
            completion_lengths=add_counts(self.completion_lengths, other.completion_lengths),
        )


@dataclass(frozen=True, slots=True)
class OutputFolder:
    """Every path of one output folder. Parts lie in ``path``, everything else in ``state``."""

    path: Path
    state_name: str = STATE_FOLDER

    @property
    def state(self) -> Path:
        return self.path / self.state_name

    @property
    def plan_file(self) -> Path:
        return self.state / "plan.json"

    @property
    def job_file(self) -> Path:
        """The job as its last run was told it, for what works on its rows later."""
        return self.state / "job.json"

    @property
    def report_file(self) -> Path:
        return self.state / "report.json"

    @property
    def page_file(self) -> Path:
        """The report as a page to look at."""
        return self.state / "report.html"

    @property
    def lock_file(self) -> Path:
        return self.state / "driver.lock"

    @property
    def runs(self) -> Path:
        return self.state / "runs"

    @property
    def metrics(self) -> Path:
        return self.state / "metrics"

    @property
    def deaths(self) -> Path:
        """Which rows were in flight on ranks that died, a file a run."""
        return self.state / "deaths"

    @property
    def journals(self) -> Path:
        return self.state / "journals"

    @property
    def temporary(self) -> Path:
        return self.state / "tmp"

    def shard_journals(self, shard_index: int) -> Path:
        """The folder of one shard's journals."""
        return self.journals / f"{shard_index:05d}"

    def journal_file(self, shard_index: int, run: int, lease_id: int) -> Path:
        """The journal of one lease attempt; a run's number and a lease's in it never come again."""
        return self.shard_journals(shard_index) / f"{run:06d}-{lease_id:06d}.journal"

    def run_file(self, run: int) -> Path:
        """What one run of the driver says about itself."""
        return self.runs / f"{run:06d}.json"

    def metrics_file(self, run: int) -> Path:
        """What one run measured, a line an interval."""
        return self.metrics / f"{run:06d}.jsonl"

    def commit_file(self, shard_index: int) -> Path:
        """The commit record of a shard whose part cannot hold it."""
        return self.state / "commits" / f"{shard_index:05d}.json"

    def part_file(self, name: str) -> Path:
        """A part of that name, which may come from a file on disk: one that leads elsewhere is refused."""
        if not is_inside(name):
            raise ConfigError(f"the name {name!r} leads out of the output folder {str(self.path)!r}")
        return self.path / name

    def temporary_file(self, name: str) -> Path:
        """A file that has no final name yet; the same rule."""
        if not is_inside(name) or "/" in name:
            raise ConfigError(f"the name {name!r} leads out of the folder {str(self.temporary)!r}")
        return self.temporary / name


def is_inside(name: str) -> bool:
    """Whether a relative name stays below the folder that it is relative to."""
    pieces = name.split("/")
    return "\0" not in name and not {"", ".", ".."} & set(pieces)


def load_plan(folder: OutputFolder) -> Plan:
    """The plan of an output folder; ``ConfigError`` when it has none."""
    try:
        text = folder.plan_file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{str(folder.path)!r} is not the output folder of a job") from error
    return Plan.from_json(text)


def check_folder(folder: OutputFolder, plan: Plan, *, may_differ: bool = False) -> str | None:
    """Refuse a folder that holds another job, or files that a plain read would mix with ours.

    With ``may_differ`` another job is not refused: what differs is returned, None if it is this one.
    """
    for above in (folder.path, *folder.path.parents):
        if above.exists() and not above.is_dir():
            key = "output.path" if plan.parts.url is None else "output.state_dir"
            raise ConfigError(f"{key} {str(folder.path)!r} cannot be a folder: {str(above)!r} is a file")
    # Looked at before the plan: what drivers of other shards publish meanwhile has its plan by then.
    visible = sorted(_visible_files(folder))
    held = load_plan(folder) if folder.plan_file.is_file() else None
    difference = None if held is None else describe_difference(held, plan)
    if difference is not None and not may_differ:
        raise ConfigError(
            f"output folder {str(folder.path)!r} holds another job: {difference} (run --discard-changed "
            "deletes that job's parts and begins anew)"
        )
    known = set(held.output_names()) if held is not None and held.parts.url is None else set()
    for path in visible:
        if path not in known:
            raise ConfigError(f"output folder {str(folder.path)!r} holds {path!r}, which is not this job's")
    return difference


def _visible_files(folder: OutputFolder) -> Iterator[str]:
    """What a plain read of the folder would find, below it too."""
    for parent, folders, files in os.walk(folder.path):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        for name in files:
            if not name.startswith((".", "_")):
                yield (Path(parent) / name).relative_to(folder.path).as_posix()


def write_plan(folder: OutputFolder, plan: Plan) -> None:
    """Write the plan if the folder has none; of two writers one wins, and the other must agree with it."""
    temporary = folder.temporary / f"plan-{os.getpid()}-{time.time_ns()}.json"
    try:
        for needed in (
            *(folder.runs, folder.journals, folder.deaths, folder.temporary),
            folder.commit_file(0).parent,
        ):
            needed.mkdir(parents=True, exist_ok=True)
        write_durably(temporary, plan.to_json().encode())
        is_first = try_link(temporary, folder.plan_file)
    except FileNotFoundError as error:  # the driver at work cleans up what it did not write itself
        raise occupied(folder) from error
    if not is_first:
        check_folder(folder, plan)


def occupied(folder: OutputFolder) -> ConfigError:
    """The refusal of a folder that another run works on."""
    return ConfigError(f"another run is at work on {str(folder.path)!r}; wait for it or stop it")


def write_durably(path: Path, content: bytes) -> None:
    """Write a file and see it to the disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(folder: OutputFolder, path: Path, content: bytes) -> None:
    """Replace a file at once: a reader sees the old content or the new."""
    temporary = folder.temporary / f"{path.name}-{os.getpid()}-{time.time_ns()}"
    write_durably(temporary, content)
    os.replace(temporary, path)


def try_link(temporary: Path, final: Path) -> bool:
    """Give a finished file its final name unless somebody was first; the temporary name goes either way."""
    try:
        os.link(temporary, final)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(final.parent)
    return True


def sync_folder(path: Path) -> None:
    """See a folder's new names to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def claim_run(folder: OutputFolder) -> int:
    """A run number that nobody had or will have: the first whose file can be created."""
    run = max((int(path.stem) for path in folder.runs.glob("*.json")), default=0) + 1
    while True:
        try:
            os.close(os.open(folder.run_file(run), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            run += 1
        else:
            return run


class DriverLock:
    """Held by the driver at work on shards of a folder, all of them or a range (``None``: all).

    Drivers of ranges that do not meet may work side by side. It is a lock on bytes of one file, one byte a
    shard, which the system frees when the process ends, however it does.
    """

    def __init__(self, folder: OutputFolder, shards: range | None = None) -> None:
        self._folder = folder
        self._shards = shards
        self._file: IO[bytes] | None = None

    def __enter__(self) -> DriverLock:
        path = self._folder.lock_file
        try:
            self._file = open(path, "ab")
        except FileNotFoundError as error:
            raise occupied(self._folder) from error
        # A driver whose job was refused takes its folder away, and the lock that we waited for with it.
        if not _try_lock(self._file, self._shards) or not _is_at(self._file, path):
            self._file.close()
            raise occupied(self._folder)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._file is not None
        self._file.close()


def is_driver_alive(folder: OutputFolder, shards: range | None = None) -> bool:
    """Whether a driver holds the folder now, or some of ``shards``."""
    try:
        with open(folder.lock_file, "rb") as file:
            asked = _lock_request(fcntl.F_RDLCK, shards)
            found = fcntl.fcntl(file, fcntl.F_OFD_GETLK, asked)
    except FileNotFoundError:
        return False
    return bool(struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK)


_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length (0: to the end of all bytes), pid


def _lock_request(kind: int, shards: range | None) -> bytes:
    start, length = (0, 0) if shards is None else (shards.start, len(shards))
    return struct.pack(_FLOCK, kind, os.SEEK_SET, start, length, 0)


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _try_lock(file: IO[bytes], shards: range | None) -> bool:
    if shards is not None and not shards:
        return True
    for _ in range(10):
        try:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, _lock_request(fcntl.F_WRLCK, shards))
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            # A driver that was killed this moment still has to end.
            time.sleep(0.05)
        else:
            return True
    return False
