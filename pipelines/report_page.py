"""``report.html``: one page, whole in itself, that says in the morning how the night went.

Owns what is on the page and how it looks. It must not know how the facts were gathered, nor load
anything from anywhere: no script, no font, no image.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from html import escape
from itertools import pairwise
from pathlib import Path

from pipelines.counted import counted
from pipelines.lengths import EDGES
from pipelines.manifest import OutputFolder, replace_durably
from pipelines.metrics import MetricsLine, read_metrics
from pipelines.report import JobStatus, RunRecord, read_runs, write_report
from pipelines.svg_charts import Series, bar_chart, line_chart, short_number, stacked_bar

_STYLE = """
:root{--bg:#f6f7f9;--card:#fff;--ink:#1d2430;--soft:#667085;--rule:#e4e7ec;--good:#12805c;--bad:#b42318;--warn:#b54708;
--c0:#3b6fe0;--c1:#e8833a;--c2:#2a9d8f;--c3:#c2410c;--c4:#8b5cf6;--c5:#98a2b3}
@media(prefers-color-scheme:dark){:root{--bg:#12151b;--card:#1b2029;--ink:#e6e9ef;--soft:#98a2b3;--rule:#2c3340;
--good:#4fc79a;--bad:#f97066;--warn:#fdb022;--c0:#7aa2ff;--c1:#ffab6b;--c2:#5fd3c4;--c3:#ff8a65;--c4:#b79cff;--c5:#667085}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1120px;margin:0 auto;padding:32px 20px 56px}
h1{font-size:24px;margin:0;overflow-wrap:anywhere}
h2{font-size:15px;margin:0 0 10px}
.soft{color:var(--soft)}
.head{display:flex;flex-wrap:wrap;gap:6px 14px;align-items:center;margin-bottom:4px}
.state{border-radius:99px;padding:2px 12px;font-weight:600;font-size:13px;color:#fff;background:var(--soft)}
.state.finished{background:var(--good)}
.state.stopped,.state.failed{background:var(--bad)}.state.running{background:var(--c0)}
.progress{height:10px;border-radius:5px;background:var(--rule);overflow:hidden;display:flex;
margin:18px 0 20px}
.progress i{display:block;height:100%}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(160px,1fr));gap:12px;margin-bottom:16px}
.card{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:14px 16px}
.tile b{display:block;font-size:22px;line-height:1.25;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:13px}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(440px,100%),1fr));gap:16px;margin-bottom:16px}
.key{display:flex;flex-wrap:wrap;gap:2px 16px;font-size:13px;color:var(--soft);margin:-6px 0 8px}
.key i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:6px}
svg{display:block;width:100%;height:auto}
svg text{font-size:11.5px;fill:var(--soft);font-variant-numeric:tabular-nums}
.grid{stroke:var(--rule)}.mark{stroke:var(--soft);stroke-dasharray:3 4}
.line{fill:none;stroke-width:2;stroke-linejoin:round}.area{opacity:.1;stroke:none}
table{width:100%;border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}
th{text-align:left;color:var(--soft);font-weight:500}
td,th{padding:5px 12px 5px 0;border-bottom:1px solid var(--rule);vertical-align:top;overflow-wrap:anywhere}
tr:last-child td{border-bottom:0}td.n,th.n{text-align:right}
.wide{margin-bottom:16px;overflow-x:auto}
""" + "".join(
    f".line.c{n}{{stroke:var(--c{n})}}.area.c{n},.bar.c{n}{{fill:var(--c{n})}}i.c{n}{{background:var(--c{n})}}\n"
    for n in range(6)
)


def write_reports(output_dir: str | Path, status: JobStatus) -> Path:
    """Write ``report.json`` and ``report.html`` of the job as ``status`` has it; returns the page's path."""
    folder = OutputFolder(Path(output_dir))
    write_report(folder, status)
    name = folder.path.absolute().name
    page = build_page(name, status, read_runs(folder), read_metrics(folder))
    replace_durably(folder, folder.page_file, page.encode())
    return folder.page_file


