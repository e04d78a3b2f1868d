"""The bench: data, models, one training loop, evaluation, comparison. It imports the core, never the
reverse."""
