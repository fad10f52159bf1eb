"""What is evaluated of steering."""
