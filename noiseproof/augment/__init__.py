"""Augmentations of whole batches on the device, each image by draws of its own."""
