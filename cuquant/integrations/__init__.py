"""Other libraries that take cuquant in: transformers, and through it PEFT.

Each is imported by its own name and needs that library; nothing else in cuquant imports these.
"""
