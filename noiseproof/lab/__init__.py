"""The workbench: data, models, one training loop, evaluation, comparison, analysis and report.

It imports the core, never the reverse.
"""
