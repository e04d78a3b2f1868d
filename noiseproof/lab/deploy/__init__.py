"""A trained run, outside the lab: loaded as one module, exported, described, shared, shown."""
