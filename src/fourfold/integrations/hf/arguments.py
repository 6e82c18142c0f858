"""What each field of `TrainingArguments`, and of TRL's `SFTConfig` and `DPOConfig`, means on a grid: it works, is translated, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from fourfold.errors import UnsupportedError
from fourfold.mesh.grid import Grid

Verdict = Literal["works", "translated", "refused"]


@dataclass(frozen=True)
class Field:
    verdict: Verdict
    words: str = ""  # what it becomes; or why it is refused, and the way out
    allowed: tuple[Any, ...] = ()  # values of a refused field that mean that it is off


def _works(*names: str) -> dict[str, Field]:
    return {name: Field("works") for name in names}


def _refused(words: str, *allowed: Any) -> Field:
    return Field("refused", words, allowed)


_NO_DDP = "gradients are summed by Fourfold, without DDP; leave it out"
FIELDS: dict[str, Field] = {
    **_works(
        *("output_dir", "per_device_train_batch_size", "num_train_epochs", "max_steps", "learning_rate"),
        *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "optim_args"),
        *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "gradient_accumulation_steps"),
        *("max_grad_norm", "tf32", "torch_empty_cache_steps", "logging_dir", "logging_strategy"),
        *("logging_steps", "logging_first_step", "log_on_each_node", "logging_nan_inf_filter"),
        *("include_num_input_tokens_seen", "log_level", "log_level_replica", "disable_tqdm", "report_to"),
        *("run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        *("eval_strategy", "eval_steps", "eval_delay", "per_device_eval_batch_size", "prediction_loss_only"),
        *("eval_on_start", "eval_do_concat_batches", "eval_accumulation_steps", "include_for_metrics"),
        *("batch_eval_metrics", "save_strategy", "save_steps", "save_total_limit", "push_to_hub"),
        *("hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push"),
        *("hub_revision", "load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
        *("ignore_data_skip", "restore_callback_states_from_checkpoint", "full_determinism", "seed"),
        *("use_cpu", "dataloader_drop_last", "dataloader_num_workers"),
        *("dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor"),
        *("dataloader_multiprocessing_context", "dataloader_in_order", "remove_unused_columns"),
        *("label_names", "length_column_name", "skip_memory_metrics"),
        *("do_train", "do_eval", "do_predict", "resume_from_checkpoint", "local_rank", "fsdp_config"),
    ),
    "optim": Field(
        "translated", "on the shards; element-wise ones, such as adamw_torch_fused, adamw_torch, sgd"
    ),
    "bf16": Field("translated", 'parallelize(precision="bf16"): master weights stay fp32, without autocast'),
    "gradient_checkpointing": Field("translated", 'parallelize(activation_checkpointing="full")'),
    "activation_checkpointing": Field("translated", "as gradient_checkpointing"),
    "gradient_checkpointing_kwargs": Field(
        "translated",
        '{"selective": True}: parallelize(activation_checkpointing="selective"); others without effect',
    ),
    "activation_checkpointing_kwargs": Field("translated", "as gradient_checkpointing_kwargs"),
    "torch_compile": Field("translated", "parallelize(compile=True): each block as one graph"),
    "average_tokens_across_devices": Field(
        "translated", "always on: the mean is over the labels of the global batch, as in one process"
    ),
    "data_seed": Field("translated", "seed, where it is not given: the order of rows is that of one process"),
    "accelerator_config": Field(
        "translated",
        "every rank reads its own rows (dispatch_batches=False); rows that make the last batch even do not count",
    ),
    "save_only_model": Field("translated", "checkpoints are folders that from_pretrained loads"),
    "label_smoothing_factor": _refused(
        "the loss is computed from a part of the vocabulary, without smoothing; use 0", 0
    ),
    "fp16": _refused("there is no loss scaling; use bf16=True", False),
    "bf16_full_eval": _refused(
        "weights are shards in fp32; with bf16=True evaluation computes in bf16, too", False
    ),
    "fp16_full_eval": _refused(
        "weights are shards in fp32; with bf16=True evaluation computes in bf16", False
    ),
    "torch_compile_backend": _refused(
        "blocks are compiled by Inductor; use torch_compile=True alone", None, "inductor"
    ),
    "torch_compile_mode": _refused("blocks are compiled in the default mode; leave it out", None, "default"),
    "use_liger_kernel": _refused(
        "it replaces modules that Fourfold replaces; the loss is computed by chunks without it", False
    ),
    "liger_kernel_config": _refused("as use_liger_kernel; leave it out", None),
    "use_cache": _refused("training does not use a key/value cache", False),
    "neftune_noise_alpha": _refused(
        "its noise would differ from grid to grid, because ranks embed different tokens; leave it out", None
    ),
    "auto_find_batch_size": _refused("ranks have to agree on the batch; let `fourfold plan` find it", False),
    "eval_use_gather_object": _refused("predictions are tensors; leave it out", False),
    "save_on_each_node": _refused("all ranks write one checkpoint, to storage that they share", False),
    "enable_jit_checkpoint": _refused(
        "ranks may get their signals at different steps; use save_strategy", False
    ),
    "train_sampling_strategy": _refused(
        "its order follows from random numbers that differ between ranks; use random or sequential",
        "random",
        "sequential",
    ),
    "optim_target_modules": _refused("these optimizers read whole matrices; use adamw_torch_fused", None),
    "parallelism_config": _refused("the grid says what is parallel; leave it out", None),
    "ddp_find_unused_parameters": _refused(_NO_DDP, None, False),
    "ddp_bucket_cap_mb": _refused(_NO_DDP, None),
    "ddp_broadcast_buffers": _refused(_NO_DDP, None),
    "ddp_static_graph": _refused(_NO_DDP, None, False),
    "ddp_backend": _refused("Grid.create starts the process group; leave it out", None),
    "ddp_timeout": _refused("use Grid.create(shape, timeout_s=...)", 1800),
    "fsdp": _refused("z shards the weights; leave it out", None, "", [], False),
    "deepspeed": _refused("z shards the weights; leave it out", None),
    "debug": _refused("its hooks read whole activations; leave it out", "", []),
    # trl.SFTConfig
    **_works(
        *("model_init_kwargs", "trust_remote_code", "chat_template_path", "dataset_text_field"),
        *("dataset_kwargs", "dataset_num_proc", "eos_token", "max_length", "truncation_mode"),
        *("shuffle_dataset", "packing", "packing_strategy", "padding_free", "eval_packing"),
        *("completion_only_loss", "assistant_only_loss", "pad_token"),
    ),
    "pad_to_multiple_of": Field("translated", "the next multiple of x * y, whose ranks share the tokens"),
    "activation_offloading": Field("translated", "parallelize(activation_offloading=True)"),
    "loss_type": _refused('it is computed from a part of the vocabulary; use "nll"', "nll", "chunked_nll"),
    "router_aux_loss_coef": _refused(
        "TRL adds a part of it in each micro-batch; use 0, also for a model whose config has one", None, 0
    ),
}
# trl.DPOConfig, where it has other fields than SFTConfig, or means something else by them.
DPO_FIELDS: dict[str, Field] = {
    **_works(
        *("disable_dropout", "loss_weights", "ld_alpha", "f_divergence_type", "f_alpha_divergence_coef"),
        *("label_smoothing", "beta", "use_weighting", "discopop_tau"),
    ),
    "loss_type": Field(
        "works",
        "with data * z > 1 without sft, aot and aot_unpaired, which are not a mean over pairs: ranks have different pairs",
    ),
    "router_aux_loss_coef": _refused(
        "TRL adds a part of it in each micro-batch; use 0, also for a model whose config has one", None, 0
    ),
    "padding_free": _refused("TRL does not do it, and pads; leave it out", False),
    "precompute_ref_log_probs": _refused(
        "it looks for earlier results by a hash of whole weights; leave it out: the reference is sharded like the model",
        False,
    ),
    "precompute_ref_batch_size": _refused("as precompute_ref_log_probs; leave it out", None),
    "sync_ref_model": _refused("the weights of the reference stay as they are; leave it out", False),
    "ref_model_mixup_alpha": _refused("as sync_ref_model; leave it out", 0.6),
    "ref_model_sync_steps": _refused("as sync_ref_model; leave it out", 512),
}
_NO_MEAN_OVER_PAIRS = {"sft", "aot", "aot_unpaired"}


def fields_of(args: Any) -> dict[str, Field]:
    """Those of TrainingArguments and SFTConfig, or of DPOConfig."""
    is_dpo = any(kind.__name__ == "DPOConfig" for kind in type(args).__mro__)
    return FIELDS | DPO_FIELDS if is_dpo else FIELDS


def translate(args: Any, grid: Grid) -> tuple[Any, dict[str, Any]]:
    """(a copy of the arguments for the trainer, options for `parallelize`); a refused field is an error."""
    problems = [
        f"{name}={getattr(args, name)!r}: {field.words}"
        for name, field in fields_of(args).items()
        if field.verdict == "refused" and hasattr(args, name) and getattr(args, name) not in field.allowed
    ]
    if getattr(args, "accelerator_config", None) is not None and args.accelerator_config.split_batches:
        problems.append(
            "accelerator_config.split_batches=True: batches are those of a rank; use per_device_train_batch_size"
        )
    if isinstance(losses := getattr(args, "loss_type", None), list) and grid.batch_ranks > 1:
        problems += [
            f"loss_type={losses!r}: {loss} is not a mean over pairs, of which data*z={grid.batch_ranks} parts of the batch have "
            "their own; use data=z=1, or another loss"
            for loss in losses
            if loss in _NO_MEAN_OVER_PAIRS
        ]
    if problems:
        raise UnsupportedError(f"{type(args).__name__} on {grid}:\n" + "\n".join(problems))
    args = copy.copy(args)
    options: dict[str, Any] = {}

    def take(name: str, option: str, value: Callable[[], Any]) -> None:
        if getattr(args, name, None):
            options[option] = value()
            setattr(args, name, False)

    def recomputes() -> str:
        kinds = (
            getattr(args, f"{kind}_checkpointing_kwargs", None) or {} for kind in ("gradient", "activation")
        )
        return "selective" if any(kind.get("selective") for kind in kinds) else "full"

    if args.bf16 or getattr(args, "mixed_precision", "no") == "bf16":  # the second by accelerate's launcher
        options["precision"] = "bf16"
    args.bf16, args.mixed_precision = False, "no"
    take("activation_checkpointing", "activation_checkpointing", recomputes)
    take("gradient_checkpointing", "activation_checkpointing", recomputes)
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        if hasattr(args, name):
            setattr(args, name, None)
    take("torch_compile", "compile", lambda: True)
    take("activation_offloading", "activation_offloading", lambda: True)
    args.average_tokens_across_devices = True
    if (
        args.data_seed is None
    ):  # then the order of rows follows from torch's own seed, which ranks have each of their own
        args.data_seed = args.seed
    args.accelerator_config = copy.copy(args.accelerator_config)
    args.accelerator_config.dispatch_batches = False
    args.accelerator_config.even_batches = True
    if hasattr(args, "pad_to_multiple_of"):
        ranks = grid.x * grid.y
        given = args.pad_to_multiple_of if isinstance(args.pad_to_multiple_of, int) else 1
        args.pad_to_multiple_of = -(-given // ranks) * ranks
    return args, options
