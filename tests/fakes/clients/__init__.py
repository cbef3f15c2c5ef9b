"""An agent's end of the wire: requests as odd as they come, and replies read strictly."""
