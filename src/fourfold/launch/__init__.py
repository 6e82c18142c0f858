"""From a run's file to a job of a cluster: Slurm or Kubernetes."""

# The exit status that says "saved, to be continued": the job is to be started again, and it is no failure.
CONTINUE = 85
# The exit status of a command that a person has to mend: starting it again would not.
REFUSED = 2
# How often ranks are started again after one has died, before the run is given up.
MAX_RESTARTS = 5
