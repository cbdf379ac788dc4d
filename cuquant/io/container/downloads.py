"""What a download may have brought instead of a model file, by its first bytes."""

_PAGE = "is a page of HTML or XML: the download brought an error page; fetch the file again"

MAGICS = (
    (b"version https://git-lfs", "is a Git LFS pointer, not the file itself; run git lfs pull"),
    (b"<!DOCTYPE", _PAGE), (b"<!doctype", _PAGE), (b"<html", _PAGE), (b"<?xml", _PAGE),
    (b"\x1f\x8b", "is compressed by gzip; unpack it first"),
    (b"\x28\xb5\x2f\xfd", "is compressed by zstd; unpack it first"),
    (b"\xfd7zXZ\0", "is compressed by xz; unpack it first"),
    (b"BZh", "is compressed by bzip2; unpack it first"),
    (b"7z\xbc\xaf\x27\x1c", "is a 7z archive; unpack it first"),
)  # fmt: skip
"""First bytes of files that are no models of any kind, and what to do with them."""

HEAD = max(len(magic) for magic, _ in MAGICS)  # bytes that are looked at
