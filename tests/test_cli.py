from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import lightning_3d
from lightning_3d import cli
from lightning_3d.errors import ConfigurationError
from lightning_3d.layout import Layout
from lightning_3d.observe import save_trace
from tests.observe.simulated import traces

FACTORY = """
import neighbour

def make():
    return neighbour.MODULE, [1, 2]

def broken():
    return 3
"""


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour.py").write_text("MODULE = 'a module'")
    (tmp_path / "models_of_test_cli.py").write_text(FACTORY)
    return str(tmp_path / "models_of_test_cli.py")


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_verify_hands_module_batch_and_layout_over(factory, monkeypatch, capsys, ok: bool, code: int) -> None:
    calls = []

    class Report(SimpleNamespace):
        def __str__(self) -> str:
            return "the report"

    def verify(*args: object) -> Report:
        calls.append(args)
        return Report(ok=ok)

    monkeypatch.setattr(lightning_3d, "verify", verify, raising=False)
    assert cli.main(["verify", "--module", f"{factory}:make", "--layout", "tp2-pp2"]) == code
    assert calls == [("a module", [1, 2], Layout(tp=2, pp=2))]
    assert capsys.readouterr().out == "the report\n"


def test_explain_prints_the_table(factory, monkeypatch, capsys) -> None:
    monkeypatch.setattr(lightning_3d, "explain", lambda *args: f"table of {args[2]}", raising=False)
    assert cli.main(["explain", "--module", f"{factory}:make", "--layout", "tp2"]) == 0
    assert capsys.readouterr().out == "table of tp2-pp1-dp1-zero1\n"


@pytest.mark.parametrize(
    ("module", "layout", "message"),
    [
        ("{factory}", "tp2", "must name a function in a file"),
        ("{factory}:mak", "tp2", "has no function 'mak'. Did you mean 'make'"),
        ("{factory}:broken", "tp2", "returned int; it must return a pair"),
        ("nowhere.py:make", "tp2", "there is no file 'nowhere.py'"),
        ("no_such_package_3d:make", "tp2", "cannot import 'no_such_package_3d'"),
        ("{factory}:make", "tp2-qq3", "cannot read 'qq3'"),
    ],
)
def test_wrong_questions_get_an_answer_and_code_2(factory, capsys, module: str, layout: str, message: str) -> None:
    code = cli.main(["explain", "--module", module.format(factory=factory), "--layout", layout])
    error = capsys.readouterr().err
    assert code == 2
    assert error.startswith("lightning-3d explain: ")
    assert message in error


def test_plan_needs_a_model(capsys) -> None:
    assert cli.main(["plan"]) == 2
    assert "give either --model NAME" in capsys.readouterr().err


def test_timeline_draws_a_folder(tmp_path, capsys) -> None:
    for trace in traces(2, 4):
        save_trace(trace, tmp_path)
    picture, viewer = tmp_path / "p.svg", tmp_path / "c.json"
    arguments = ["timeline", str(tmp_path), "--picture", str(picture), "--chrome", str(viewer)]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert "stage 1 rank 1 |" in out
    assert "bubble measured 0.200" in out
    assert picture.exists()
    assert viewer.exists()
    assert cli.main(["timeline", str(tmp_path), "--step", "99"]) == 2


def test_python_m_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "lightning_3d", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for command in ("demo", "verify", "explain", "plan", "checkpoint", "timeline"):
        assert command in done.stdout


def test_checkpoint_commands_call_the_checkpoint_room(monkeypatch, capsys) -> None:
    calls = []
    monkeypatch.setattr("lightning_3d.checkpoint.inspect_checkpoint", lambda path: f"contents of {path}")
    monkeypatch.setattr("lightning_3d.checkpoint.export_checkpoint", lambda *args: calls.append(args))
    assert cli.main(["checkpoint", "inspect", "run/last"]) == 0
    assert capsys.readouterr().out == "contents of run/last\n"
    assert cli.main(["checkpoint", "export", "run/last", "model.ckpt"]) == 0
    assert calls == [(Path("run/last"), Path("model.ckpt"), "")]


def test_exporting_a_plain_file_says_that_it_is_plain(tmp_path, capsys) -> None:
    plain = tmp_path / "plain.ckpt"
    plain.write_bytes(b"x")
    assert cli.main(["checkpoint", "export", str(plain), str(tmp_path / "out.ckpt")]) == 2
    assert "plain checkpoint already" in capsys.readouterr().err


def test_inspecting_what_is_no_checkpoint_is_an_answer_not_a_traceback(tmp_path, capsys) -> None:
    assert cli.main(["checkpoint", "inspect", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("lightning-3d checkpoint: ")


def test_arguments_in_another_order_are_named(tmp_path, capsys) -> None:
    file = tmp_path / "swapped_factory.py"
    file.write_text("import torch\n\ndef factory():\n    return [1], torch.nn.Linear(2, 2)\n")
    assert cli.main(["explain", "--module", f"{file}:factory", "--layout", "tp2"]) == 2
    assert "is a list, not a LightningModule. The order is module, batch, layout" in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match="The order is"):
        lightning_3d.explain([1], None, "tp2")
    with pytest.raises(ConfigurationError, match=r"layout is \{'tp': 2\}"):
        lightning_3d.explain(torch.nn.Linear(2, 2), None, {"tp": 2})


def test_a_picture_of_another_kind_is_refused(tmp_path, capsys) -> None:
    assert cli.main(["timeline", str(tmp_path), "--picture", "a.xyz"]) == 2
    assert "must end in .png or .svg" in capsys.readouterr().err
