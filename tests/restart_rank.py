"""A rank in tests of restarts: in the first attempt one rank dies, in the second all end."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from fourfold.mesh.rendezvous import join_world


def main(folder: Path) -> None:
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    join_world(timeout_s=30)
    # A separate group, as in a run: its addresses are in the store too.
    group = dist.new_group(backend="gloo")
    met = torch.ones(())
    dist.all_reduce(met, group=group)
    (folder / f"{attempt}-{dist.get_rank()}").write_text(str(int(met)))
    if attempt == "0":
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(met, group=group)  # fails
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
