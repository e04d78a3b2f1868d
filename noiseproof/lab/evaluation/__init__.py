"""Accuracy under perturbations: predictions, statistics, tables and their words."""
