"""Training: the Trainer, a step loop for users' own programs, and what both stand on."""