def build_page(name: str, status: JobStatus, runs: Sequence[RunRecord], lines: Sequence[MetricsLine]) -> str:
    """The page's HTML."""
    body = [
        _head(name, status, runs),
        _tiles(status),
        f'<div class="plots">{"".join([*_time_plots(lines), *_length_plots(status)])}</div>',
        _tokens(status),
        _errors(status),
        _runs(runs, status.live_runs),
        _losses(runs),
        _facts(status),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(name)}: Overnight report</title><style>{_STYLE}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _head(name: str, status: JobStatus, runs: Sequence[RunRecord]) -> str:
    last = runs[-1].outcome if runs else "running"
    words = ""
    if status.has_failed_rate:
        state, words = "failed", "finished, with too many error rows"
    elif status.is_finished:
        state = "finished"
    elif status.is_running:
        state = "running"
    elif last == "committed":
        state, words = "stopped", "a slice is done, others are left"
    else:
        state = "failed" if last == "failed" else "stopped"
    now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    shares = ((status.num_ok, "c2"), (status.num_error, "c3"), (status.num_in_flight, "c0"))
    bar = "".join(
        f'<i class="{colour}" style="width:{100 * count / max(status.num_rows, 1):.3f}%"></i>'
        for count, colour in shares
    )
    equation = (
        f"rows read {status.num_read:,} = ok {status.num_ok:,} + error {status.num_error:,} "
        f"+ in flight {status.num_in_flight:,}, of {status.num_rows:,}"
    )
    shards = f"{status.num_shards_committed:,} of {status.num_shards:,} shards committed"
    return (
        f'<div class="head"><h1>{escape(name)}</h1><span class="state {state}">{words or state}</span></div>'
        f'<div class="soft">{equation} · {shards} · as of {escape(now)}</div>'
        f'<div class="progress">{bar}</div>'
    )


def _tiles(status: JobStatus) -> str:
    tally, effort = status.tally, status.effort
    unit = "GPU" if status.has_gpus else "rank"
    wasted = effort.wasted_tokens.total / max(effort.num_tokens_computed, 1)
    tiles = [
        (f"{status.num_ok:,}", "rows answered"),
        (f"{status.num_error:,}", "error rows"),
        (short_number(tally.num_prompt_tokens), "prompt tokens"),
        (short_number(tally.num_completion_tokens), "completion tokens"),
        (f"{short_number(status.num_tokens_per_s)}/s", "tokens in and out"),
        (f"{short_number(status.num_tokens_per_s_per_rank)}/s", f"the same for each {unit}"),
        (f"{tally.cache_hit_rate:.1%}", "of prompt tokens cached"),
        (f"{wasted:.1%}", "of computed tokens wasted"),
        (str(timedelta(seconds=round(status.seconds))), f"working time, {counted(status.num_runs, 'run')}"),
        (f"{effort.rank_hours:.3g}", f"{unit}-hours"),
        (f"{effort.tail_idle_rank_s:,.1f} s", f"{unit}s idle at the end, added up"),
        (f"{status.num_rank_deaths:,}", "ranks lost"),
    ]
    if effort.cost is not None:
        tiles.append((f"{effort.cost:,.2f}", "cost at the given rate"))
    cells = (f'<div class="card tile"><b>{value}</b><span>{label}</span></div>' for value, label in tiles)
    return f'<div class="tiles">{"".join(cells)}</div>'


def _time_plots(lines: Sequence[MetricsLine]) -> list[str]:
    """What changes with time, over the working time of all runs put end to end."""
    if not lines:
        return []
    xs, marks, before = [], [], 0.0
    for last, line in pairwise([lines[0], *lines]):
        if line.run != last.run:
            before += last.seconds
            marks.append(before)
        xs.append(before + line.seconds)

    def plot(title: str, *names: tuple[str, Sequence[float], str], percent: bool = False) -> str:
        series = [Series(*name) for name in names]
        if percent:
            chart = line_chart(xs, series, marks=marks, top=1.0, format_value=lambda share: f"{share:.0%}")
        else:
            chart = line_chart(xs, series, marks=marks)
        return _plot(title, chart, [(name, colour) for name, _, colour in names])

    return [
        plot(
            "Throughput, tokens a second",
            ("prefill", [line.prefill_tokens_per_s for line in lines], "c0"),
            ("decode", [line.decode_tokens_per_s for line in lines], "c1"),
        ),
        plot("Rows done", ("answered and error", [line.num_ok + line.num_error for line in lines], "c2")),
        plot(
            "Sequences in the engines",
            ("running", [line.num_running for line in lines], "c2"),
            ("waiting", [line.num_waiting for line in lines], "c4"),
        ),
        plot("KV cache in use", ("of the blocks", [line.kv_use for line in lines], "c4"), percent=True),
        plot("Rows that wait for a rank", ("rows", [line.num_unleased for line in lines], "c0")),
        plot("Error rows", ("so far", [line.num_error for line in lines], "c3")),
    ]


def _plot(title: str, chart: str, key: Sequence[tuple[str, str]]) -> str:
    items = "".join(f'<span><i class="{colour}"></i>{escape(name)}</span>' for name, colour in key)
    return f'<section class="card"><h2>{escape(title)}</h2><div class="key">{items}</div>{chart}</section>'


