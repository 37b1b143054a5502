"""What only bench.py imports: its rows, their processes, what they measured, and the page that shows it."""
