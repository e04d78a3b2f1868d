"""One HTML page on a set of runs."""
