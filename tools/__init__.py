"""Pages and figures from results/; beside the package, not installed."""
