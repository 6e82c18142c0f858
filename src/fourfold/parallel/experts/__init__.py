"""Mixture of experts on the grid."""
