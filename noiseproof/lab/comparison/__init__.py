"""Many runs under one budget, side by side."""
