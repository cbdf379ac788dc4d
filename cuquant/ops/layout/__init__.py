"""Codes to packed words and back, and weights laid out for the tensor cores and back.

It may import the modules of ops that are told about formats and arrays: cpp, geometry, outputs.
"""
