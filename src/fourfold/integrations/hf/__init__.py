"""`transformers.Trainer` and its subclasses on a grid; needs the extra ``hf``.

Example:
    >>> from fourfold.integrations.hf import trainer
    >>> from trl import SFTTrainer  # doctest: +SKIP
    >>> sft = trainer(SFTTrainer)(model=model, args=args, grid=grid, train_dataset=chats)  # doctest: +SKIP
    >>> sft.train()  # doctest: +SKIP
"""

from fourfold.integrations.hf.accelerator import GridAccelerator
from fourfold.integrations.hf.choose import trainer
from fourfold.integrations.hf.trainer import GridTrainer

__all__ = ["GridAccelerator", "GridTrainer", "trainer"]
