"""Trainers of other libraries on grids, compared with the stock ones in one process."""
