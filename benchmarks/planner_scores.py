"""HOW RIGHT is the planner?  Published rows priced by it, table by table, beside a planner that knows nothing.

    python -m benchmarks.planner_scores rows.csv [more.csv ...] [--rows TABLE]

Files have the columns of the published tables (model, cluster, layout, what was measured; docs/planner.md names them).
The one that knows nothing answers, for every row of a table, the mean share of the peak (memory: the mean bytes) of the
table's other rows.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import mean

from benchmarks.planner_rows import (
    Asked,
    Row,
    asked,
    counted_flops,
    fitting_run,
    number,
    read_rows,
    shape_of,
    throughput,
    whole,
)
from lightning_3d.pipeline.schedule import placement, schedule_lists
from lightning_3d.pipeline.timing import simulate
from lightning_3d.planner import formulas
from lightning_3d.planner.cluster import Cluster, read_internode
from lightning_3d.planner.collectives import SENT, Group, Links
from lightning_3d.planner.hardware import GB, GIB, gpus
from lightning_3d.planner.memory import Memory, memory
from lightning_3d.planner.playing import Window, durations, play
from lightning_3d.planner.step_time import Run, message_seconds, step_time, window_seconds


@dataclass
class Score:
    """One table's errors, as shares, with what they are of."""

    rows: list[tuple[str, float, float]] = field(default_factory=list)
    null: list[float] = field(default_factory=list)

    def add(self, name: str, measured: float, predicted: float) -> None:
        self.rows.append((name, measured, predicted))

    @property
    def errors(self) -> list[float]:
        return [abs(predicted / measured - 1) for _, measured, predicted in self.rows]

    def line(self, name: str) -> str:
        errors = self.errors
        null = f"{100 * mean(self.null):.1f}" if len(self.null) > 1 else "-"
        return f"| {name} | {len(errors)} | {100 * mean(errors):.1f} | {100 * max(errors):.1f} | {null} |"


HEAD = "| table | rows | mean error % | worst % | knows nothing, mean % |\n|---|---:|---:|---:|---:|"


