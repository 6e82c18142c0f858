"""From a run's file to a job of a cluster: Slurm or Kubernetes."""

# The exit status that says "saved, to be continued": the job is to be started again, and it is no failure.
CONTINUE = 85
