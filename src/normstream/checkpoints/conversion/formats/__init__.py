"""Formats of checkpoints: one table from names to roles for each family or format, and their configurations."""