def main(arguments: list[str] | None = None) -> int:
    """Print all scores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("files", nargs="+", help="CSV files of published rows")
    parser.add_argument("--rows", default="", help="also print the rows of this table")
    args = parser.parse_args(arguments)
    rows = [row for file in args.files for row in read_rows(file)]
    for title, score in (
        ("throughput (tokens per second)", speeds(rows)),
        ("memory, closed forms", closed_memory(rows)),
        ("memory, measured", measured_memory(rows)),
        ("collectives from 64 MiB on (bus bandwidth)", collectives(rows, 64 * 2**20, None)),
        ("collectives below 64 MiB", collectives(rows, 0, 64 * 2**20)),
    ):
        print(f"\n## {title}\n\n{HEAD}")
        for name, one in score.items():
            print(one.line(name))
            if name == args.rows:
                print(
                    "".join(
                        f"  {row}: {m:.4g} published, {p:.4g} ({100 * (p / m - 1):+.1f} %)\n" for row, m, p in one.rows
                    )
                )
    print(
        f"\n## fits\n\n{fits(rows)}\n\n## bubble (absolute difference)\n\n{bubbles(rows)}"
        f"\n\n## ranking\n\n{ranking(rows)}"
    )
    return 0


def speeds(rows: list[Row]) -> dict[str, Score]:
    """Tokens per second."""
    scores: dict[str, Score] = {}
    shares: dict[str, list[float]] = {}
    for row, run, measured, predicted in throughput(rows):
        scores.setdefault(row["source"], Score()).add(row["id"], 1 / measured, 1 / predicted)
        peak = run.cluster.gpu.bf16 * (
            2 if run.job.precision.startswith("fp8") and not row["gpu_key"].startswith("H") else 1
        )
        shares.setdefault(row["source"], []).append(counted_flops(row, run) / measured / run.cluster.gpus / peak)
    for name, found in shares.items():
        scores[name].null = _others(found)
    return scores


def _others(values: list[float]) -> list[float]:
    """Errors of answering the mean of the other values."""
    if len(values) < 2:
        return []
    total = sum(values)
    return [abs((total - value) / (len(values) - 1) / value - 1) for value in values]


def closed_memory(rows: list[Row]) -> dict[str, Score]:
    """What papers and estimators print, against the same formulas here."""
    scores: dict[str, Score] = {}
    for row in rows:
        for value, predicted in _closed(row):
            scores.setdefault(row["source"], Score()).add(row["id"], value, predicted)
    return {name: _with_null(score) for name, score in scores.items()}


def _with_null(score: Score) -> Score:
    score.null = _others([measured for _, measured, _ in score.rows])
    return score


def _closed(row: Row) -> Iterable[tuple[float, float]]:
    source, zero, params = row["source"], whole(row, "zero_stage", 0), (number(row, "params_b") or 0) * 1e9
    value = number(row, "mem_bytes")
    if source == "zero_paper":
        dp, tp = whole(row, "dp"), whole(row, "tp")
        if value:
            yield value, _as_printed(formulas.zero_states(params, dp, zero) / GB, row["mem_value"]) * GB
        elif "model size" in row["other_name"]:
            yield number(row, "other_value") or 0, formulas.largest_model(32e9, tp, dp, zero) / 1e9
    elif source in ("deepspeed_code", "deepspeed_docs") and value and not _is_stale(row):
        text = row["note"]
        layer = (number({"": (re.search(r"layer ([\d.]+)", text) or [0, "0"])[1]}, "") or 0) * 1e6
        offload = (
            "parameters" if "param+" in text else "optimizer" if ("offload optim" in text or "=cpu" in text) else "none"
        )
        yield value, formulas.deepspeed_estimate(params, layer, whole(row, "n_gpus"), zero, offload)
    elif source == "megatron_estimator" and (model := shape_of(row)) is not None and value:
        tp, pp, virtual, sp = whole(row, "tp"), whole(row, "pp"), whole(row, "vp"), row["recompute"] == "selective"
        yield value, formulas.megatron_activations(model, whole(row, "seq_len"), whole(row, "mbs"), tp, pp, virtual, sp)
        states = formulas.megatron_states(model, tp, pp, whole(row, "dp"), zero == 1)
        yield (number(row, "other_value") or 0) * 2**20, states
    elif source == "korthikanti22" and (model := shape_of(row)) is not None:
        yield from _korthikanti(row)
    elif source == "ultrascale" and "unsharded" in row["mem_kind"] and value:
        yield value, params * (20 if "FP32 grad" in row["note"] and "w/o" not in row["note"] else 16)


def _is_stale(row: Row) -> bool:
    """The documentation's sample of ZeRO 2 without offload is of an older version of the code it documents."""
    return row["source"] == "deepspeed_docs" and row["zero_stage"] == "2" and "params" in row["mem_kind"]


def _as_printed(value: float, printed: str) -> float:
    """A number with as many decimals as the paper prints; some of its numbers are rounded, others cut off."""
    scale = 10.0 ** len(printed.partition(".")[2])
    return min((f(value * scale) / scale for f in (math.floor, round)), key=lambda x: abs(x - float(printed)))


def _korthikanti(row: Row) -> Iterable[tuple[float, float]]:
    model = shape_of(row)
    assert model is not None
    tp, pp, virtual, sp = whole(row, "tp"), whole(row, "pp"), whole(row, "vp"), row["sp"] == "yes"
    seq, batch = whole(row, "seq_len"), whole(row, "mbs")
    more = formulas.interleaved_factor(pp, virtual) if virtual > 1 else 1.0

    def activations(sp: bool, recompute: str, ends: bool = True) -> float:
        layer = formulas.layer_activations(seq, batch, model.hidden, model.heads, tp, sp, recompute)
        unit = float(seq) * batch * model.hidden
        head = 4 * unit / tp * (1 + model.vocab / model.hidden) if pp == 1 and ends else 0.0
        return layer * model.layers * more + (unit * pp / tp if ends else 0.0) + head

    value = number(row, "mem_value")
    if value and "activations" in row["mem_kind"]:
        yield value * GIB, activations(sp, row["recompute_kind"])
    elif "tensor-parallel baseline" in row["other_name"]:
        layer = activations(sp, row["recompute_kind"], False)
        yield number(row, "other_value") or 0, 100 * layer / activations(False, "none", False)


