"""Do the trainers that people use train on a grid exactly as in one process?

Each stock trainer runs in one process; then on grids of four and eight ranks, with the same rows in the same order: those of Hugging Face by
`fourfold.integrations.hf.trainer`, Lightning's, and a loop with Fabric, by its own `ModelParallelStrategy`. Compared: the loss, the norm of the gradient and the loss of evaluation at each step, what `compute_metrics`
returns, the rewards and other metrics of `DPOTrainer`, and the weights that `save_model` writes. The last row of each saves on its first grid in the middle, and goes on
on another one.

    python -m benchmarks.trainers
    python -m benchmarks.trainers --only Trainer
    python -m benchmarks.trainers --break repeated-rows   # plants a fault: has to fail

The data has a last batch that is not full, but for preferences. Errors are relative to the value, or to the largest entry of a weight; those of rewards are relative to 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time

from benchmarks.ranks import RankError, RankPool
from benchmarks.trainers.faults import FAULTS
from benchmarks.trainers.outcome import BAR, Shape, ranks_of, worst_error
from benchmarks.trainers.runs import LOOPS, NAMES, alone, on_grid

GRIDS: tuple[Shape, ...] = ((1, 1, 2, 2), (1, 2, 1, 2), (2, 2, 1, 1), (1, 2, 2, 2))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=NAMES)
    parser.add_argument("--grids", type=_shape, nargs="+", default=list(GRIDS))
    parser.add_argument(
        "--break",
        dest="fault",
        choices=FAULTS,
        help="plant a fault in what shows it: the command has to fail",
    )
    options = parser.parse_args(arguments)
    start_s = time.monotonic()
    good = rows = 0
    with RankPool(8, quiet=True) as pool:
        for name in options.only or FAULTS.get(options.fault, NAMES):
            (stock,) = pool.run(alone, 1, name)
            cases = [(grid, False) for grid in options.grids]
            others = [grid for grid in options.grids[1:] if ranks_of(grid) == ranks_of(options.grids[0])]
            others = [] if name in LOOPS else others
            cases[1:1] = [(grid, True) for grid in others[:1]]  # after the first, which saves
            with tempfile.TemporaryDirectory() as folder:
                for grid, resumes in cases:
                    words = f"{name:24} {grid!s:14} {'resumed' if resumes else '':8}"
                    rows += 1
                    try:
                        found = pool.run(on_grid, ranks_of(grid), name, grid, folder, options.fault, resumes)[
                            0
                        ]
                    except RankError as error:
                        print(f"{words} failed: {str(error).strip().splitlines()[-1]}", flush=True)
                        continue
                    logged, weights = worst_error(found, stock)
                    is_good = logged <= BAR and weights <= BAR
                    good += is_good
                    print(
                        f"{words} logged {logged:.1e}  weights {weights:.1e}{'' if is_good else '   WRONG'}",
                        flush=True,
                    )
    print(f"trainers: {good}/{rows} as in one process, within {BAR:g}, {time.monotonic() - start_s:.0f} s")
    return 0 if good == rows else 1


def _shape(text: str) -> Shape:
    data, z, y, x = map(int, text.split(","))
    return data, z, y, x


if __name__ == "__main__":
    sys.exit(main())
