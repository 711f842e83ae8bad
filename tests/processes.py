"""Runs a function on several processes that form a gloo process group, and returns the results.

The processes are forked from a server that has torch imported already.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fork_server import Ended, Python, context

CRASHES = [-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS]


class Crashed(AssertionError):
    """A rank was ended by a fault in compiled code."""


def run(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout: float = 120,
    died: tuple[int, ...] = (),
    **environ: str,
) -> list[Any]:
    """Run ``function(*args)`` on every rank and return the results by rank. An error on a rank is
    an error of the caller, except on the ranks in ``died``.

    Ranks of which one crashes are started once more, with a warning that says where it crashed:
    very rarely, with torch 2.13, a thread of gloo finds its heap damaged and malloc ends the
    process. Why is not known.
    """
    try:
        return _run(function, ranks, *args, timeout=timeout, died=died, **environ)
    except Crashed as crash:
        warnings.warn(f"{crash} The ranks are started once more.", stacklevel=2)
        return _run(function, ranks, *args, timeout=timeout, died=died, **environ)


def _run(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout: float,
    died: tuple[int, ...],
    **environ: str,
) -> list[Any]:
    # Triton reads this variable when it is imported, which the server has done.
    start = mp.get_context("spawn") if "TRITON_INTERPRET" in environ else context
    with tempfile.TemporaryDirectory() as folder:
        each = [
            (pickle.dumps((function, args)), rank, ranks, folder, timeout, environ)
            for rank in range(ranks)
        ]
        processes = [start.Process(target=_rank, args=given, daemon=True) for given in each]
        for process in processes:
            process.start()
        for process in processes:
            process.join(4 * timeout)
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for rank in late:
            os.kill(processes[rank].pid, signal.SIGABRT)  # it writes where it hangs
            processes[rank].join()
        results: list[Any] = []
        errors = []  # all of them: when one rank fails, the others lose their connection to it
        for rank in range(ranks):
            file = Path(folder, f"result{rank}")
            if rank in died:
                results.append(None)
                continue
            if rank in late or not file.exists():
                status = processes[rank].exitcode
                ended = "hangs" if rank in late else f"died with exit code {status}"
                fault = Path(folder, f"fault{rank}").read_text()
                crashed = rank not in late and status in CRASHES
                raise (Crashed if crashed else AssertionError)(f"Rank {rank} {ended}. {fault}")
            result, error = pickle.loads(file.read_bytes())
            if error is not None:
                errors.append(f"Rank {rank} failed:\n{error}")
            results.append(result)
        if errors:
            raise AssertionError("\n".join(errors))
        return results


def as_torchrun(ranks: int, *command: str) -> list[Ended]:
    """Run ``python *command`` on every rank with the variables that torchrun sets, and return how
    each ended."""
    # The ranks meet at this store, as at that of torchrun's agent: its port cannot be taken.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    variables = {
        **{"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)},
        **{"TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": str(ranks)},
    }
    started = [
        Python(*command, RANK=str(rank), LOCAL_RANK=str(rank), **variables) for rank in range(ranks)
    ]
    return [process.end() for process in started]


def _rank(
    work: bytes, rank: int, ranks: int, folder: str, timeout: float, environ: dict[str, str]
) -> None:
    torch.set_num_threads(1)
    fault = Path(folder, f"fault{rank}").open("w")  # noqa: SIM115 (open as long as the process)
    faulthandler.enable(fault)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), **environ)
    # Unpickling imports the modules of the function, so the environment must be set before it.
    function, args = pickle.loads(work)
    store = dist.FileStore(str(Path(folder, "store")), ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout)
    )
    result = error = None
    try:
        result = function(*args)
    except BaseException:
        error = traceback.format_exc()
    Path(folder, f"part{rank}").write_bytes(pickle.dumps((result, error)))
    Path(folder, f"part{rank}").rename(Path(folder, f"result{rank}"))
    sys.stdout.flush()
    if error is None:
        dist.destroy_process_group()
    # After an error other ranks may be gone: a regular exit would wait for them until the timeout.
    os._exit(0)
