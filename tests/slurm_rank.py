"""A rank of a job in the Slurm tests: what `fourfold train` promises a batch system, without the training.

It counts steps together with the others, and on a warning saves the count and ends with 85.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

MORE_STEPS = 3  # after a resume; before one it goes on until it is warned
LIMIT_S = 120.0  # of a rank whose test has failed


def main(folder: Path) -> int:
    (folder / "young").touch()
    import torch.distributed as dist  # takes seconds, in which a warning goes unheard

    try:
        return count(folder)
    finally:
        dist.destroy_process_group()  # else its threads may abort the process, whatever its status is


def count(folder: Path) -> int:
    import torch
    import torch.distributed as dist

    heard: list[str] = []
    for warning in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(warning, lambda number, frame: heard.append(signal.Signals(number).name))
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    saved = folder / "saved.json"
    first = json.loads(saved.read_text())["step"] if saved.exists() else 0
    print(f"rank {rank} of {world} on {os.environ.get('SLURMD_NODENAME')} starts at step {first}", flush=True)
    (folder / f"rank-{rank}-from-{first}").touch()
    step = first
    end = time.monotonic() + LIMIT_S
    while not first or step < first + MORE_STEPS:
        time.sleep(0.05)
        step += 1
        assert time.monotonic() < end, "nobody warned this rank"
        warned = torch.tensor(bool(heard), dtype=torch.int64)
        dist.all_reduce(warned)
        if warned:
            patience = time.monotonic() + 10  # the signal reaches two nodes at two times
            while not heard and time.monotonic() < patience:
                time.sleep(0.01)
            by_rank: list[list[str]] = [[] for _ in range(world)]
            dist.all_gather_object(by_rank, heard)
            if rank == 0:
                time.sleep(0.3)  # a save takes a while, and takes a second warning with a good grace
                saved.write_text(json.dumps({"step": step, "heard": by_rank}))
            dist.barrier()
            return 85
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
