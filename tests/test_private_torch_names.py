"""Every private PyTorch name that src uses, and what for: a new torch that lacks one fails here, with a sentence.

A name is private if a part of it begins with one underscore: PyTorch may change it in any version, and `pyproject.toml` allows
one minor version of torch because of them.
"""

import ast
import importlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen
from torch import nn

SOURCE = Path(__file__).parents[1] / "src"

# Functions, classes, constants and class attributes, by their full name.
NAMES = {
    "torch._C._DisableTorchDispatch": "compute real numbers where a dispatch mode is on",
    "torch._C._current_autograd_node": "the node of backward that an operation belongs to, in a dry run",
    "torch._C._current_graph_task_id": "whether backward is running",
    "torch._C._disabled_torch_function_impl": "a tensor subclass without __torch_function__",
    "torch._C._distributed_c10d": "the flight recorders, in the report of a hang",
    "torch._C._distributed_c10d.FakeWork": "a collective that is done at once, in a dry run",
    "torch._C._distributed_c10d._dump_fr_trace_json": "the flight recorder's collectives, in the report of a hang",
    "torch._functorch.config": "a cache whose key does not have what a compiled block does",
    "torch._dynamo": "a setting for the trace of a recomputed block",
    "torch._assert_async": "check token ids without waiting for the device",
    "torch._foreach_copy_": "copy many tensors in one call",
    "torch._foreach_mul_": "scale many gradients in one call",
    "torch._subclasses.FakeTensor": "the device of a tensor without data",
    "torch._subclasses.FakeTensorMode": "tensors without data, in a dry run",
    "torch._subclasses.fake_tensor.DataDependentOutputException": "a model that asks for a value, in a dry run",
    "torch._subclasses.fake_tensor.in_kernel_invocation_manager": "views of tensors without data",
    "torch.Tensor._make_wrapper_subclass": "make a tensor subclass that holds other tensors",
    "torch.autograd.Variable._execution_engine": "call back at the end of backward",
    "torch.autograd._get_sequence_nr": "the order in which autograd runs nodes",
    "torch.distributed.distributed_c10d._get_default_store": "the store in which the ranks have met",
    "torch.distributed.distributed_c10d._set_pg_timeout": "the time-out of an axis's process group",
    "torch.distributed.ProcessGroup._get_backend": "the backend of a process group, whose time-out is set",
    "torch.distributed.ProcessGroupGloo._set_default_timeout": "the time-out of that backend",
    "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent._shutdown": "stop the ranks of an agent",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous.DynamicRendezvousHandler._stop_heartbeats": "leave a rendezvous",
    "torch.distributed.fsdp._fully_shard._fsdp_api.AllGather": "FSDP2's gathers, through our collectives",
    "torch.distributed.fsdp._fully_shard._fsdp_api.ReduceScatter": "FSDP2's reductions, through our collectives",
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset": "the part of a tensor that a rank holds",
    "torch.distributed.tensor._dtensor_spec.DTensorSpec": "the sharding of a DTensor, in a dry run",
    "torch.distributed.tensor._op_schema.OpSchema": "an operator on DTensors, in a dry run",
    "torch.distributed.tensor._op_schema.OutputSharding": "the sharding of its output, in a dry run",
    "torch.distributed.tensor.DTensor._local_tensor": "a DTensor's shard, without autograd",
    "torch.distributed.tensor.DTensor._op_dispatcher": "how DTensor finds shardings, which a dry run does not record",
    "torch.distributed.tensor.debug._clear_sharding_prop_cache": "forget the meshes of an earlier dry run",
    "torch.distributed.tensor.placement_types._StridedShard": "a dimension that two axes shard",
    "torch._scaled_mm": "matmuls of e4m3",
    "torch.ops.aten._scaled_mm": "the same as an operator, in a dry run and in compiled blocks",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "attention as an operator, for its FLOPs",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": "the same in backward",
    "torch.ops.aten._to_copy": "a cast, whose sharding is that of its input",
    "torch.optim._muon.DEFAULT_A": "a coefficient of Newton-Schulz",
    "torch.optim._muon.DEFAULT_B": "a coefficient of Newton-Schulz",
    "torch.optim._muon.DEFAULT_C": "a coefficient of Newton-Schulz",
    "torch.optim._muon.DEFAULT_NS_STEPS": "the number of Newton-Schulz iterations",
    "torch.optim._muon.EPS": "the smallest norm that Muon divides by",
    "torch.optim._muon._adjust_lr": "Muon's learning rate for a matrix's shape",
    "torch.optim._muon._zeropower_via_newtonschulz": "Muon's orthogonalisation",
    "torch.testing._internal.distributed.fake_pg.FakeStore": "a world that sends nothing, in a dry run",
    "torch.utils._python_dispatch.TorchDispatchMode": "see every operator",
    "torch.utils._python_dispatch._disable_current_modes": "do not record what DTensor computes for itself",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": "the dispatch modes that are on",
    "torch.utils._pytree.tree_flatten": "the tensors in nested arguments",
    "torch.utils._pytree.tree_leaves": "the tensors in nested arguments",
    "torch.utils._pytree.tree_map_only": "the tensors in nested arguments",
    "torch.utils._pytree.tree_unflatten": "the tensors in nested arguments",
}


def grad_fn() -> Any:
    return torch.ones(1, requires_grad=True).exp().grad_fn


def fused_adamw() -> Any:
    return torch.optim.AdamW([nn.Parameter(torch.ones(1))], fused=True)


def set_by(owner: str) -> set[str]:
    """The attributes that `__init__` of a class sets or reads: an instance would need a world."""
    return set(resolve(owner).__init__.__code__.co_names)


