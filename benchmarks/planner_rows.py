"""WHAT does a row of the published tables ask?  Rows of a CSV file as jobs the planner can price."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_3d.errors import ConfigurationError
from lightning_3d.layout import Layout
from lightning_3d.planner.candidate import Candidate, Job
from lightning_3d.planner.chain import ShapeChain
from lightning_3d.planner.cluster import Cluster, read_internode
from lightning_3d.planner.hardware import GB, gpus
from lightning_3d.planner.model import ModelShape
from lightning_3d.planner.step_time import Run, step_time

Row = dict[str, str]


def read_rows(path: str | Path) -> list[Row]:
    """All rows of a file."""
    with Path(path).open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if number(row, "hidden") and not row.get("heads"):
            row["heads"] = _heads_of_others(row, rows)
    return rows


def _heads_of_others(row: Row, rows: list[Row]) -> str:
    """Those of the table's row of the same width that is nearest in depth: a sweep prints only what it varies."""
    alike = [x for x in rows if x["source"] == row["source"] and x["hidden"] == row["hidden"] and number(x, "heads")]
    nearest = min(alike, key=lambda x: abs(whole(x, "layers") - whole(row, "layers")), default=None)
    return nearest["heads"] if nearest is not None else ""


def number(row: Row, column: str) -> float | None:
    """A number of the row, if there is one."""
    try:
        return float(row.get(column) or "")
    except ValueError:
        return None


def whole(row: Row, column: str, default: int = 1) -> int:
    """A whole number of the row, or the default."""
    found = number(row, column)
    return default if found is None else int(found)


_VOCAB = 51200
"""GPT-2's, padded: of rows that print none."""


def shape_of(row: Row) -> ModelShape | None:
    """The model, if the row prints its sizes."""
    if not all(number(row, c) for c in ("layers", "hidden")):
        return None
    shape = _shape(row, whole(row, "vocab", _VOCAB))
    rate, tokens = number(row, "tflops_per_gpu"), number(row, "tokens_per_s_per_gpu")
    if row["vocab"] or not rate or not tokens or "P-P_emb_in" not in row["tflops_convention"]:
        return shape
    # not printed, but it is in the operations per token that the source counted
    missing = rate * 1e12 / tokens - shape.flops_per_token(whole(row, "seq_len"), causal=False)
    vocab = _VOCAB + round(missing / (6 * shape.hidden))
    return _shape(row, vocab) if vocab > 2 * _VOCAB else shape


