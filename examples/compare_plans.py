"""Compare layouts and clusters for a model, cell by cell: in an editor that runs `# %%` cells, or with python.

All values are predictions by formulas, without a GPU.
"""

# %% A model and a batch
from pathlib import Path

import fourfold as ff

model = Path(__file__).parent / "models/llama-70b.json"
sequences, length = 1024, 8192


# %% The best layout on each of four clusters
def show(name: str, estimate) -> None:
    axes = estimate.layout
    print(
        f"{name:28} data={axes.data:<4} FSDP z={axes.z:<4} TP2 y={axes.y:<2} TP x={axes.x:<3}"
        f" step {estimate.step_s:6.2f} s  MFU {100 * estimate.mfu:4.1f} %"
    )


for cluster in ("dgx-a100", "dgx-h100", "alps-gh200", "gb200-nvl72"):
    plan = ff.plan(model, cluster, 256, sequences=sequences, length=length, simulate=0, quiet=True)
    show(cluster, plan.best)

# %% What does tensor parallelism gain, on the last one?
for x in (1, 2, 4, 8):
    alike = [estimate for estimate in plan.ranked if estimate.layout.x == x and estimate.layout.y == 1]
    if alike:
        show(f"{cluster}, TP {x}", alike[0])

# %% How far does it scale, with the same batch?
for gpus in (256, 512, 1024, 2048):
    plan = ff.plan(model, "dgx-h100", gpus, sequences=sequences, length=length, simulate=0, quiet=True)
    show(f"dgx-h100, {gpus} GPUs", plan.best)

# %% Which layouts cannot run, and why?
for rejected in plan.rejected[:3]:
    print(rejected.reason)