# Attributes that an object has and its class lacks: where to look, and what for.
ELASTIC = "torch.distributed.elastic"
HANDLER = f"{ELASTIC}.rendezvous.dynamic_rendezvous.DynamicRendezvousHandler"
AGENT = f"{ELASTIC}.agent.server.local_elastic_agent.LocalElasticAgent"
ATTRIBUTES: dict[str, tuple[Callable[[], Any], str]] = {
    "_base": (lambda: dir(torch.ones(1)), "tell views of one tensor, which experts and routers read"),
    "_buffers": (lambda: dir(nn.Module()), "replace a module's buffers"),
    "_cdata": (lambda: dir(torch.ones(1).untyped_storage()), "tell storages apart"),
    "_grouped_mm": (lambda: dir(torch.ops.aten), "matmuls of experts"),
    "_qualified_op_name": (lambda: dir(torch.ops.aten.add), "the name of an operator"),
    "_overloadpacket": (lambda: dir(torch.ops.aten.add.Tensor), "an operator without its overload"),
    "_schema": (lambda: dir(torch.ops.aten.add.Tensor), "the arguments of an operator"),
    "_scaled_dot_product_flash_attention": (lambda: dir(torch.ops.aten), "attention that is kept"),
    "_scaled_dot_product_flash_attention_for_cpu": (lambda: dir(torch.ops.aten), "attention that is kept"),
    "_scaled_dot_product_efficient_attention": (lambda: dir(torch.ops.aten), "attention that is kept"),
    "_scaled_dot_product_cudnn_attention": (lambda: dir(torch.ops.aten), "attention that is kept"),
    "_varlen_attn": (lambda: dir(torch.nn.attention.varlen), "attention that is kept"),
    "_varlen_attn_backward": (
        lambda: dir(torch.nn.attention.varlen),
        "attention of cut sequences in backward, without a second forward",
    ),
    "_sequence_nr": (lambda: dir(grad_fn()), "the forward operation of a node of backward"),
    "_spec": (lambda: dir(torch.distributed.tensor.DTensor), "a DTensor's mesh and placements"),
    "_step_supports_amp_scaling": (lambda: dir(fused_adamw()), "an optimizer that unscales gradients itself"),
    "_dump_nccl_trace_json": (
        lambda: ["_dump_nccl_trace_json"],
        "NCCL's flight recorder; absent from builds for CPUs",
    ),
    "_pcontext": (lambda: set_by(AGENT), "the processes of an agent"),
    "_state_holder": (lambda: set_by(HANDLER), "the state of a rendezvous"),
    "_this_node": (lambda: set_by(HANDLER), "this agent in the state of a rendezvous"),
}

# Private names of other packages that src uses.
NOT_TORCH = {
    "_exit": "os",
    "_replace": "a NamedTuple",
    "_current_frames": "sys",
    "_attn_implementation": "a configuration of transformers",
    "_supports_flex_attn": "a model of transformers",
    "_supports_sdpa": "a model of transformers",
    "_supports_attention_backend": "a model of transformers",
    "_init_weights": "a model of transformers",
    "_reset_parameters": "a module's own",
    "_get_num_items_in_batch": "transformers.Trainer",
    "_is_expert_parallel": "experts of transformers",
    "_apply_gate": "experts of transformers",
    "_experts_implementation": "a configuration of transformers",
    "_can_use_grouped_mm": "transformers' choice of a kernel for experts",
}


def resolve(name: str) -> Any:
    """The object of a full name: the longest prefix that is a module, and attributes from there."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


@pytest.mark.parametrize("name", NAMES)
def test_torch_has_the_name(name: str) -> None:
    try:
        resolve(name)
    except (AttributeError, ImportError) as error:
        pytest.fail(
            f"torch {torch.__version__} lacks {name}, which fourfold uses for: {NAMES[name]} ({error})",
            pytrace=False,
        )


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_torch_has_the_attribute(name: str) -> None:
    names, purpose = ATTRIBUTES[name]
    if name not in names():
        pytest.fail(
            f"torch {torch.__version__} lacks the attribute {name}, which fourfold uses for: {purpose}",
            pytrace=False,
        )


# -- what src uses -----------------------------------------------------------------------------------------------------


@cache
def trees() -> dict[str, ast.Module]:
    return {
        str(path.relative_to(SOURCE)): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))
    }


@cache
def own_names() -> set[str]:
    """Functions, classes, variables and attributes that src itself defines."""
    found = set()
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found - {name.rpartition(".")[2] for name in NAMES} - set(ATTRIBUTES) - set(NOT_TORCH)


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of each private name of others: in full where it is imported, else the attribute alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torch"):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.startswith("torch"))
        elif isinstance(node, ast.Attribute) and node.attr not in own_names():
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            named = node.args[1]
            if isinstance(named, ast.Constant) and named.value not in own_names():
                yield node.lineno, named.value


def used() -> Iterator[tuple[str, str]]:
    for path, tree in trees().items():
        for line, name in private_names(tree):
            if is_private(name) and name != "_C":  # a module: what is taken from it counts
                yield name, f"{path}:{line}"


def test_every_private_name_in_use_is_listed() -> None:
    attributes = {name.rpartition(".")[2] for name in NAMES} | set(ATTRIBUTES) | set(NOT_TORCH)
    unlisted = [
        f"{place}: {name}" for name, place in used() if name not in (NAMES if "." in name else attributes)
    ]
    assert unlisted == [], "use a public name, or list it here with what it is used for"


def test_every_listed_name_is_in_use() -> None:
    in_use = {name.rpartition(".")[2] for name, _ in used()}
    listed = (
        {name.rpartition(".")[2] for name in NAMES if is_private(name)} | set(ATTRIBUTES) | set(NOT_TORCH)
    )
    assert sorted(listed - in_use) == [], "nothing in src uses it any more: remove it from the list"
