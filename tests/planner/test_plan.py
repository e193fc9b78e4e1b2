"""The answer as a user gets it: ranking, reasons, errors, speed, the page, the command line."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_3d
from lightning_3d.cli import main
from lightning_3d.errors import ConfigurationError
from lightning_3d.planner import Cluster, Plan, plan
from lightning_3d.planner.cluster import read_cluster, read_internode

LLAMA = {"global_batch": 256, "seq": 4096}


@pytest.fixture(scope="module")
def answer() -> Plan:
    return plan("llama3-8b", Cluster.of("a100-80gb", 16, 8, "hdr200x8"), **LLAMA)


def test_best_is_the_fastest_that_fits(answer: Plan) -> None:
    seconds = [p.seconds for p in answer.ranked]
    assert seconds == sorted(seconds)
    assert all(p.memory.fits_with(0.05) for p in answer.ranked)
    assert all(p.run.candidate.layout.world_size == 16 for p in answer.ranked)
    assert lightning_3d.plan is plan


def test_same_answer_twice(answer: Plan) -> None:
    again = plan("llama3-8b", Cluster.of("a100-80gb", 16, 8, "hdr200x8"), **LLAMA)
    assert str(again) == str(answer)


def test_the_table_says_what_was_asked_for(answer: Plan) -> None:
    text = str(answer)
    for word in ("MFU causal", "hardware", "activations", "DP exposed", "dp hidden", "bubble", "rejected", "best: "):
        assert word in text
    assert f"tensor_parallel_size={answer.best.run.candidate.layout.tp}" in text


def test_leaving_the_machine_is_priced(answer: Plan) -> None:
    named = dict(plan("gpt3-175b", Cluster.of("a100-80gb", 64, 8, "hdr200x8"), global_batch=64, seq=2048).rejected)
    assert re.match(r"TP=16 leaves the machine: 384 all-reduces per microbatch of .* over 25 GB/s", named["TP=16"])
    assert answer.rejected


def test_explain_prices_anything(answer: Plan) -> None:
    best = answer.explain(str(answer.best))
    assert best.seconds == pytest.approx(answer.best.seconds)
    large = answer.explain("tp1-pp1-zero0-mbs16")
    assert not large.memory.fits
    for layout, error in (
        ("tp3-pp1", "not a multiple of 3"),
        ("tp1-pp16-interleaved_1f1b-v4", "cannot be cut into 64 parts"),
        ("tp8-mbs1-pp2-dp2", "needs 32 GPUs"),
        ("tp2-mbs3", "no multiple of 24"),
        ("tp2-x4", "cannot read 'x4'"),
    ):
        with pytest.raises(ConfigurationError, match=error):
            answer.explain(layout)


@pytest.mark.parametrize(
    "name", ["pp2-zb_v-mbs1", "tp2-pp4-interleaved_1f1b-v2-mbs1-sp", "pp2-zb_h1-mbs1", "tp2-zero3"]
)
def test_arguments_make_the_same_layout(answer: Plan, name: str) -> None:
    priced = answer.explain(name)
    layout = lightning_3d.ThreeDStrategy(**answer.strategy_arguments(priced)).layout
    assert layout == priced.run.candidate.layout


def test_conventions_of_flops(answer: Plan) -> None:
    causal, full, hardware = (answer.best.mfu(c) for c in ("model_causal", "model_full", "hardware"))
    assert causal < full <= hardware < 0.8
    again = {how: answer.explain(f"tp4-pp2-mbs1-{how}") for how in ("none", "half", "full")}
    share = {how: p.mfu("hardware") / p.mfu("model_full") for how, p in again.items()}
    # forward is a third of the operations; the head's (4096 x 128256, as much as 2.2 layers of 32) are not repeated
    assert share["none"] == 1
    assert share["full"] == pytest.approx(1 + (1 - 0.066) / 3, abs=0.003)
    assert share["half"] == pytest.approx((1 + share["full"]) / 2)


def test_impossible_budget_says_how_many() -> None:
    with pytest.raises(ConfigurationError, match=r"needs at least \d+ GPUs of this kind") as caught:
        plan("llama3-70b", Cluster.of("a100-80gb", 8), global_batch=64, seq=4096)
    needed = int(re.search(r"at least (\d+) GPUs", str(caught.value))[1])  # type: ignore[index]
    assert plan("llama3-70b", Cluster.of("a100-80gb", needed, 8), global_batch=64 * needed, seq=4096).ranked


def test_batch_that_nothing_divides() -> None:
    with pytest.raises(ConfigurationError, match="divides the global batch of 7"):
        plan("llama3-8b", Cluster.of("a100", 1024, 8), global_batch=7, seq=1024)


def test_experts_and_long_sequences_say_what_is_missing() -> None:
    cluster, options = Cluster.of("h100", 16, 8, "ndr400x8"), {"global_batch": 64, "seq": 4096}
    answer = plan("mixtral-8x7b", cluster, **options)
    assert all(p.run.candidate.layout.ep == 1 for p in answer.ranked)
    assert any("expert_parallel_size" in why and "not supported" in why for _, why in answer.rejected)
    elsewhere = plan("mixtral-8x7b", cluster, software="megatron", **options)
    assert any(p.run.candidate.layout.ep > 1 for p in elsewhere.ranked)


def test_arguments_of_what_this_library_cannot_run_are_refused() -> None:
    cluster, options = Cluster.of("h100", 16, 8, "ndr400x8"), {"global_batch": 64, "seq": 4096}
    answer = plan("mixtral-8x7b", cluster, **options)
    with pytest.raises(ConfigurationError, match="'half' is priced for other frameworks"):
        answer.strategy_arguments(answer.explain("tp8-pp2-mbs1-half"))
    elsewhere = plan("mixtral-8x7b", cluster, software="megatron", **options)
    experts = next(p for p in elsewhere.ranked if p.run.candidate.layout.ep > 1)
    with pytest.raises(ConfigurationError, match="expert_parallel_size"):
        elsewhere.strategy_arguments(experts)
    assert "tensor_parallel_size=" in str(answer)
    assert "tensor_parallel_size=" not in str(elsewhere)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "cluster", "options", "most"),
    [
        ("gpt3-175b", Cluster.of("a100-80gb", 1024, 8, "hdr200x8"), {"global_batch": 1536, "seq": 2048}, 5),
        ("llama3-405b", Cluster.of("h100-80gb", 16384, 8, "ndr400x8"), {"global_batch": 2048, "seq": 8192}, 20),
    ],
)
def test_speed(model: str, cluster: Cluster, options: dict[str, Any], most: float) -> None:
    begin = time.process_time()
    plan(model, cluster, **options)
    assert time.process_time() - begin < most


class _Page(HTMLParser):
    """Collects tags and everything that would be loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href", "data")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    answer = plan("gpt3-175b", Cluster.of("a100-80gb", 64, 8, "hdr200x8"), global_batch=64, seq=2048)
    text = answer.html(tmp_path / "report.html").read_text()
    page = _Page()
    page.feed(text)
    assert not page.loads
    assert not page.open
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "http" not in text
    assert page.tags.count("svg") >= 6
    assert page.tags.count("circle") == len(answer.ranked)
    assert "F(0, 0)" in text or "F0" in text or "kind='F'" in text  # boxes of the action list
    with pytest.raises(ConfigurationError, match=r"must end in \.html"):
        answer.html(tmp_path / "report.txt")


