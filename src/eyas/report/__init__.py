"""Reports: prompts, measured runs, tables, demo."""
