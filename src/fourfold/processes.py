"""How a process of a run was started, and the exit codes with which it ends. Needs no torch."""

import ctypes
import os
import signal

# Exit code for "saved, to be continued": start the job again; this is not a failure.
CONTINUE = 85
# Exit code for an error that a person has to fix: a restart would fail again.
REFUSED = 2
# How often ranks are restarted after one has died, before the run fails.
MAX_RESTARTS = 5


def is_rank() -> bool:
    """Was this process started by torchrun, or as one of several tasks of srun?

    An sbatch script alone has no step. A shell of `srun --pty` is a step of one task, in which a person starts commands.
    """
    is_task = "SLURM_STEP_ID" in os.environ and os.environ.get("SLURM_NTASKS", "1") != "1"
    return "RANK" in os.environ or is_task


def stop_with_agent() -> None:
    """Let this rank receive SIGTERM when its agent dies: it saves and exits instead of holding its device forever."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        pr_set_pdeathsig = 1  # <linux/prctl.h>
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
