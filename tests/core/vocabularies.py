"""Small vocabularies over few bytes, written by the longest token that fits."""

from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from pilotfish.core.drafting.vocabulary_map import UNREAD, TokenTable, VocabularyMap

#: Of texts: an `é` and a `☃` are two and three of them.
BYTES = [b"a", b"b", b" ", "é".encode()[:1], "é".encode()[1:], *(bytes([byte]) for byte in "☃".encode())]
#: Texts of special tokens.
MARKS = ("a☃", "☃b", " é")


def writer(plain: dict[int, bytes]) -> Callable[[str], list[int]]:
    """A tokenizer of these tokens; 10**6, which stands for nothing, where none fits."""
    tokens = {data: token for token, data in reversed(plain.items())}
    longest = max(map(len, tokens), default=0)

    def encode(text: str) -> list[int]:
        data, found = text.encode(), list[int]()
        while data:
            size = next((size for size in range(min(len(data), longest), 0, -1) if data[:size] in tokens), 0)
            found.append(tokens[data[:size]] if size else 10**6)
            data = data[size or 1 :]
        return found

    return encode


def table(
    plain: Sequence[bytes], marks: Sequence[str] = (), lead: int = 0, encode: Callable[[str], list[int]] | None = None
) -> TokenTable:
    """Tokens in order, the marks after them; the first `lead` of these are put before a text."""
    own = dict(enumerate(plain))
    added = dict(enumerate(marks, len(own)))
    return TokenTable(own, added, encode or writer(own), tuple(added)[:lead])


@st.composite
def tables(draw: st.DrawFn, whole: bool = True) -> TokenTable:
    """With all bytes if `whole`."""
    longer = st.lists(st.sampled_from(BYTES), min_size=2, max_size=4).map(b"".join)
    least = BYTES if whole else draw(st.lists(st.sampled_from(BYTES), unique=True))
    plain = draw(st.permutations([*least, *draw(st.lists(longer, max_size=12, unique=True))]))
    return table([*dict.fromkeys(plain)], draw(st.lists(st.sampled_from(MARKS), unique=True)), draw(st.integers(0, 1)))


def sayings(target: TokenTable) -> st.SearchStrategy[list[int]]:
    """Sequences of its tokens, and of one that it lacks where it has none."""
    return st.lists(st.sampled_from(sorted({*target.plain, *target.added}) or [99]), min_size=1, max_size=12)


def said(one: TokenTable, tokens: Sequence[int]) -> bytes:
    """The text of tokens; a `?` stands for what has none."""
    texts = {token: text.encode() for token, text in one.added.items()} | dict(one.plain)
    return b"".join(texts.get(token, b"?") for token in tokens)


def read(mapped: VocabularyMap, draft: TokenTable, inputs: Sequence[int], tokens: Sequence[int]) -> bytes:
    """The text that a draft reads for a target's tokens, without what its own tokenizer puts before all where they do
    not begin with that."""
    begun = [mapped.mark(token) for token in tokens[:1]] == list(mapped.lead[:1])
    lead = 0 if begun else len(mapped.lead)
    assert tuple(inputs[:lead]) == mapped.lead[:lead]
    assert all(token in draft.plain or token in draft.added or token == UNREAD for token in inputs)
    return said(draft, inputs[lead:])
