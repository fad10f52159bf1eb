"""What neurons write: lens, projection, calibration."""