CHROME = next((c for c in ("chromium", "chromium-browser", "google-chrome", "chrome") if shutil.which(c)), None)


@pytest.mark.skipif(CHROME is None, reason="no Chromium or Chrome on this machine")
def test_page_in_a_browser(answer: Plan, tmp_path: Path) -> None:
    file = answer.html(tmp_path / "report.html")
    assert CHROME is not None
    quiet = ("--disable-quic", "--no-first-run", "--disable-background-networking")
    command = [CHROME, "--headless", "--no-sandbox", "--disable-gpu", *quiet]
    command.append(f"--screenshot={tmp_path / 'page.png'}")
    subprocess.run([*command, file.as_uri()], check=True, timeout=150, capture_output=True)
    assert (tmp_path / "page.png").stat().st_size > 10_000


COMMAND = "plan --model llama3-8b --gpus 16 --gpu a100-80gb --gpus-per-node 8 --internode hdr200x8 --global-batch 256"


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path, answer: Plan) -> None:
    html, file = tmp_path / "r.html", tmp_path / "strategy.yaml"
    assert main([*COMMAND.split(), "--seq", "4096", "--html", str(html), "--yaml", str(file)]) == 0
    said = capsys.readouterr().out
    assert str(answer).splitlines()[0] in said
    assert html.is_file()
    made = yaml.safe_load(file.read_text())["trainer"]["strategy"]
    assert made["class_path"] == "lightning_3d.ThreeDStrategy"
    strategy = lightning_3d.ThreeDStrategy(**made["init_args"])
    assert strategy.layout.tp == answer.best.run.candidate.layout.tp
    assert main([*COMMAND.split(), "--seq", "4096", "--explain", "tp4-pp2-mbs1"]) == 0
    assert "GiB of a GPU by stage" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (COMMAND, "give seq"),
        ("plan --gpus 8 --gpu h100 --global-batch 8 --seq 128", "give either --model"),
        ("plan --model llama3-8b --gpu h100 --global-batch 8 --seq 128", "--gpus is missing"),
        ("plan --model llama3-8b --gpus 8 --gpu h10 --global-batch 8 --seq 128", "Did you mean 'h100"),
        ("plan --model llama3-8b --gpus 12 --gpu h100 --global-batch 8 --seq 128", "not a multiple"),
        ("plan --model llama3-8b --gpus 8 --gpu v100 --global-batch 8 --seq 128", "no fast bf16"),
        (COMMAND + " --seq 64 --software megatorn", "Did you mean 'megatron'"),
        (COMMAND + " --seq 64 --recipe bf16", "recipe 'bf16' is not known"),
    ],
)
def test_wrong_questions(arguments: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    assert error in capsys.readouterr().err


def test_cluster_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "gpu: a100-80gb\ngpus: 16\ngpus_per_node: 4\ninternode: roce100x2\nefficiency: 0.5\nmemory_gib: 40\n"
    )
    cluster = read_cluster(file)
    assert (cluster.nodes, cluster.nics, cluster.nic) == (4, 2, 12.5e9)
    assert cluster.gpu.memory == 40 * 2**30
    half, whole = (
        plan("gpt2-xl", c, global_batch=64, seq=1024).explain("tp1-pp1-mbs1-full").time.compute
        for c in (cluster, read_cluster(_without(file, "efficiency")))
    )
    assert half == pytest.approx(2 * whole)
    file.write_text("gpu: a100-80gb\ngpu_count: 16\n")
    with pytest.raises(ConfigurationError, match="'gpu_count' is not known"):
        read_cluster(file)
    with pytest.raises(ConfigurationError, match="written like hdr200x8"):
        read_internode("fast")


def _without(file: Path, key: str) -> Path:
    other = file.with_name("other.yaml")
    other.write_text("\n".join(line for line in file.read_text().splitlines() if not line.startswith(key)))
    return other


def test_calibrate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """This machine, measured, can be planned with."""
    from lightning_3d.planner import calibrate

    monkeypatch.setattr(calibrate, "_SECONDS", 0.01)
    file = tmp_path / "here.yaml"
    assert main(["plan", "--calibrate", str(file)]) == 0
    assert "use it: " in capsys.readouterr().out
    cluster = read_cluster(file)
    assert cluster.gpu.bf16 > 1e9
    assert cluster.gpu.memory_bandwidth > 1e8
    answer = plan("gpt2", cluster, global_batch=4 * cluster.gpus, seq=64, precision="fp32")
    assert answer.best.seconds > 0
    assert main(["plan", "--calibrate", str(tmp_path / "here.txt")]) == 2
