"""What the residual streams of a model do."""
