"""A cluster in slow motion: devices and links tens or hundreds of times slower, on which schedules can be measured.

Eight ranks that compute on two cores measure the cores. Here nothing is computed. A step of the real engine runs once, on tensors
without values, and what it asks of a device is written down: work on streams, collectives, and who waits for whom (`recorder.py`).
Then every rank of the cluster plays it (`player.py`): it sleeps as long as the work would take on the device, times a dilation, and
sends as many bytes as each collective would, divided by a ratio, over links whose rates the kernel limits (`machines.py`). So time
is set by the schedule and the links, and the cores are idle.

What is emulated, and how it is scaled:

    work          the planner's price of an operator on the device x dilation; exact, because it is slept
    streams       CUDA's: work of a stream in order, streams wait for events, the host runs ahead and takes no time
    collectives   each group has a stream of its own, as with NCCL; rings, over TCP; base and hops of the library x dilation
    links         two rates: of a device inside its node, and of a node, shared by its ranks / (dilation x payload ratio)

Not emulated: the multiprocessors that NCCL takes from computation, host time, and values, which the tests compare.
"""
