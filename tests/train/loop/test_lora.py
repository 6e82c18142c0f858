"""A run that trains adapters: as stock PyTorch does, resumed on another grid, saved and exported without the frozen weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.ranks import RankPool
from benchmarks.stock import Stock
from fourfold.cli.main import main
from fourfold.config.run_file import ConfigError, from_dict
from fourfold.config.schema import RunConfig
from fourfold.export import export
from tests.parallel.test_lora import LORA, adapt, write_adapter
from tests.parallel.test_qlora import round_blocks
from tests.training import on, train, write_run


def stock_losses(run: RunConfig) -> dict[int, float]:
    stock = Stock(run)
    if run.lora.quantization == "nf4":
        round_blocks(stock.model)
    section = run.optimizer
    stock.optimizer = torch.optim.AdamW(
        adapt(stock.model).values(),
        lr=section.lr,
        betas=section.betas,
        eps=section.eps,
        weight_decay=section.weight_decay,
    )
    return dict(stock.losses())


@pytest.mark.parametrize(
    ("kind", "quantization"),
    [("llama", "none"), pytest.param("wide llama", "nf4", marks=pytest.mark.nightly)],
)
def test_a_run_trains_adapters_and_resumes_on_another_grid(
    pool: RankPool, tmp_path: Path, kind: str, quantization: str
) -> None:
    folder = write_adapter(tmp_path / "adapter", kind)
    lora = {"rank": LORA.rank, "alpha": LORA.alpha, "adapter": str(folder), "quantization": quantization}
    values = write_run(tmp_path, kind) | {"lora": lora}
    first, second = (
        on(values, shape, batch={"micro_batch_sequences": 2}) for shape in ((1, 2, 1, 2), (1, 1, 2, 2))
    )
    wanted = stock_losses(first)
    ((begun, _), *_) = pool.run(train, 4, first, saves=True, stop_at=3)
    ((rest, _), *_) = pool.run(train, 4, second, saves=True)
    found = begun | rest
    assert found.keys() == wanted.keys()
    assert max(abs(found[step] - loss) / loss for step, loss in wanted.items()) < 1e-5

    exported = export(tmp_path / "checkpoints", tmp_path / "exported")
    assert "adapter_config.json" in exported.files
    config = json.loads((tmp_path / "exported/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (LORA.rank, LORA.alpha, "LORA")
    tensors = load_file(tmp_path / "exported/adapter_model.safetensors")
    assert tensors.keys() == load_file(folder / "adapter_model.safetensors").keys()
    assert not torch.equal(
        *(
            next(iter(load_file(at / "adapter_model.safetensors").values()))
            for at in (folder, tmp_path / "exported")
        )
    )
    saved = sum(file.stat().st_size for file in (tmp_path / "checkpoints/step-6").glob("*.safetensors"))
    assert saved < 4.2 * sum(t.nbytes for t in tensors.values())  # with two moments each, and headers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"config": "a"}}, "set model.pretrained"),
        ({"engine": {"float8": "rowwise_with_gw_hp", "precision": "bf16"}}, "use one of the two"),
        ({"optimizer": {"name": "muon"}}, "Muon is for whole matrices"),
        (
            {"lora": {"quantization": "nf4"}},
            r"lora\.quantization='nf4' has no effect without adapters; set lora\.rank",
        ),
        (
            {"lora": {"rank": 4, "quantization": "nf4"}, "engine": {"compile": True}},
            r"lora\.quantization='nf4' with engine\.compile=true",
        ),
        (
            {"lora": {"rank": 4, "dropout": 0.1}, "engine": {"compile": True}},
            r"lora\.dropout=0\.1 with engine",
        ),
        ({"lora": {"rank": 4, "dropout": 1.0}}, "less than 1"),
    ],
)
def test_what_adapters_do_not_go_with_is_refused(changes: dict[str, object], message: str) -> None:
    given = {"model": {"pretrained": "a"}, "data": {"sources": [{"path": "b"}]}, "lora": {"rank": 4}}
    with pytest.raises(ConfigError, match=message):
        from_dict(given | changes)


def test_a_dry_run_stores_frozen_weights_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 1024,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    command = ["dryrun", str(tmp_path), "--grid", "1,2,1,2", "--global-batch-size", "2", "--seq-len", "64"]
    before = {}
    for name, words in (
        ("all", []),
        ("lora", ["--lora", "8"]),
        ("nf4", ["--lora", "8", "--quantization", "nf4"]),
    ):
        assert main([*command, *words, "--json", str(tmp_path / "out.json")]) == 0
        before[name] = json.loads((tmp_path / "out.json").read_text())["between_steps"]
    shown = capsys.readouterr().out
    assert "LoRA: rank 8, scale 4, " in shown
    assert "in 14 linears, in NF4" in shown
    linears = 2 * (4 * 256 * 256 + 3 * 256 * 512)
    # A of linears from y to x, and B of those from x to y, are whole on both x ranks.
    whole = 2 * 8 * (5 * 256 + 2 * 256)
    cut = 2 * 8 * (3 * 256 + 2 * 512 + 256 + 512)
    frozen = linears + 2 * 1024 * 256 + 5 * 256
    assert before["all"]["parameters"] == pytest.approx(4 * frozen / 4, rel=0.01)
    assert before["lora"]["parameters"] == pytest.approx(2 * frozen / 4 + 4 * (whole / 2 + cut / 4), rel=0.01)
    adapters = 4 * (whole / 2 + cut / 4)
    packed = linears * 36 / 64 + 2 * (frozen - linears)
    assert before["nf4"]["parameters"] == pytest.approx(packed / 4 + adapters, rel=0.01)
    assert before["lora"]["optimizer"] == pytest.approx(8 * (whole / 2 + cut / 4), rel=0.01)