def _length_plots(status: JobStatus) -> list[str]:
    tally = status.tally
    return [
        _plot(f"{title}, tokens", bar_chart(_bars(counts), colour), [(unit, colour)])
        for title, counts, unit, colour in (
            ("Prompt lengths", tally.prompt_lengths, "rows, by length from", "c0"),
            ("Completion lengths", tally.completion_lengths, "completions, by length from", "c1"),
        )
        if counts
    ]


def _bars(counts: Mapping[str, int]) -> list[tuple[str, float]]:
    """Every bucket from the first to the last that is not empty."""
    from_, to = min(map(int, counts)), max(map(int, counts))
    return [(f"{edge:,}", counts.get(str(edge), 0)) for edge in EDGES if from_ <= edge <= to]


def _tokens(status: JobStatus) -> str:
    effort, wasted = status.effort, status.effort.wasted_tokens
    pieces = [
        ("kept", max(0, effort.num_tokens_computed - wasted.total), "c2"),
        ("run again after a preemption", wasted.after_preemption, "c1"),
        ("replayed behind a cached prefix", wasted.replay, "c4"),
        ("lost with a rank", wasted.lost_with_ranks, "c3"),
        ("lost when a run ended", wasted.lost_with_runs, "c5"),
    ]
    key = "".join(
        f'<span><i class="{colour}"></i>{escape(name)}: {value:,}</span>' for name, value, colour in pieces
    )
    return (
        f'<section class="card wide"><h2>{effort.num_tokens_computed:,} tokens computed</h2>'
        f'<div class="key">{key}</div>{stacked_bar(pieces)}</section>'
    )


def _errors(status: JobStatus) -> str:
    errors = sorted(status.tally.errors.items(), key=lambda item: -item[1])
    if not errors:
        return ""
    rows = [(code, f"{count:,}", f"{count / max(status.num_rows, 1):.2%}") for code, count in errors]
    return _table("Error rows by reason", ("reason", "rows", "of all rows"), rows)


def _runs(runs: Sequence[RunRecord], live: Sequence[int]) -> str:
    # A run that could not say how it ended was killed, unless it is still at it.
    ends = ["killed" if run.outcome == "running" and run.run not in live else run.outcome for run in runs]
    rows = [
        (
            f"{run.run}",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started_at)),
            str(timedelta(seconds=round(run.seconds))),
            end,
            f"{run.num_ranks}",
            f"{run.num_reused:,}",
            f"{run.num_run:,}",
            short_number((run.num_prompt_tokens + run.num_completion_tokens) / max(run.seconds, 1e-9)),
            f"{run.num_rank_deaths}",
            short_number(0 if run.run in live else run.num_tokens_in_flight),
        )
        for run, end in zip(runs, ends, strict=True)
    ]
    names = (
        "run",
        "started",
        "worked",
        "outcome",
        "ranks",
        "rows found",
        "rows run",
        "tokens in and out/s",
        "ranks lost",
        "tokens lost at its end",
    )
    return _table("Runs", names, rows, left=(1, 3))


def _losses(runs: Sequence[RunRecord]) -> str:
    """What each rank that died cost."""
    rows = [
        (
            f"{run.run}",
            f"{loss.rank}",
            loss.node,
            str(timedelta(seconds=round(loss.at_s))),
            f"{loss.num_rows:,}",
            short_number(loss.num_tokens),
            f"{loss.rank_seconds:,.1f}",
            loss.reason,
        )
        for run in runs
        for loss in run.losses
    ]
    if not rows:
        return ""
    names = ("run", "rank", "node", "after", "rows run again", "tokens lost", "seconds without it", "reason")
    return _table("Ranks lost", names, rows, left=(2, 7))


def _facts(status: JobStatus) -> str:
    tables = [
        _table(title, ("", ""), [(name, str(value)) for name, value in facts.items()], left=(0, 1))
        for title, all_facts in (
            ("Environment", status.environments),
            ("Engine settings", status.engine_settings),
        )
        for facts in all_facts
    ]
    return f'<div class="plots">{"".join(tables)}</div>'


def _table(
    title: str, names: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)
) -> str:
    """``left``: the columns that are words; all others are numbers."""

    def cells(tag: str, values: Sequence[str]) -> str:
        kinds = ["" if at in left else ' class="n"' for at in range(len(values))]
        return "".join(
            f"<{tag}{kind}>{escape(value)}</{tag}>" for kind, value in zip(kinds, values, strict=True)
        )

    head = f"<tr>{cells('th', names)}</tr>" if any(names) else ""
    lines = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<section class="card wide"><h2>{escape(title)}</h2><table>{head}{lines}</table></section>'
