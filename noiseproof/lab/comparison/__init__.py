"""Several runs, trained one after the other or at the same time, and compared."""
