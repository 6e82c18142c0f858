"""Add adapters (LoRA) to the weights that they were trained for, with stock PEFT.

    python examples/merge_adapters.py my-model adapters merged

The folder `merged` has no adapters.
"""

import sys

from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, adapters, merged = sys.argv[1:]
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, dtype="auto"), adapters)
model.merge_and_unload().save_pretrained(merged)
AutoTokenizer.from_pretrained(adapters).save_pretrained(merged)
