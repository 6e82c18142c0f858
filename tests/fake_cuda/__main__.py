"""Steps on a fake CUDA device, in a process of its own: python -m tests.fake_cuda LIBRARY NAME...

Prints a line of JSON for each of these ways and faults: [its name, the number of kernels, what was found].
"""

import ctypes
import json
import sys
from typing import Any


def use_fake_device(library: str) -> None:
    """Before anything else: PyTorch looks for devices when it is imported.

    `torch.cuda` of a build without CUDA raises; the streams and events of `torch.accelerator` are those of the fake device.
    """
    ctypes.CDLL(library)
    import torch

    changes: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "Stream": torch.Stream,
        "Event": torch.Event,
        "current_stream": lambda device=None: torch.accelerator.current_stream(),
        "stream": lambda stream: stream,
    }
    for name, value in changes.items():
        setattr(torch.cuda, name, value)


def main(library: str, *names: str) -> None:
    use_fake_device(library)
    from tests.fake_cuda.steps import FAULTS, WAYS, steps

    for name in names:
        found = FAULTS[name]() if name in FAULTS else steps(*WAYS[name])
        print(json.dumps([name, *found]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
