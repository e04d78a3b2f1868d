"""Generates pages and figures from results/; not installed with the package."""
