"""What programs elsewhere use of a running proxy."""
