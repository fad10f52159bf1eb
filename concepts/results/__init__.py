"""What an attribution returns."""
