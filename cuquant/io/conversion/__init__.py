"""From any checkpoint to any other: a plan, then one array at a time; whole files or none.

What an array becomes in a kind of files is the matter of cuquant/io/schema.
"""
