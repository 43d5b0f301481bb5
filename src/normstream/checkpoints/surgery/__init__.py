"""Folding norms into matrices, leaving out layers, fine-tuning norms away."""
