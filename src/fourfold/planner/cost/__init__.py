"""Formulas for the time and the memory of a step."""
