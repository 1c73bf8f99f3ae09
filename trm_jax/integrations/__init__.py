"""Other projects' programs around ours: one folder each, imported by nothing else of the library."""
