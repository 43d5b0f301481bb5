"""Where the norms of a model are, found by running it."""
