"""A rank in tests of elastic runs: it writes the world size, and exits without saving when told to stop."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from fourfold.mesh.rendezvous import join_world
from fourfold.processes import CONTINUE


def main(folder: Path) -> int:
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    join_world(timeout_s=30)
    (folder / f"{os.environ['RANK']}.txt").open("a").write(f"{dist.get_world_size()} ")
    while True:
        time.sleep(0.1)
        flags = torch.tensor([float(bool(asked)), float((folder / "end").exists())])
        dist.all_reduce(flags)
        if flags.any():
            dist.destroy_process_group()
            return CONTINUE if flags[0] else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
