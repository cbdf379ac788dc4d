"""English text for the demo: prose cut out of the Python documentation that ships with Python.

`pydoc_data.topics` holds 0.5 MB of the language reference as plain text, so the demo needs no
download. Topics overlap (`types` repeats half of `specialnames`), hence the duplicates' removal;
the text itself grows a little from one Python version to the next.
"""

import re
from collections.abc import Iterator
from itertools import zip_longest
from pydoc_data.topics import topics

_BLANK_LINES = re.compile(r"\n\s*\n")
_HEADING_RULE = re.compile(r"^\s*([*=\-~^+#])\1{2,}\s*$", re.MULTILINE)
_LIST_MARK = re.compile(r"^(\*|\d+\.|\[\d+\])\s+")
_FOOTNOTE = re.compile(r"\s*\[\d+\]")
# *args and **kwargs stay: an emphasis closes behind a word and is not followed by one.
_EMPHASIS = re.compile(r"(?<![\w*])(\*{1,2})(\w[^*]*?)\1(?![\w*])")
_LITERAL = re.compile(r'"([^"]*)"')
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_PLAIN_WORD = re.compile(r"^[(“‘]?[A-Za-z]+(?:[’'-][a-z]+)*[)”’.,;:!?]*$")  # noqa: RUF001
_VERSION_NOTE = re.compile(r"^(Changed|New|Added|Deprecated|Removed)\b.* version ")
_CODE_MARKS = (">>>", "::=", "(Pdb)")


def passages(count: int = 128, words: int = 60) -> list[str]:
    """Passages of English prose from the documentation of the running Python.

    Parameters
    ----------
    count : int
        Passages wanted; the first of every topic come first, then the second of every topic, so
        a smaller count gives a prefix of a larger one.
    words : int
        Words a passage is closed at: it ends with the sentence that reaches this number, or with
        a paragraph that reaches three quarters of it.

    Returns
    -------
    list of str
        Exactly `count` different passages, the same on every call.

    Raises
    ------
    ValueError
        If `count` or `words` is below 1, or the documentation has fewer passages than `count`.

    Examples
    --------
    >>> len(passages(3))
    3
    """
    if count < 1 or words < 1:
        raise ValueError(f"count is {count} and words is {words}; both must be at least 1")
    seen: set[str] = set()
    by_topic = [list(_cut(_prose(topics[name], seen), words)) for name in sorted(topics)]
    found = [text for rank in zip_longest(*by_topic) for text in rank if text is not None]
    if len(found) < count:
        raise ValueError(
            f"count is {count}, but the topics have {len(found)} passages of about "
            f"{words} words; ask for fewer or shorter ones"
        )
    return found[:count]


def _prose(topic: str, seen: set[str]) -> Iterator[str]:
    """Yield the paragraphs of a topic that read as English, without markup; extends `seen`."""
    for block in _BLANK_LINES.split(topic):
        if _HEADING_RULE.search(block) or any(mark in block for mark in _CODE_MARKS):
            continue
        paragraph = _plain_text(block)
        if _is_prose(paragraph) and paragraph not in seen:
            seen.add(paragraph)
            yield paragraph


def _plain_text(block: str) -> str:
    """Join the lines of a block and take its list marks, footnotes, emphasis and quotes away."""
    text = " ".join(block.split())
    # "post-\nmortem": the documentation wraps its lines at hyphens too.
    for head, tail in re.findall(r"(\w+-)\n\s*(\w+)", block):
        text = text.replace(f"{head} {tail}", head + tail)
    text = _FOOTNOTE.sub("", _LIST_MARK.sub("", text))
    return _LITERAL.sub(r"\1", _EMPHASIS.sub(r"\2", text))


def _is_prose(text: str) -> bool:
    """Tell a paragraph of sentences from code, grammar, signatures, tables and version notes."""
    tokens = text.split()
    if len(tokens) < 8 or not text[0].isupper() or text[-1] not in ".:!?)":
        return False
    if _VERSION_NOTE.match(text):
        return False
    return sum(map(bool, map(_PLAIN_WORD.match, tokens))) >= 0.75 * len(tokens)


def _cut(paragraphs: Iterator[str], words: int) -> Iterator[str]:
    """Passages of whole sentences; a topic's rest below three quarters of `words` is dropped."""
    passage: list[str] = []
    for paragraph in paragraphs:
        for sentence in _SENTENCE_END.split(paragraph):
            passage += sentence.split()
            if len(passage) >= words:
                yield " ".join(passage)
                passage = []
        if 4 * len(passage) >= 3 * words:
            yield " ".join(passage)
            passage = []