def _shape(row: Row, vocab: int) -> ModelShape:
    layers, hidden = whole(row, "layers"), whole(row, "hidden")
    heads = whole(row, "heads", whole(row, "kv_heads", max(1, hidden // 128)))
    gated = "SwiGLU" in row["arch"]
    tp = whole(row, "tp")
    if "Megatron" in row["framework"] or row["source"] in ("megatron_golden", "megatron_estimator", "bigscience"):
        vocab = -(-vocab // (128 * tp)) * 128 * tp
    biases = not gated and "MPT" not in row["model"]
    tied = "tied" in row["arch"] and "untied" not in row["arch"]
    if not gated and row["source"] in (
        "sc21",
        "korthikanti22",
        "megatron2019",
        "megatron2020",
        "zero_bubble",
        "mtnlg",
        "bigscience",
        "deepspeed_azure",
        "mcore_readme",
        "nemo2407",
        "nemo_launcher2022",
        "megatron_golden",
        "megatron_estimator",
    ):
        tied = "untie" not in row["model"]
    if row["source"] == "megatron_estimator" and row["model"].startswith("llama"):
        gated, biases, tied = True, False, False
    if row["model"].startswith(("Nemotron", "gpt3_7b", "megatron-7B")):
        tied = False
    return ModelShape(
        name=row["model"], layers=layers, hidden=hidden, ffn=whole(row, "ffn", 4 * hidden), heads=heads,
        kv_heads=whole(row, "kv_heads", heads), vocab=vocab, head_dim=0 if hidden % heads == 0 else hidden // heads,
        gated=gated, biases=biases, tied=tied,
        positions=0 if gated or "ALiBi" in row["arch"] else whole(row, "seq_len", 2048),
        dropout=not gated and "MPT" not in row["model"],
    )  # fmt: skip


def software_of(row: Row) -> str:
    """Whose way of running."""
    name, note, source = row["framework"], row["note"], row["source"]
    compiled = ("compile" in note and "no torch.compile" not in note) or "AsyncTP" in note
    if "ZeRO-3" in name:
        return "deepspeed-2021"
    if source == "megascale" or "MegaScale" in name:
        return "megatron"
    if name.startswith(("Megatron-DeepSpeed", "DeepSpeed")):
        return "deepspeed"
    if (
        "Megatron-Core" in name
        or name.startswith(("NeMo 24", "Meta"))
        or source in ("megatron_llama_readme", "megatron_golden")
    ):
        return "megatron"
    if name.startswith(("Megatron", "NeMo")) or source in ("megatron_estimator", "korthikanti22"):
        return "megatron-2021"
    if "foundry" in name:
        return "fsdp"
    if "nanotron" in name or "picotron" in name:
        return "nanotron"
    if "torchtitan" in name or "Kempner" in name:
        if "asynctp" in row["source"] or ("H200" in row["gpu_key"] and "torchtitan" in name):
            compiled = True
        tangled = "async" in note.lower()
        if "Kempner" in name:
            return "dtensor-compile" if compiled else "dtensor"
        if compiled and re.search(r"2025-?(0[4-9]|1)", row.get("where", "")):
            return "torchtitan-2025-async" if tangled else "torchtitan-2025"
        return "torchtitan-async" if tangled else "torchtitan-compile" if compiled else "torchtitan"
    return "lightning_3d"


def recipe_of(row: Row) -> str:
    """What is stored per parameter."""
    software, precision = software_of(row), row["precision"]
    if "pure bf16" in precision:
        return "pure-bf16-float32-reduction" if "reduce in fp32" in precision else "pure-bf16"
    if software == "nanotron":
        return "nanotron"
    if software.startswith("deepspeed"):
        return "deepspeed-bf16" if "fp32 grad" in precision else "deepspeed"
    if software == "fsdp" or software.startswith(("torchtitan", "dtensor")):
        return "fsdp"
    reduced = "Bridge" in row["framework"] or row["framework"].startswith("NeMo 24")
    return "megatron-bf16-gradients" if reduced or row["source"] == "megatron_llama_readme" else "megatron"


def cluster_of(row: Row) -> Cluster | None:
    """The machines, if the GPU is one of the table."""
    gpu = gpus().get(row["gpu_key"])
    if gpu is None:
        return None
    count, text = whole(row, "n_gpus"), row["internode"]
    per_node = min(whole(row, "gpus_per_node", gpu.gpus_per_node), count)
    while count % per_node:
        per_node //= 2
    nic, nics = 0.0, per_node
    if match := re.search(r"(\d+)x HDR 200", text):
        nic, nics = 25 * GB, int(match[1])
    elif match := re.search(r"(\d+)x (\d+) GB/s", text):
        nic, nics = float(match[2]) * GB, int(match[1])
    elif match := re.search(r"(\d+) Gb/s per node", text):
        nic, nics = float(match[1]) / 8 / 8 * GB, 8
    elif "Omni-Path" in text:
        nic, nics = read_internode("opa100x4")
    elif match := re.search(r"(\d+) Gb/s", text):
        nic = float(match[1]) / 8 * GB
    elif row["framework"].startswith("Megatron-LM") and gpu.generation == "ampere":
        nic = 25 * GB  # Selene: DGX A100
    nics = max(1, min(nics, nics * per_node // max(per_node, whole(row, "gpus_per_node", per_node))))
    # the source itself: machines of later rows are "1-5% faster"
    efficiency = 1.03 if "1-5% faster" in row["note"] else 1.0
    return Cluster(gpu, count, per_node, nic=nic, nics=nics, efficiency=efficiency)


def precision_of(row: Row) -> str:
    """Of the matrix products."""
    kind = row["precision_kind"] or "bf16"
    if "rowwise" in row["precision"]:
        return "fp8-rowwise"
    return kind if kind in ("fp8", "fp4", "fp16", "bf16", "fp32") else "bf16"


_SCHEDULES = {"ZB-H1": "zb_h1", "ZB-1p": "zb_h1", "ZB-V": "zb_v", "ZB-H2": "zb_h2", "ZB-2p": "zb_h2", "ZB-2p*": "zb_h2"}


@dataclass(frozen=True)
class Asked:
    """A row, and the ways it may have been run: what the source does not print is left open."""

    row: Row
    runs: tuple[Run, ...]


def asked(row: Row) -> Asked | None:
    """The jobs a row may mean, or None if it lacks what is needed, or describes what cannot be."""
    try:
        return _asked(row)
    except ConfigurationError as error:
        print(f"{row['id']} is left out: {error}")
        return None


def _asked(row: Row) -> Asked | None:
    model, cluster = shape_of(row), cluster_of(row)
    if model is None or cluster is None or number(row, "n_gpus") is None or number(row, "tp") is None:
        return None
    seq = whole(row, "seq_len", 2048)
    tp, pp, cp = (max(1, whole(row, axis)) for axis in ("tp", "pp", "cp"))
    dp = whole(row, "dp", max(1, cluster.gpus // (tp * pp * cp)))
    if tp * pp * cp * dp != cluster.gpus:
        return None
    schedule, virtuals = _schedule(row, model, pp)
    if schedule == "zb_h2":  # twice the memory of 1F1B: not one of our schedules
        return None
    batches = whole(row, "gbs", dp * whole(row, "mbs", 1) * 16)
    micros = [whole(row, "mbs")] if number(row, "mbs") else _micros(row, batches // dp)
    zero = whole(row, "zero_stage", 1)
    job = Job(batches, seq, precision_of(row), recipe_of(row), software_of(row))
    runs = []
    for micro in micros:
        if batches % (dp * micro):
            continue
        for virtual in virtuals:
            name = ("interleaved_1f1b" if virtual > 1 else "1f1b") if schedule == "1f1b" else schedule
            layout = Layout(tp=tp, pp=pp, dp=dp, cp=cp, zero=zero, schedule=name, virtual=virtual)
            for recompute in _recompute(row):
                candidate = Candidate(layout, micro, batches // dp // micro, recompute, _sp(row, tp))
                runs.append(Run(ShapeChain(model), cluster, job, candidate))
    return Asked(row, tuple(runs)) if runs else None


def _sp(row: Row, tp: int) -> bool:
    """Megatron since 2022 divides by sequence where it divides by tensor; where the source does not say, it did."""
    if software_of(row).startswith("dtensor") and whole(row, "pp", 1) > 1:
        return False  # KempnerForge's tensor_parallel.py: not in pipeline stages
    unsaid = not row["sp"] and (software_of(row) == "megatron" or row["recompute_kind"] == "selective")
    return tp > 1 and (row["sp"].startswith("yes") or unsaid)


def _micros(row: Row, samples: int) -> list[int]:
    if row["source"] == "torchtitan_docs" or "local batch" in row["note"]:
        return [1]
    return [m for m in (1, 2, 4) if samples % m == 0]


def _schedule(row: Row, model: ModelShape, pp: int) -> tuple[str, list[int]]:
    text = row["schedule"]
    if text in _SCHEDULES:
        return _SCHEDULES[text], [2 if text == "ZB-V" else 1]
    if pp == 1:
        return "1f1b", [1]
    if number(row, "vp"):
        virtual = whole(row, "vp")
        return "1f1b", [virtual if virtual * pp <= model.layers + 2 else 1]
    if "interleaved" in text or text == "1F1B-I" or "Megatron-Core" in row["framework"]:
        layers = -(-model.layers // pp)
        least = 2 if "interleaved" in text else 1
        return "1f1b", [v for v in range(least, 8) if layers % v == 0 and v * pp <= model.layers] or [1]
    return "1f1b", [1]


def _recompute(row: Row) -> list[str]:
    text, kind = row["recompute"], row["recompute_kind"]
    if "every 2nd" in text:
        return ["half"]
    if kind == "selective" and "op" in text:
        return ["alternate"]
    if kind in ("none", "selective", "full"):
        return [kind]
    if row["source"] == "megatron2020":  # the printed TFLOP/s count a second forward
        return ["full"]
    if row["gpu_key"].startswith("GB"):  # Grace hosts: activations that do not fit are offloaded over their fast link
        return ["none"]
    return ["none", "half", "full"]  # not printed: the first that fits


def measured_seconds(row: Row, run: Run) -> float | None:
    """Seconds of a step as the row prints them, in whatever unit."""
    job, gpus_ = run.job, run.cluster.gpus
    if (seconds := number(row, "iter_time_s")) and row["source"] not in ("megatron_golden",):
        if row["source"] == "bigscience" and (rate := number(row, "tflops_per_gpu")) and "swapped" in row["note"]:
            return max(seconds, rate)
        return seconds
    if rate := number(row, "tokens_per_s_per_gpu"):
        return job.tokens / rate / gpus_
    if rate := number(row, "samples_per_s_per_gpu"):
        return job.global_batch / rate / gpus_
    if rate := number(row, "tflops_per_gpu"):
        return counted_flops(row, run) / (rate * 1e12 * gpus_)
    if (share := number(row, "pct_peak")) and "MFU" in row["pct_kind"]:
        return counted_flops(row, run) / (share / 100 * run.cluster.gpu.bf16 * gpus_)
    return None


def counted_flops(row: Row, run: Run) -> float:
    """Operations of a step in the row's own way of counting."""
    text = row["tflops_convention"] + row["pct_kind"]
    assert isinstance(run.chain, ShapeChain)
    model, job = run.chain.model, run.job
    if "96" in text or "counts recompute" in text or "under-reported" in text:
        h, layers = model.hidden, model.layers
        core = 96.0 * job.tokens * layers * h * h
        return core * (1 + job.seq / (6 * h) + model.vocab / (16 * layers * h))
    everything = "P_all" in text or "ALL params" in text
    return job.tokens * model.flops_per_token(job.seq, causal="causal (halved)" in text, embeddings=everything)


def predicted_seconds(found: Asked) -> tuple[float, Run]:
    """Seconds of the step; where the source leaves something open, of the fastest way that fits."""
    from lightning_3d.planner.memory import memory

    fitting = [run for run in found.runs if len(found.runs) == 1 or memory(run).fits]
    least = found.runs[0].candidate.recompute
    tight = [run for run in found.runs if run.candidate.recompute == (least if found.row["recompute_kind"] else "full")]
    timed = [(step_time(run).total, run) for run in fitting or tight or found.runs]
    return min(timed, key=lambda pair: pair[0])


def fitting_run(found: Asked) -> Run:
    """Of what the source leaves open, the first way that fits, or the one that needs least."""
    from lightning_3d.planner.memory import memory

    return next((run for run in found.runs if memory(run).fits), found.runs[-1])


def throughput(rows: list[Row]) -> Iterator[tuple[Row, Run, float, float]]:
    """Rows that print a speed, with the run, measured and predicted seconds."""
    for row in rows:
        if (
            row["source"] in ("megatron_golden", "gpipe", "pipedream", "zero_paper")
            or "ZB-H2" in row["schedule"]
            or "ZB-2p" in row["schedule"]
        ):
            continue
        found = asked(row)
        if found is None or not (seconds := measured_seconds(row, found.runs[0])):
            continue
        predicted, run = predicted_seconds(found)
        yield row, run, seconds, predicted
