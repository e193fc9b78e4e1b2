from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from lightning_3d.observe import failure
from lightning_3d.observe.alive import Neighbours, _machine
from lightning_3d.testing import DistributedError, preload, run_distributed
from tests.observe import failures

preload("tests.observe.failures")
ERROR = re.compile(r"^(\w+Error: .*|SystemExit: .*|lightning_3d: (?!tp).*)$", re.MULTILINE)
GONE = r"rank {} .* is gone"
TRUE = {
    "loader": "Caught ValueError in DataLoader",
    "exit": "SystemExit: 3",
    "_exit": GONE.format(0),
    "kill": GONE.format(1),
    "kill first": GONE.format(0),
    "kill while the other sleeps": GONE.format(1),
}


@pytest.mark.parametrize("kind", list(failures.WHERE))
def test_all_end_within_ten_seconds_and_the_first_error_is_the_true_one(kind: str, tmp_path: Path) -> None:
    with pytest.raises(DistributedError) as error:
        run_distributed(failures.fit, 2, kind, str(tmp_path), init_process_group=False, timeout=60)
    ended = time.monotonic()
    assert "did not finish" not in str(error.value), "a rank had to be killed"
    assert ended - float((tmp_path / "failed_at").read_text()) < 10
    printed = (tmp_path / "printed").read_text()
    errors = ERROR.findall(printed)
    assert errors, printed
    assert re.search(TRUE.get(kind, f"the true error, in the {kind}"), errors[0]), printed


def test_the_end_of_the_process_that_hosts_the_store_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host = torch.distributed.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    store = torch.distributed.TCPStore("127.0.0.1", host.port, None, is_master=False)
    ended = threading.Event()
    monkeypatch.setattr(failure.os, "_exit", lambda code: ended.set())
    watch = failure.FailureWatch(store, 1, "stage 0", 1, interval=0.05, grace=0.05)
    watch.start()
    assert not ended.wait(0.3)
    del host
    assert ended.wait(20)
    assert "ending rank 1 (stage 0) because the process that hosts the run's key-value store" in capsys.readouterr().err
    watch.report(ValueError("mine"))
    assert "could not tell the other ranks" in capsys.readouterr().err
    watch.stop()


def test_how_a_child_ended_is_told_and_one_that_was_done_may_go() -> None:
    store = torch.distributed.HashStore()
    neighbours = Neighbours(store, 0, "stage 0", 4)
    script = "import json, os, sys; print(os.getpid(), flush=True); sys.stdin.read(); os._exit(3)"
    children = []
    for rank in (1, 2):
        child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        children.append(child)
        store.set(f"process/{rank}", json.dumps([_machine(), child.pid, f"stage {rank}"]))
    store.set("process/3", json.dumps(["another machine", children[0].pid, "stage 3"]))
    assert neighbours.gone() == {}
    children[0].kill()
    children[1].communicate(timeout=20)
    found: dict[int, str] = {}
    until = time.monotonic() + 20
    while len(found) < 2 and time.monotonic() < until:
        found = neighbours.gone()
    assert found[1].startswith("rank 1 (stage 1) is gone: its process was killed by SIGKILL")
    assert found[2].startswith("rank 2 (stage 2) is gone: its process ended")
    neighbours.forget(1)
    assert set(neighbours.gone()) == {2}
    neighbours.close()
    assert neighbours.gone() == {}
    children[0].wait(20)
    for child in children:
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()
