"""QLoRA in Hugging Face's Trainer: what it trains and writes is that of LoRA on the dequantised weights, bit for bit."""

import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.ranks import RankPool
from benchmarks.trainers import recipes
from benchmarks.trainers.runs import as_launched
from fourfold import Lora
from fourfold.integrations.hf import trainer
from tests.parallel.test_qlora import round_blocks


def trained(folder: Path, quantization: Any) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """(what was logged, the adapter that was saved)."""

    def make() -> Any:
        return recipes.model() if quantization == "nf4" else round_blocks(recipes.model())

    def on_grid(kind: Any) -> Any:
        parallel = {"lora": Lora(6, 9, quantization=quantization)}
        return functools.partial(trainer(kind), grid=(1, 2, 1, 1), parallel=parallel)

    with as_launched(dist.get_rank(), dist.get_world_size()):
        made = recipes.plain(on_grid, str(folder), 2, make)
        made.train()
        made.save_model(str(folder / "saved"))
    logged = [
        {k: v for k, v in line.items() if k in ("loss", "grad_norm")} for line in made.state.log_history
    ]
    return logged, load_file(folder / "saved/adapter_model.safetensors")


def test_a_trainer_trains_adapters_of_packed_weights(pool: RankPool, tmp_path: Path) -> None:
    (packed, adapter), (plain, wanted) = (
        pool.run(trained, 2, tmp_path / name, name)[0] for name in ("nf4", "none")
    )
    assert packed == plain
    assert sum("grad_norm" in line for line in packed) == recipes.STEPS
    assert all(torch.equal(adapter[name], wanted[name]) for name in wanted)
