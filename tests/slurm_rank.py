"""A rank in tests of launching, which reacts to signals as `fourfold train` does, without training.

It waits for a warning, then saves the received signals and exits with 85.
"""

import json
import signal
import sys
import time
from pathlib import Path

LIMIT_S = 120.0  # in case the test has failed


def main(folder: Path) -> int:
    (folder / "young").touch()
    import torch.distributed as dist  # takes seconds, in which a warning is ignored

    heard: list[str] = []
    for warning in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(warning, lambda number, frame: heard.append(signal.Signals(number).name))
    dist.init_process_group("gloo")
    try:
        (folder / "listening").touch()
        end = time.monotonic() + LIMIT_S
        while not heard:
            assert time.monotonic() < end, "this rank was not warned"
            time.sleep(0.05)
        time.sleep(0.3)  # a save takes a while, in which a second warning may come
        (folder / "saved.json").write_text(json.dumps(heard))
        return 85
    finally:
        dist.destroy_process_group()  # otherwise its threads may abort the process


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
