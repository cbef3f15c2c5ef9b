"""Front doors: each API that clients speak, read into one form and answered in its own."""
