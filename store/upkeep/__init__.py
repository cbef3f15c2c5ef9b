"""Jobs over a whole store: seal, merge, retain, erase, upload, attach, verify."""
