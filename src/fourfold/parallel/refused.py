"""The answer to a request that cannot be had exactly."""


class Refused(ValueError):
    """This model cannot be trained exactly on this grid; the message says which module, why, and the way out."""