def measured_memory(rows: list[Row]) -> dict[str, Score]:
    """What was measured: allocated, reserved or shown by the driver, as the row says."""
    scores: dict[str, Score] = {}
    for row in rows:
        value = number(row, "mem_value")
        known = row["source"] in (
            "korthikanti22",
            "zero_paper",
            "deepspeed_code",
            "deepspeed_docs",
            "megatron_estimator",
            "gpipe",
        )
        odd = "memory looks odd" in row["note"]  # says the source
        if value is None or known or odd or "MLA" in row["arch"] or (found := asked(row)) is None:
            continue
        needed = memory(_memory_run(row, found))
        bytes_ = number(row, "mem_bytes") or value * 1e9
        if "resume" in row["model"] and row["source"] == "megatron_golden":  # its peak lacks the first step's
            bytes_ = (number(row, "other_value") or 0) * GIB
            last = needed.stages[-1]
            predicted = last.states + last.buffers
        else:
            predicted = _memory_of(row, needed)
        scores.setdefault(row["source"], Score()).add(row["id"], bytes_, predicted)
    return {name: _with_null(score) for name, score in scores.items()}


def _memory_run(row: Row, found: Asked) -> Run:
    """nanotron does not recompute unless asked to; where a source says nothing, the least that fits."""
    return found.runs[0] if row["source"] == "ultrascale" else fitting_run(found)


def _memory_of(row: Row, needed: Memory) -> float:
    kind, unit = row["mem_kind"], row["mem_unit"]
    if "last pipeline stage" in kind:
        return needed.stages[-1].allocated
    if "smi" in unit:
        return max(needed.stages[0].total, needed.stages[-1].total)
    if "rank shown" in kind:  # the first, whose log is printed
        return needed.stages[0].allocated
    return needed.peak.allocated if "max_memory_allocated" in kind else needed.peak.reserved


def fits(rows: list[Row]) -> str:
    """Out of memory or not."""
    wrong: list[str] = []
    yes = no = 0
    for row in rows:
        said = row["fits"]
        if not said or (found := asked(row)) is None or "offload" in row["sharding"]:
            continue  # offloading to the host is not modelled
        fit = memory(fitting_run(found)).fits
        yes, no = yes + said.startswith("yes"), no + said.startswith("no")
        if fit != said.startswith("yes"):
            wrong.append(f"{row['id']} ({'false fit' if fit else 'refused'})")
    return f"{no} rows that do not fit, {yes} that do; wrong: {', '.join(wrong) or 'none'}"


def bubbles(rows: list[Row]) -> str:
    """The zero-bubble paper's table, by schedule; ZB-H2 and ZB-2p need twice the memory and are not offered here."""
    kinds: dict[str, list[float]] = {}
    for row in rows:
        printed = number(row, "bubble_rate")
        if printed is None or row["schedule"] in ("ZB-H2", "ZB-2p", "ZB-2p*"):
            continue
        played = _bubble(row)
        if played is not None:
            name = row["schedule"] + ("" if number(row, "t_f_ms") else " (own times)")
            kinds.setdefault(name, []).append(abs(played - printed))
    lines = [f"| {name} | {len(d)} | {mean(d):.4f} | {max(d):.4f} |" for name, d in kinds.items()]
    return "\n".join(["| schedule | rows | mean | worst |", "|---|---:|---:|---:|", *lines])


def _bubble(row: Row) -> float | None:
    names = {"1F1B": "1f1b", "1F1B-I": "interleaved_1f1b", "ZB-H1": "zb_h1", "ZB-1p": "zb_h1", "ZB-V": "zb_v"}
    if row["schedule"] not in names:
        return None
    name, stages, micro = names[row["schedule"]], whole(row, "pp"), whole(row, "n_microbatches")
    virtual = {"interleaved_1f1b": whole(row, "vp", 2), "zb_v": 2}.get(name, 1)
    times = [number(row, column) for column in ("t_f_ms", "t_b_ms", "t_w_ms", "t_comm_ms")]
    if None in times:
        return _bubble_of_own_times(row)
    forward, inputs, weights, send = (t or 0.0 for t in times)
    windows = [Window(forward / virtual, inputs / virtual, weights / virtual)] * (stages * virtual)
    lists = schedule_lists(name, stages, micro, virtual)
    played = simulate(lists, placement(name, stages, virtual), durations(windows), send)
    return 1 - micro * (forward + inputs + weights) / played.length


