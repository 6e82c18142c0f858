"""A script that trains with the mixin, however its ranks were started; writes the losses that each rank logged.

Called with a folder, and a grid.
"""

import json
import sys
from pathlib import Path

from transformers import Trainer, TrainingArguments

import fourfold as ff
from benchmarks.trainers.recipes import Rows, arguments, model
from fourfold.integrations.hf import trainer


def main(folder: Path, shape: tuple[int, int, int, int]) -> None:
    grid = ff.Grid.create(shape)
    args = TrainingArguments(**arguments(str(folder), 2) | {"save_strategy": "no"})
    run = trainer(Trainer)(model=model(), args=args, grid=grid, train_dataset=Rows(32))
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    rank = grid.mesh.get_rank()
    is_first = [run.is_world_process_zero(), run.args.should_save]
    (folder / f"{rank}.json").write_text(json.dumps({"losses": losses, "is_first": is_first}))


if __name__ == "__main__":
    data, z, y, x = map(int, sys.argv[2].split(","))
    main(Path(sys.argv[1]), (data, z, y, x))
