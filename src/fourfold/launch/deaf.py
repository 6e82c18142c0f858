"""Imported first by the server of `warm`: a batch system that ends a job tells all of its processes.

The server has to outlive the ranks, which save then: it is from the server that the agent hears how they ended.
"""

import signal

signal.signal(signal.SIGTERM, signal.SIG_IGN)
