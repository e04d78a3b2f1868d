"""Result pages and pictures, mutation tests, and experiments beside the package; not installed."""
