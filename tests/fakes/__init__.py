"""What tests put in the place of what is outside: modules by what they stand for."""
