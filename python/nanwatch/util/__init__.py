"""Small helpers that know nothing of nanwatch: reading JSON, numbered folders, optional packages, the terminal."""
