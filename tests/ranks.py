"""Running a function on several ranks of one process group, one process each."""

from __future__ import annotations

import faulthandler
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

POLL_SECONDS = 1.0
# Before a rank is ended for being late, it tells where it is.
TELL_SECONDS = 5.0


def run_ranks(
    function: Callable[[torch.device], Any], device_type: str, *, world: int = 2, seconds: float
) -> list[Any]:
    """What `function` returns on each rank, given that rank's device.

    The ranks share Inductor's cache folder, which is new. `function` is importable by name.

    Raises:
        TimeoutError: after `seconds`; the processes are ended.
        torch.multiprocessing.ProcessRaisedException: what a rank raised.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = torch.multiprocessing.spawn(
            _rank, (function, device_type, world, folder, seconds), nprocs=world, join=False
        )
        deadline = time.monotonic() + seconds
        try:
            while not ranks.join(timeout=POLL_SECONDS):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the ranks have not ended after {seconds:g} s")
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        return [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(world)]


def _rank(
    rank: int,
    function: Callable[[torch.device], Any],
    device_type: str,
    world: int,
    folder: str,
    seconds: float,
) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/caches"
    # Making them costs more than all that is compiled here.
    os.environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"
    faulthandler.dump_traceback_later(max(1.0, seconds - TELL_SECONDS))
    device = torch.device(device_type, rank if device_type == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=seconds),
        device_id=device if device.type == "cuda" else None,
    )
    _result(folder, rank).write_bytes(pickle.dumps(function(device)))
    # NCCL waits for captured graphs that hold its communicator.
    torch.compiler.reset()
    dist.barrier()
    dist.destroy_process_group()


def _result(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank-{rank}"
