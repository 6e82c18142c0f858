"""How a process of a run was started, and the exit codes with which it ends. Needs no torch."""

import os

# The exit status that says "saved, to be continued": the job is to be started again, and it is no failure.
CONTINUE = 85
# The exit status of a command that a person has to mend: starting it again would not.
REFUSED = 2
# How often ranks are started again after one has died, before the run is given up.
MAX_RESTARTS = 5


def is_rank() -> bool:
    """Was this process started by torchrun, or as a task of srun? An sbatch script alone has no step."""
    return "RANK" in os.environ or "SLURM_STEP_ID" in os.environ
