"""What comes in a request's body: bounded JSON and typed fields."""
