"""The log: lanes opened, written, recovered and read, over segments and sealed units alike."""
