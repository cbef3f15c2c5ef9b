"""Record-only mode: agents' traffic passes to any API as it is, and what passed is recorded."""
