"""One operation a file: check, allocate, call. NumPy goes to the reference."""
