"""Imported first by the server of `warm`: a batch system that ends a job tells all of its processes.

The server has to outlive the ranks, which save then: it is from the server that the agent hears how they ended. Blocked
and not ignored: what is sent to a rank that has just been forked waits until it can hear. Whoever else imports this goes
on hearing, and so do the processes that it starts.
"""

import os
import signal

IN_SERVER = "FOURFOLD_RANK_SERVER"

if IN_SERVER in os.environ:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
