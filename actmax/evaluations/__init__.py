"""What is evaluated of labels."""
