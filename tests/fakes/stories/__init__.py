"""What logs hold: told, fabricated, drawn at random, or kept from earlier releases."""
