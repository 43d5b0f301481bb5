"""From one format to another, tensor by tensor and by role."""
