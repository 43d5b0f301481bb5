"""What was found, as words, tables and pictures."""
