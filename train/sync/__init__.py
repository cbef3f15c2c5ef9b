"""Gives engines new weights, and believes that they have them only once their own checksums say so."""
