"""What the planner is told and cannot be: refused with the name, never taken for something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_3d.cli import main
from lightning_3d.errors import ConfigurationError
from lightning_3d.planner import Cluster, Plan, plan, this_machine
from lightning_3d.planner.cluster import read_cluster

COMMAND = "plan --model llama3-8b --gpus 8 --gpu h100 --global-batch 64 --seq 2048"
FILE = {"gpu": "a100-80gb", "gpus": "16", "gpus_per_node": "8"}


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("--internode hdr200x0", "--internode is 'hdr200x0'"),
        ("--internode hdr0x8", "--internode is 'hdr0x8'"),
        ("--gpus-per-node -8", "gpus_per_node is -8; it must be at least 1"),
        ("--top 0", "0 layouts cannot be shown"),
        ("--headroom 5", "headroom is 5.0; it is a share of the memory"),
        ("--headroom nan", "headroom is nan"),
        ("--precision bf16-mixed", "is the recipe"),
        ("--gpu v100", "no fast bf16; choose fp16."),
        ("--yaml nowhere/strategy.yaml", "in a folder that exists"),
        ("--yaml strategy.txt", "in a folder that exists"),
        ("--explain tp2-mbs0", "microbatches of 0 samples"),
        ("--explain mbs2-mbs4", "gives mbs twice: 'mbs2' and 'mbs4'"),
        ("--explain tp2-full-selective", "gives recomputation twice"),
        ("--explain sp", "and there is one. Leave sp out"),
        ("--explain ''", "cannot read"),
    ],
)
def test_flags(flags: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND.split(), *flags.replace("''", " ").split(" ", 1)]) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"gpus": "lots"}, "gpus is 'lots'; it must be a number"),
        ({"gpus": "16.5"}, "gpus is 16.5; it must be a whole number"),
        ({"gpus": "true"}, "gpus is True"),
        ({"gpus_per_node": "0"}, "gpus_per_node is 0; it must be a whole number of at least 1"),
        ({"gpu": "8"}, "gpu is 8; it must be a text"),
        ({"internode": "8"}, "internode is 8; it must be a text"),
        ({"domain": "3"}, "domain is 3, but a machine has 8 GPUs"),
        ({"efficiency": "95"}, "a share of the usual speed: 0.95, not 95"),
        ({"efficiency": "0"}, "efficiency is 0; it must be above 0"),
        ({"peak_tflops": "312 TFLOPS"}, "without its unit"),
        ({"link_gb_per_s": "0"}, "link_gb_per_s is 0; it must be above 0"),
        ({"memory_gib": "-5"}, "memory_gib is -5"),
        ({"latency_us": "-1"}, "latency_us is -1; it must be at least 0"),
        ({"reserve_gib": "100"}, "reserve 100 GiB"),
    ],
)
def test_cluster_files(changes: dict[str, str], error: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("".join(f"{key}: {value}\n" for key, value in {**FILE, **changes}.items()))
    with pytest.raises(ConfigurationError, match=error):
        read_cluster(file)


def test_a_cluster_file_and_flags_that_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("".join(f"{key}: {value}\n" for key, value in FILE.items()))
    job = ["plan", "--model", "gpt2", "--global-batch", "64", "--seq", "128", "--top", "1", "--cluster"]
    assert main([*job, str(file), "--gpu", "h100", "--internode", "ndr400x8"]) == 2
    assert "--gpu and --internode and a cluster file both describe the machines" in capsys.readouterr().err
    assert main([*job, str(file), "--gpus", "0"]) == 2
    assert "a cluster of 0 GPUs" in capsys.readouterr().err
    assert main([*job, str(file), "--gpus", "32"]) == 0
    assert "on 32 x A100" in capsys.readouterr().out


@pytest.fixture(scope="module")
def eight() -> Plan:
    return plan("llama3-8b", Cluster.of("h100", 8), global_batch=64, seq=2048, precision="fp8", keep=12)


def test_what_is_priced_and_not_run_is_said(eight: Plan, tmp_path: Path) -> None:
    from lightning_3d.planner.tables import explain_text

    note = "no products in fp8"
    texts: list[Any] = [str(eight), explain_text(eight.best), eight.html(tmp_path / "r.html").read_text()]
    assert all(note in " ".join(text.split()) for text in texts)
    theirs = plan("llama3-8b", Cluster.of("h100", 8), global_batch=64, seq=2048, precision="fp8", software="megatron")
    assert note not in " ".join(str(theirs).split())


def test_it_fits_a_terminal(eight: Plan) -> None:
    from lightning_3d.planner.tables import explain_text

    for text in (str(eight), explain_text(eight.explain("tp2-pp4-interleaved_1f1b-v2-mbs1-selective-sp"), eight.best)):
        assert max(map(len, text.splitlines())) <= 80


def test_the_reason_of_a_layout_that_is_too_large_is_its_own(eight: Plan) -> None:
    from lightning_3d.planner.tables import explain_text

    said = " ".join(explain_text(eight.explain("tp1-zero0-mbs8")).split())
    assert "DOES NOT FIT: every GPU would need" in said
    assert "recomputation" not in said
    tight = plan("llama3-70b", Cluster.of("a100-80gb", 32, 8, "hdr200x8"), global_batch=64, seq=4096)
    for seconds, run, needed in tight.found.too_large:
        assert seconds > 0
        for zero in (1, 2, 3):
            layout = f"tp{run.candidate.layout.tp}-pp{run.candidate.layout.pp}-zero{zero}-mbs1-full"
            name = layout + ("-sp" if run.candidate.layout.tp > 1 else "")
            assert tight.explain(name).memory.peak.total >= needed.peak.total * (1 - 1e-9)


@pytest.mark.parametrize(
    ("model", "cluster", "options", "error"),
    [
        (None, Cluster.of("h100", 8), {}, "a model of type NoneType cannot be planned"),
        ("llama3-8b", None, {}, "a cluster of type NoneType"),
        ("llama3-8b", Cluster.of("h100", 8), {"global_batch": 8.0, "seq": 8}, "global_batch is 8.0"),
        ("llama3-8b", Cluster.of("h100", 8), {"headroom": "x"}, "headroom is 'x'"),
        ("llama3-8b", Cluster.of("h100", 8), {"seq": 8, "precision": 16}, "precision 16 is not known"),
    ],
)
def test_arguments(model: Any, cluster: Any, options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        plan(model, cluster, **{"global_batch": 8, **options})


@pytest.mark.parametrize("gpus", [0, 8.0, "8", True])
def test_numbers_of_devices(gpus: Any) -> None:
    for make in (lambda: Cluster.of("h100", gpus), lambda: this_machine(gpus)):
        with pytest.raises(ConfigurationError, match="a whole number of at least 1 is needed"):
            make()
