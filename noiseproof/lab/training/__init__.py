"""The one training loop, the engines that execute a step, checkpoints."""
