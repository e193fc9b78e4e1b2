"""Start N gloo processes fast, and compare what they computed with one process.

    results = run_distributed(my_function, 4, arg1, arg2)      # a list, one entry per rank

Processes are forked from a server that has already imported torch and Lightning, so a launch costs about 0.2 s.
Every rank's traceback is reported; a hard timeout ends them all.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing as mp
import os
import pickle
import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
_STACKS = "LIGHTNING_3D_STACKS"
_PRELOAD = ["torch", "torch.distributed", "lightning.pytorch", "lightning_3d"]


class DistributedError(AssertionError):
    """A rank raised, died, or did not finish in time. The message holds every rank's traceback."""


def preload(*modules: str) -> None:
    """Import more modules once, in the server all processes are forked from. Call before the first launch."""
    _PRELOAD.extend(m for m in modules if m not in _PRELOAD)


def run_distributed(
    function: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    init_process_group: bool = True,
    backend: str = "gloo",
    env: dict[str, str] | None = None,
) -> list[T]:
    """Call `function(*args)` in `world_size` new processes that form one process group.

    The processes see the environment `torchrun` would give them, so a `Trainer` inside works as it does there. Each
    runs with one thread. `function`, `args` and the results must be picklable (top-level functions).

    Args:
        function: What every rank runs.
        world_size: Number of processes.
        *args: Its arguments.
        timeout: Seconds until all processes are killed and the call fails.
        init_process_group: Make the default process group before `function` runs.
        backend: Backend of that group.
        env: More environment variables.

    Returns:
        The ranks' results, in order of rank.

    Raises:
        DistributedError: A rank raised, died or hung.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    results: Any = context.Queue()
    settings = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
        **(env or {}),
    }
    stacks = tempfile.TemporaryDirectory(prefix="lightning_3d_")
    settings[_STACKS] = stacks.name
    processes = [
        context.Process(
            target=_child, args=(rank, settings, init_process_group and backend, timeout, results, function, args)
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        return _collect(processes, results, timeout, Path(stacks.name))
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # it may end between the look and the signal
                if process.is_alive():
                    process.kill()
            process.join()
        results.close()
        stacks.cleanup()
        del store


def _collect(processes: Sequence[Any], results: Any, timeout: float, stacks: Path) -> list[Any]:
    """Wait for every rank's result; give the others a few seconds once one has failed."""
    done: dict[int, tuple[bool, Any]] = {}
    deadline = time.monotonic() + timeout
    while len(done) < len(processes) and time.monotonic() < deadline:
        try:
            rank, ok, value = results.get(timeout=0.2)
        except queue.Empty:
            dead = [r for r, p in enumerate(processes) if not p.is_alive() and r not in done]
            if dead:
                try:
                    rank, ok, value = results.get(timeout=1.0)
                except queue.Empty:
                    for r in dead:
                        done[r] = (False, f"the process ended with exit code {processes[r].exitcode} and no result")
                    deadline = min(deadline, time.monotonic() + 5.0)
                    continue
            else:
                continue
        done[rank] = (ok, value)
        if not ok:
            deadline = min(deadline, time.monotonic() + 5.0)
    failed = [r for r in range(len(processes)) if not done.get(r, (False, None))[0]]
    if failed:
        text = [f"{len(failed)} of {len(processes)} ranks failed (timeout {timeout:g} s):"]
        for r in failed:
            text.append(f"--- rank {r} ---\n{done[r][1] if r in done else _stack_of(stacks / str(r))}")
        raise DistributedError("\n".join(text))
    return [pickle.loads(done[r][1]) for r in range(len(processes))]


def _stack_of(file: Path) -> str:
    found = file.read_text() if file.is_file() else ""
    return f"did not finish; it was here:\n{found}" if found else "did not finish"


def _child(
    rank: int,
    settings: dict[str, str],
    backend: str | bool,
    timeout: float,
    results: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(settings, RANK=str(rank), LOCAL_RANK=str(rank), ROLE_WORLD_SIZE=settings["WORLD_SIZE"])
    torch.set_num_threads(1)
    stack = open(Path(settings[_STACKS]) / str(rank), "w")  # noqa: SIM115  (faulthandler writes to it at the end)
    faulthandler.dump_traceback_later(max(timeout - 1.0, 0.5), file=stack)
    try:
        if backend:
            dist.init_process_group(str(backend), timeout=timedelta(seconds=timeout))
        value = function(*args)
        # by value: torch's own way shares memory with a process that must then outlive the reader
        results.put((rank, True, pickle.dumps(value)))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
    results.close()
    results.join_thread()
    # do not run the destructors of a half-dead process group
    os._exit(0)


def full_parameters(strategy: Any) -> dict[str, torch.Tensor]:
    """Every parameter as one device would have it, by name, on every rank. Collective over all ranks.

    Args:
        strategy: A `ThreeDStrategy` after set-up.
    """
    state = strategy.engine.state()
    return {record.name: state.parameter(record).full_tensor() for record in state.records}


def full_gradients(strategy: Any) -> dict[str, torch.Tensor]:
    """Every parameter's gradient as the optimizer sees it, as one device would have it; zeros where it has none.

    Collective over all ranks; call it where gradients are final (`on_before_optimizer_step`).
    """
    state = strategy.engine.state()
    return {record.name: state.gradient(record).full_tensor() for record in state.records}


def relative_error(got: torch.Tensor | None, want: torch.Tensor | None) -> float:
    """Largest difference relative to the largest entry of `want`; a missing gradient counts as zeros."""
    if got is None and want is None:
        return 0.0
    if want is None:
        want = torch.zeros_like(got)  # type: ignore[arg-type]
    if got is None:
        got = torch.zeros_like(want)
    if tuple(got.shape) != tuple(want.shape):
        return float("inf")
    if not got.numel():
        return 0.0
    exact = torch.complex128 if want.is_complex() or got.is_complex() else torch.float64
    scale = want.detach().to(exact).abs().max().item()  # a NaN anywhere makes the result NaN, which passes no bound
    difference = (got.detach().to(exact) - want.detach().to(exact)).abs().max().item()
    return difference / scale if scale > 1e-13 else difference
