"""The closed form's element-wise bytes of a block against the operators of a dry run."""

import logging
from unittest.mock import patch

import pytest
import torch

# Private, and the only place that tells what the kernels of a graph read and write (torch 2.13.0).
from torch._inductor.compile_fx import inductor_metrics_log
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from transformers import LlamaConfig, LlamaForCausalLM, Starcoder2Config

import fourfold as ff
from fourfold import Grid
from fourfold.dry_run.run import dryrun
from fourfold.planner.cost.elementwise import block_bytes
from fourfold.planner.inputs.workload import from_config

SIZES = {"hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 3, "num_attention_heads": 8,
         "num_key_value_heads": 2, "vocab_size": 1000, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
TOKENS = 1024
# Of a block but not of its tokens: weights that are cast and copied. An empty tensor moves nothing.
NOT_TOKENS = ("fsdp.", "_foreach_", "new_empty", "empty_like", "new_zeros")


@pytest.mark.parametrize("shape", [(1, 2, 1, 1), (1, 1, 1, 2), (1, 1, 2, 1)])
@pytest.mark.parametrize("model", ["llama", pytest.param("starcoder2", marks=pytest.mark.nightly)])
def test_a_block_moves_what_its_operators_move(shape, model):
    compare(shape, model, "replicated")


@pytest.mark.parametrize("model", ["llama", pytest.param("starcoder2", marks=pytest.mark.nightly)])
def test_a_block_cut_by_its_tokens_moves_its_share(model):
    compare((1, 1, 2, 2), model, "sequence-parallel")


def compare(shape, model, activations):
    config = {"llama": LlamaConfig, "starcoder2": Starcoder2Config}[model](**SIZES)
    _, z, y, x = shape
    done = dryrun(config, shape, sequences=z * TOKENS // 256, length=256, activations=activations)
    moved = {"forward": 0.0, "backward": 0.0}
    for o in done.operations:
        of_block = o.module.startswith("model.layers.1") and o.phase in moved and o.work == "memory"
        if of_block and not any(word in o.name for word in NOT_TOKENS) and o.shape[:1] != (512,):
            per_token = TOKENS in o.shape or 256 in o.shape or TOKENS // 2 in o.shape
            per_token |= o.name.startswith("aten.cat")  # gradients of siblings, in one buffer
            moved[o.phase] += o.bytes_moved if per_token else 0.0
    workload = from_config(config.to_dict())
    closed = block_bytes(workload, y, x, "eager", by_tokens=activations == "sequence-parallel")
    assert closed.forward == pytest.approx(moved["forward"] / TOKENS, rel=0.15)
    assert closed.backward == pytest.approx(moved["backward"] / TOKENS, rel=0.15)


def kernel_bytes(shape, activations):
    """Bytes that Inductor's own kernels of a compiled block move for a token, forward and backward."""
    config = LlamaConfig(**SIZES)
    grid = Grid.create(shape)
    model = LlamaForCausalLM(config)
    in_one_piece = ff.Overlap(forward_chunks=1)  # chunks on CPUs are smaller than on GPUs
    ff.parallelize(model, grid, compile=True, precision="bf16", activations=activations, overlap=in_one_piece)
    ids = torch.zeros(TOKENS // 256, 256, dtype=torch.long)
    moved = {False: 0.0, True: 0.0}
    count = GraphLowering.count_bytes

    def counted(graph):
        found = count(graph)
        extern = (ExternKernelSchedulerNode, NopKernelSchedulerNode)  # matmuls, attention, what is sent
        nodes = [node for node, _ in found[1] if not isinstance(node, extern)]
        moved[graph.is_backward] += sum(node.get_read_write_buffers_sizes() for node in nodes)
        return found

    inductor_metrics_log.setLevel(logging.INFO)  # so that bytes are counted
    with (
        patch.object(GraphLowering, "count_bytes", counted),
        torch._inductor.config.patch(fx_graph_cache=False),
    ):
        for _ in range(2):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    inductor_metrics_log.setLevel(logging.NOTSET)
    return moved[False] / TOKENS, moved[True] / TOKENS


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("shape", "activations"),
    [
        ((1, 1, 1, 1), "replicated"),
        ((1, 1, 1, 2), "replicated"),
        ((1, 1, 2, 1), "replicated"),
        ((1, 1, 2, 2), "sequence-parallel"),
        ((1, 1, 1, 2), "sequence-parallel"),
    ],
)
def test_a_compiled_block_moves_what_the_kernels_of_inductor_move(pool, shape, activations):
    _, _, y, x = shape
    forward, backward = pool.run(kernel_bytes, y * x, shape, activations)[0]
    workload = from_config(LlamaConfig(**SIZES).to_dict())
    closed = block_bytes(workload, y, x, "compiled", by_tokens=activations == "sequence-parallel")
    assert closed.forward == pytest.approx(forward, rel=0.15)
    assert closed.backward == pytest.approx(backward, rel=0.15)


def test_fused_kernels_move_less():
    workload = from_config(LlamaConfig(**SIZES).to_dict())
    fused, eager = block_bytes(workload, 1, 1, "fused"), block_bytes(workload, 1, 1, "eager")
    assert fused.forward < eager.forward
    assert fused.backward < eager.backward