def _bubble_of_own_times(row: Row) -> float | None:
    found = asked(row)
    if found is None:
        return None
    runs = [(step_time(run, split=False).total, run) for run in found.runs]
    run = min(runs, key=lambda pair: pair[0])[1]
    layout, windows = run.candidate.layout, window_seconds(run)
    micro = run.candidate.microbatches
    played = play(layout.schedule, layout.pp, micro, layout.virtual, windows, message_seconds(run))
    return 1 - micro * max(sum(w) for w in windows) * len(windows) / layout.pp / played.length


def collectives(rows: list[Row], least: int, most: int | None) -> dict[str, Score]:
    """Bus bandwidth of collectives by GPU and number of them."""
    scores: dict[str, Score] = {}
    for row in rows:
        payload, busbw = number(row, "payload_bytes"), number(row, "other_value")
        if not payload or not busbw or row["gpu_key"] not in gpus() or payload < least or (most and payload >= most):
            continue
        count = whole(row, "n_gpus")
        match = re.search(r"(\d+)x (\d+) GB/s", row["internode"])
        nic, nics = (float(match[2]) * GB, int(match[1])) if match else read_internode("ndr400x8")
        cluster = Cluster(gpus()[row["gpu_key"]], max(8, count), 8, nic=nic, nics=nics)
        op = row["collective"].split()[0]
        if op not in SENT:
            continue
        switched = "ring" not in row["collective"]
        seconds = Links(cluster, in_switch=switched).seconds(op, payload, Group(count, min(count, cluster.domain)))
        factor = (2 if op == "all_reduce" else 1) * (count - 1) / count
        name = f"{row['gpu_key']} x {count}"
        scores.setdefault(name, Score()).add(row["id"], busbw * GB, factor * payload / seconds)
    return {name: _with_null(score) for name, score in scores.items()}


def ranking(rows: list[Row]) -> str:
    """Order of layouts of one problem: rank correlation, and what the planner's choice costs.

    Rows that their source itself calls outliers are left out.
    """
    lines = ["| problem | layouts | Spearman | time of our choice / best |", "|---|---:|---:|---:|"]
    problems: dict[str, list[tuple[float, float]]] = {}
    for row, run, measured, predicted in throughput([row for row in rows if "outlier" not in row["note"]]):
        for name in _problems(row, run):
            seconds = 1 / run.job.tokens
            problems.setdefault(name, []).append((measured * seconds, predicted * seconds))
    for name, pairs in problems.items():
        if len(pairs) < 4:
            continue
        chosen = min(pairs, key=lambda pair: pair[1])
        regret = chosen[0] / min(pair[0] for pair in pairs)
        lines.append(f"| {name} | {len(pairs)} | {spearman(pairs):.3f} | {regret:.3f} |")
    return "\n".join(lines)


def _problems(row: Row, run: Run) -> list[str]:
    if row["source"] == "bigscience" and run.cluster.gpus == 384:
        newer = "02-25" in row["note"]
        when = "since 25 February" if newer else "before"
        found = (
            [f"BigScience: 72 layers, 384 GPUs, {when}"]
            if whole(row, "layers") == 72 and row["hidden"] == "14336"
            else []
        )
        return [*found, "BigScience: all on 384 GPUs"]
    if row["source"] == "sc21":
        if "ZeRO" in row["framework"] or "v not printed" in row["schedule"]:
            return [f"SC'21 Table 2 ({whole(row, 'gbs')} samples)", "SC'21 Table 2, per token and GPU"]
        return ["SC'21 figures: 175B, 96 GPUs"] if run.cluster.gpus == 96 else ["SC'21, others"]
    if row["source"] == "zero_bubble":
        return [f"zero bubble: {row['model']}, {whole(row, 'pp')} stages, {whole(row, 'n_microbatches')} microbatches"]
    return []


def spearman(pairs: list[tuple[float, float]]) -> float:
    """Rank correlation; equal values share their rank."""

    def ranks(values: list[float]) -> list[float]:
        order = sorted(values)
        return [(order.index(v) + len(order) - 1 - order[::-1].index(v)) / 2 for v in values]

    first, second = ranks([a for a, _ in pairs]), ranks([round(b, 12) for _, b in pairs])
    middle = (len(pairs) - 1) / 2
    top = sum((a - middle) * (b - middle) for a, b in zip(first, second, strict=True))
    squares: Callable[[list[float]], float] = lambda r: sum((v - middle) ** 2 for v in r) ** 0.5  # noqa: E731
    return top / (squares(first) * squares(second) or 1.0)


if __name__ == "__main__":
    raise SystemExit(main())
