"""Dividing a residual stream by a power of two, exactly."""
