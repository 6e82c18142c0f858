"""A mixin that puts any subclass of `transformers.Trainer` on a grid, by overriding methods of the class alone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from fourfold.checkpoint.save import Checkpoints
from fourfold.checkpoint.state import TrainState
from fourfold.errors import UnsupportedError
from fourfold.export.live import write_adapter, write_model
from fourfold.integrations.hf.accelerator import GridAccelerator
from fourfold.integrations.hf.arguments import translate
from fourfold.integrations.hf.launcher import check_backends, check_rank
from fourfold.mesh import agreements
from fourfold.mesh.grid import Grid
from fourfold.optim.sharded_optimizer import sharded_optimizer
from fourfold.parallel.dropout import seed_ranks
from fourfold.parallel.experts.balance import balance_loss_of
from fourfold.parallel.lora import Lora, is_adapter
from fourfold.parallel.loss.cross_entropy import full_logits
from fourfold.parallel.parallelize import parallelize
from fourfold.parallel.report import Report
from fourfold.weights.api import backend_of

FOLDER = "fourfold"  # of a checkpoint: weights and optimizer states, for any grid
IGNORED = -100


class GridTrainer:
    """Comes before a subclass of `transformers.Trainer`; use `trainer` to make one.

    ``checkpoint`` and ``parallel`` are options of `parallelize`; others follow from the arguments (`arguments.FIELDS`).
    """

    # Their `compute_loss` is the loss that the model computes itself, and metrics.
    known_losses: tuple[str, ...] = ("transformers.", "trl.trainer.sft_trainer")
    model: Any
    args: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any
    router_aux_loss_coef: float  # of TRL's

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *,
        grid: Grid | tuple[int, int, int, int],
        checkpoint: str | Path | None = None,
        parallel: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        name = type(self).__name__
        if not isinstance(args, TrainingArguments):
            raise ValueError(
                f"{name}(args={type(args).__name__}): pass TrainingArguments, or the config of the trainer"
            )
        for given in ("model_init", "compute_loss_func", "quantization_config"):
            if options.get(given) is not None:
                raise UnsupportedError(f"{name}({given}=...) is not supported on a grid; {_INSTEAD[given]}")
        if any(options.get("optimizers", ())):
            raise UnsupportedError(
                f"{name}(optimizers=...): an optimizer has to be made for the shards; use args.optim or optimizer_cls_and_kwargs"
            )
        own = loss_of(type(self))
        if not own.__module__.startswith(self.known_losses):
            raise UnsupportedError(
                f"{own.__name__} computes a loss of its own, from logits of which a rank has only a part; use a trainer whose loss is "
                "the model's, or TRL's DPOTrainer"
            )
        check_backends()
        self.grid = grid if isinstance(grid, Grid) else Grid.create(grid)
        if self.grid.sequence_ranks > 1:
            raise UnsupportedError(
                f"sequence_ranks={self.grid.sequence_ranks} is not supported in trainers of other libraries, whose batches are not cut; use "
                "sequence_ranks=1, `fourfold train` or a loop of your own"
            )
        check_rank(args)
        args, translated = translate(args, self.grid)
        if twice := sorted(set(translated) & set(parallel or {})):
            raise ValueError(f"{', '.join(twice)}: given in args and in parallel; give it once")
        self._options = {"checkpoint": checkpoint, "seed": args.seed} | translated | (parallel or {})
        self.report: Report | None = None
        model, lora = _without_adapters(model, options.pop("peft_config", None))
        if lora is not None:
            self._options["lora"] = lora
        super().__init__(model=model, args=args, **options)  # type: ignore[call-arg]
        if getattr(self, "aux_loss_enabled", False):  # by TRL, also because of the model's configuration
            raise UnsupportedError(
                f"router_aux_loss_coef={self.router_aux_loss_coef:g}: TRL adds a part of the auxiliary loss of routers in each micro-batch, which "
                "is not supported on a grid; use router_aux_loss_coef=0, transformers.Trainer, or `fourfold train`"
            )
        self.add_callback(_Seeds(self.grid))  # type: ignore[attr-defined]

    # -- set up ---------------------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Trainer calls it first, with the model that it was given: here that becomes parallel."""
        self._accelerator_options: dict[str, Any] = {}
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator = GridAccelerator(self.grid, **self._accelerator_options)
        self.gather_function = self.accelerator.gather_for_metrics
        if self.model is None:
            raise ValueError(f"{type(self).__name__}(model=None): pass a model")
        self._decayed = set(self.get_decay_parameter_names(self.model))  # type: ignore[attr-defined]
        self.report = parallelize(self.model, self.grid, **self._options)

    def _build_accelerator_args(self, **options: Any) -> dict[str, Any]:
        built = super()._build_accelerator_args(**options)  # type: ignore[misc]
        self._accelerator_options = built
        return cast(dict[str, Any], built)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """`parallelize` has."""

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            if self.optimizer_cls_and_kwargs is not None:  # type: ignore[attr-defined]
                kind, options = self.optimizer_cls_and_kwargs  # type: ignore[attr-defined]
            else:
                kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)  # type: ignore[attr-defined]
            assert self.report is not None
            groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    layout = self.report.layouts.get(name)
                    hf_name = name if layout is None else layout.hf_name
                    groups[is_adapter(hf_name) or hf_name in self._decayed].append(parameter)
            decay = {True: self.args.weight_decay, False: 0.0}
            self.optimizer = sharded_optimizer(kind)(
                [{"params": groups[d], "weight_decay": decay[d]} for d in groups if groups[d]], **options
            )
        return cast(torch.optim.Optimizer, self.optimizer)

    # -- a step ---------------------------------------------------------------------------------------------------------

    def get_total_train_batch_size(self, args: Any) -> int:
        return int(args.train_batch_size * args.gradient_accumulation_steps * self.grid.batch_ranks)

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        if samples and self._leave_out_repeated(samples[-1], self.args.train_batch_size):
            items = self._get_num_items_in_batch(samples, device)  # type: ignore[attr-defined]
        return samples, items

    def _leave_out_repeated(self, inputs: Any, rows: int) -> bool:
        """Labels of rows that only make the last batch even do not count; whether there are such rows."""
        if self.grid.batch_ranks == 1 or self.args.dataloader_drop_last:
            return False
        last = self.accelerator.last_batch(rows)
        if last == rows * self.grid.batch_ranks:
            return False
        labels = inputs.get("labels")
        if labels is None:  # predictions of rows without labels, of which accelerate drops the repeated ones
            return False
        if labels.shape[0] != rows:
            raise UnsupportedError(
                f"the last batch has {last} rows for data*z={self.grid.batch_ranks} parts of {rows}, and rows that are joined "
                "in one (padding-free) cannot be left out; use dataloader_drop_last=True, or a data set whose length is a "
                f"multiple of {self.grid.batch_ranks * rows}"
            )
        balance = balance_loss_of(self.model)
        if balance is not None and balance.is_asked:
            raise UnsupportedError(
                f"the last batch has {last} rows for data*z={self.grid.batch_ranks} parts of {rows}, and the auxiliary loss of routers would "
                "count the rows that make it even; use dataloader_drop_last=True, a data set whose length is a multiple of "
                f"{self.grid.batch_ranks * rows}, or output_router_logits=False"
            )
        labels[self.accelerator.repeated_rows(rows)] = IGNORED
        return True

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of the model itself, which is the mean of the global batch on every rank."""
        loss, outputs = Trainer.compute_loss(
            cast(Any, self), model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        if num_items_in_batch is not None and self.model_accepts_loss_kwargs:  # type: ignore[attr-defined]
            loss = loss / self.grid.batch_ranks  # Trainer multiplies it, because DDP takes a mean
        return (loss, outputs) if return_outputs else loss

    # -- evaluation -----------------------------------------------------------------------------------------------------

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        self._leave_out_repeated(inputs, self.args.eval_batch_size)
        loss, logits, labels = Trainer.prediction_step(
            cast(Any, self), model, inputs, prediction_loss_only, ignore_keys
        )
        if logits is None:
            return loss, None, labels
        if not isinstance(logits, Tensor):
            raise UnsupportedError(
                f"{type(self.model).__name__} returns {len(logits)} outputs beside its loss, of which a rank may have only a part; use "
                "prediction_loss_only=True"
            )
        vocabulary = self.model.config.get_text_config().vocab_size
        batch = inputs["input_ids"].shape
        return loss, full_logits(logits, self.grid, vocab_size=vocabulary, batch=batch), labels

    def evaluation_loop(self, *positional: Any, **options: Any) -> Any:
        output = super().evaluation_loop(*positional, **options)  # type: ignore[misc]
        backend = backend_of(self.model)
        assert backend is not None
        backend.reshard()
        return output

    # -- checkpoints ----------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """A folder that `from_pretrained` loads, or PEFT's for adapters, written by rank 0 while all ranks send."""
        folder = Path(output_dir or self.args.output_dir)
        is_checkpoint = _internal_call and output_dir is not None
        if is_checkpoint and not self.args.save_only_model and not self.args.push_to_hub:
            return  # its weights are beside the optimizer's states
        assert self.report is not None
        write = write_model if self.report.lora is None else write_adapter
        write(self.model, self.report, folder)
        if self.args.should_save:
            if self.processing_class is not None:  # type: ignore[attr-defined]
                self.processing_class.save_pretrained(folder)  # type: ignore[attr-defined]
            torch.save(self.args, folder / "training_args.bin")
        agreements.broadcast_object(None)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)  # type: ignore[attr-defined]

    def _train_state(self) -> TrainState:
        optimizer = self.optimizer
        while hasattr(optimizer, "optimizer"):  # accelerate's
            optimizer = optimizer.optimizer
        assert self.report is not None
        step = self.state.global_step
        return TrainState(self.model, optimizer, self.report, step=step, seed=self.args.seed)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = os.path.join(output_dir, FOLDER)
        if self.args.process_index == 0 and os.path.isdir(folder):
            shutil.rmtree(folder)  # Trainer overwrites the checkpoints of an earlier run
        agreements.broadcast_object(None)
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(self._train_state())
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """With the optimizer's states, below."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self._load(checkpoint)
        schedule = torch.load(os.path.join(checkpoint, "scheduler.pt"), weights_only=True)
        self.lr_scheduler.load_state_dict(schedule)

    def _load_best_model(self) -> None:
        self._load(self.state.best_model_checkpoint)

    def _load(self, checkpoint: str) -> None:
        folder = os.path.join(checkpoint, FOLDER)
        if not os.path.isdir(folder):
            raise ValueError(
                f"{checkpoint} has no folder {FOLDER!r}, so it was not saved on a grid with its optimizer states; to begin from its "
                "weights, build the model from it, or pass checkpoint="
            )
        with Checkpoints(folder) as checkpoints:
            checkpoints.load(self._train_state())


class _Seeds(TrainerCallback):  # type: ignore[misc]
    """Random numbers follow from the seed and the step, so that they do not depend on the grid."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seed_ranks(self._grid, args.seed, state.global_step)


