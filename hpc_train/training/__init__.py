"""Training: the Trainer, the Loop for users' own programs, and the parts that both use."""
