"""Matmuls in float8."""
