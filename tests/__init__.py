"""A package, so that ``tests.inspect`` is ours: some installed packages bring a ``tests`` of their own."""
