"""A rank in tests of launching: what `fourfold train` promises a batch system, without the training.

It waits to be warned, then saves what it heard and ends with 85.
"""

import json
import signal
import sys
import time
from pathlib import Path

LIMIT_S = 120.0  # of a rank whose test has failed


def main(folder: Path) -> int:
    (folder / "young").touch()
    import torch.distributed as dist  # takes seconds, in which a warning goes unheard

    heard: list[str] = []
    for warning in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(warning, lambda number, frame: heard.append(signal.Signals(number).name))
    dist.init_process_group("gloo")
    try:
        (folder / "listening").touch()
        end = time.monotonic() + LIMIT_S
        while not heard:
            assert time.monotonic() < end, "nobody warned this rank"
            time.sleep(0.05)
        time.sleep(0.3)  # a save takes a while, and takes a second warning with a good grace
        (folder / "saved.json").write_text(json.dumps(heard))
        return 85
    finally:
        dist.destroy_process_group()  # else its threads may abort the process, whatever its status is


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
