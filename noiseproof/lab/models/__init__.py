"""Classifiers: backbones of our own and of other libraries, features and head."""