_INSTEAD = {
    "model_init": "pass a model",
    "compute_loss_func": "leave it out: the loss is the model's",
    "quantization_config": "use bf16=True, or parallel={'lora': ff.Lora(quantization='nf4')}",
}


def _without_adapters(model: Any, config: Any) -> tuple[Any, Lora | None]:
    """(the model without PEFT's adapters, the adapters that it gets on the grid)."""
    if not hasattr(model, "peft_config"):
        return model, None if config is None else Lora.of_config(config.to_dict())
    if config is not None:
        raise ValueError(
            f"peft_config is given, and {type(model).__name__} has adapters already; give one of the two"
        )
    if list(model.peft_config) != [model.active_adapter]:
        raise UnsupportedError(
            f"the model has the adapters {', '.join(model.peft_config)}, and a grid trains one; delete the others"
        )
    from peft import get_peft_model_state_dict

    values = {name: value.detach().clone() for name, value in get_peft_model_state_dict(model).items()}
    lora = Lora.of_config(model.peft_config[model.active_adapter].to_dict(), values)
    return model.unload(), lora


def loss_of(kind: type) -> type:
    """The class that says how a trainer computes its loss."""
    return next(
        c
        for c in kind.__mro__
        if not c.__module__.startswith("fourfold.integrations.")
        and {"compute_loss", "_compute_loss"} & set(vars(c))
    )
