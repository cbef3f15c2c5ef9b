"""What is wrong with a training, by its log."""
