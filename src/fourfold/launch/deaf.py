"""Imported first by the server of `warm`: a batch system that ends a job tells all of its processes.

The server has to outlive the ranks, which save then: it is from the server that the agent hears how they ended. Blocked
and not ignored: what is sent to a rank that has just been forked waits until it can hear.
"""

import signal

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
