"""What the weights that fine-tuning changed caused."""
