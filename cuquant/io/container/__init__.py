"""Containers: how names, metadata and bytes lie in a file, one folder a kind of file.

What a group of tensors means is decided elsewhere; they import `errors`, `disk` and `reference`.
"""
