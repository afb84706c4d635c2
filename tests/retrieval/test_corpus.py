import bz2
import gzip
import io
import json
import lzma
import re
import zipfile

import pytest

from ragspec.errors import ConfigError
from ragspec.retrieval.corpus import (
    Chunker,
    Document,
    NonDocument,
    Skipped,
    Text,
    Unreadable,
    documents,
    read_docx,
    read_html,
    read_markdown,
    read_pdf,
    read_text,
    word_tokens,
)


def pdf_bytes(*pages, title=None, password=None):
    """Return a PDF with one line of text a page."""
    from pypdf import PdfWriter
    from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

    writer = PdfWriter()
    font = DictionaryObject(
        {
            NameObject("/Type"): NameObject("/Font"),
            NameObject("/Subtype"): NameObject("/Type1"),
            NameObject("/BaseFont"): NameObject("/Helvetica"),
        }
    )
    for text in pages:
        page = writer.add_blank_page(width=600, height=400)
        page[NameObject("/Resources")] = DictionaryObject(
            {NameObject("/Font"): DictionaryObject({NameObject("/F1"): font})}
        )
        content = DecodedStreamObject()
        content.set_data(f"BT /F1 12 Tf 40 300 Td ({text}) Tj ET".encode())
        page[NameObject("/Contents")] = writer._add_object(content)
    if title:
        writer.add_metadata({"/Title": title})
    if password:
        writer.encrypt(password, algorithm="RC4-128")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def docx_bytes(*body):
    """Return a Word document of these paragraphs and tables, in WordprocessingML."""
    space = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    styles = "".join(
        f'<w:style w:type="paragraph" w:styleId="{name.replace(" ", "")}"><w:name w:val="{name}"/></w:style>'
        for name in ("Title", "heading 1", "heading 2")
    )
    files = {
        "[Content_Types].xml": '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types"/>',
        "word/styles.xml": f'<w:styles xmlns:w="{space}">{styles}</w:styles>',
        "word/document.xml": f'<w:document xmlns:w="{space}"><w:body>{"".join(body)}</w:body></w:document>',
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return out.getvalue()


def paragraph(text, style=""):
    about = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
    return f"<w:p>{about}<w:r><w:t>{text}</w:t></w:r></w:p>"


def table(*rows):
    cells = ("".join(f"<w:tc>{paragraph(cell)}</w:tc>" for cell in row) for row in rows)
    return f"<w:tbl>{''.join(f'<w:tr>{row}</w:tr>' for row in cells)}</w:tbl>"


def of(*paths, **more):
    return list(documents([str(path) for path in paths], **more))


def test_a_folder_gives_every_form_of_document(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_bytes("\ufeffplain text".encode())
    (tmp_path / "sub" / "b.md").write_text("Intro\n\n# The pump #\n\nBody")
    (tmp_path / "c.html").write_text(
        "<title>Page &amp; co</title><style>p{}</style><nav>menu</nav><h2>Head</h2><p>One <b>bold</b> word."
        "<script>alert(1)</script><ul><li>first<li>second</ul>"
    )
    (tmp_path / "d.pdf").write_bytes(pdf_bytes("Page one text", "Page two text", title="A manual"))
    (tmp_path / "e.jsonl").write_text('{"id": "x1", "title": "T", "text": "from a line"}\n{"text": "no id"}\n')
    (tmp_path / "f.jsonl.gz").write_bytes(gzip.compress(b'{"id": 7, "text": "packed"}\n'))
    (tmp_path / ".hidden").write_text("not this")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("nor this")
    found = {item.id: item.read() for item in of(tmp_path)}
    assert list(found) == ["a.txt", "c.html", "d.pdf", "x1", "e.jsonl:2", "7", "sub/b.md"]
    assert found["a.txt"] == Text("plain text")
    assert found["sub/b.md"].title == "The pump"
    page = found["c.html"]
    assert page.title == "Page & co"
    assert "One **bold** word." in page.text
    assert "## Head" in page.text
    assert "alert" not in page.text
    assert "menu" not in page.text
    assert found["d.pdf"].title == "A manual"
    assert "Page one text" in found["d.pdf"].text
    assert "Page two text" in found["d.pdf"].text
    assert found["x1"] == Text("from a line", "T")
    assert [item.id for item in of(tmp_path, file_types=["md", ".PDF"])] == ["d.pdf", "sub/b.md"]
    assert [item.id for item in of(tmp_path, file_types=["jsonl"])] == ["x1", "e.jsonl:2", "7"]


def test_titles_of_markdown():
    assert read_markdown(b"# Learn C#\n").title == "Learn C#"
    assert read_markdown(b"```\n# a comment\n```\n\n# Real ##\n").title == "Real"
    assert read_markdown(b"none").title is None


def test_digests_change_with_the_content_and_nothing_else(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"id": "d", "title": "T", "text": "x"}\n')
    first = of(file)[0].digest
    file.write_text('\n{"text": "x", "extra": 1, "id": "d", "title": "T"}\n')
    assert of(file)[0].digest == first
    for line in (
        {"id": "d", "title": "T", "text": "y"},
        {"id": "d", "title": "U", "text": "x"},
        {"id": "d", "text": "x"},
    ):
        file.write_text(json.dumps(line))
        assert of(file)[0].digest != first


@pytest.mark.parametrize(
    ("reader", "content", "why"),
    [
        (read_text, b"GIF89a\0\0", "binary"),
        (read_text, b"caf\xe9", "UTF-8"),
        (read_markdown, b"\0", "binary"),
        (read_html, b"<p>\0", "binary"),
        (read_pdf, b"%PDF-1.7 rubbish", "damaged"),
        (read_pdf, b"", "damaged"),
    ],
)
def test_what_cannot_be_read_says_why(reader, content, why):
    with pytest.raises(Unreadable, match=why):
        reader(content)


def test_an_encrypted_pdf_says_so_and_a_scan_too():
    with pytest.raises(Unreadable, match="encrypted: it needs a password"):
        read_pdf(pdf_bytes("secret", password="p"))
    with pytest.raises(Unreadable, match="without text"):
        read_pdf(pdf_bytes(""))


def test_bad_lines_are_left_out_one_by_one(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(
        '{"id": "a", "text": "x"}\nnot json\n[1]\n{"id": "b"}\n{"id": true, "text": "x"}\n'
        '{"id": "c", "title": 3, "text": "x"}\n{"id": "d", "text": "x"}\n{"id": "e", "text": 5}\n{"text": ["x"]}\n'
    )
    found = of(file)
    assert [item.id for item in found if not isinstance(item, Skipped)] == ["a", "d"]
    bad = [item for item in found if isinstance(item, Skipped)]
    assert [item.where for item in bad] == [f"{file}:{line}" for line in (2, 3, 4, 5, 6, 8, 9)]
    assert bad[0].why.startswith("not valid JSON")
    assert [item.why for item in bad[4:]] == [
        '"title" must be a string, got a number',
        '"text" must be a string, got a number',
        '"text" must be a string, got a list',
    ]


def test_a_damaged_archive_keeps_what_came_before(tmp_path):
    whole = gzip.compress(
        b"".join(b'{"id": "d%d", "text": "%s"}\n' % (i, bytes(str(i * i), "ascii")) for i in range(9999))
    )
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    found = of(tmp_path)
    assert len(found) > 100
    assert isinstance(found[-1], Skipped)
    assert "damaged" in found[-1].why


def test_a_missing_path_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="no such file or folder"):
        of(tmp_path / "nowhere")


def test_passages_hold_no_more_tokens_than_asked_and_overlap():
    tokens = word_tokens()

    def count(text):
        return len(tokens.encode(text).ids)

    text = " ".join(f"Sentence number {i} is here." for i in range(100))
    chunks = Chunker(tokens, 32, 8).split(Text(text))
    assert all(count(chunk) <= 32 for chunk in chunks)
    assert len(chunks) > 15
    assert all(chunk in text for chunk in chunks)  # nothing is rewritten
    starts = [text.index(chunk) for chunk in chunks]
    ends = [start + len(chunk) for start, chunk in zip(starts, chunks, strict=True)]
    assert all(after < before for before, after in zip(ends, starts[1:], strict=False))  # neighbours share text
    apart = Chunker(tokens, 32, 0).split(Text(text))
    assert "".join(apart).replace(" ", "") == text.replace(" ", "")  # nothing is lost
    assert all(chunk.endswith(".") for chunk in apart)  # cut where sentences end
    titled = Chunker(tokens, 32, 0).split(Text(text, title="ten words " * 5))
    assert max(map(count, titled)) <= 32 - 10
    assert Chunker(tokens, 32, 0).split(Text(" \n ")) == []
    assert len(Chunker(tokens, 16, 0).split(Text("中国的首都是北京。" * 10))) > 4  # no spaces, and yet words


MANUAL = docx_bytes(
    paragraph("The pump", "Title"),
    paragraph("Care", "heading1"),
    paragraph("Before the table."),
    table(("part", "oil"), ("valve", "twice &amp; more")),
    paragraph("After it."),
    '<w:p><w:ins w:author="x"><w:r><w:t>added</w:t></w:r></w:ins>'
    '<w:del w:author="x"><w:r><w:delText>deleted</w:delText></w:r></w:del></w:p>',
)


def test_a_word_document_is_read_in_order_with_headings_and_tables():
    pytest.importorskip("mammoth")
    text = read_docx(MANUAL)
    assert text.title == "The pump"
    assert text.markdown
    places = [
        text.text.index(part)
        for part in (
            "# The pump",
            "# Care",
            "Before",
            "| part | oil |",
            "| valve | twice & more |",
            "After it.",
            "added",
        )
    ]
    assert places == sorted(places)
    assert "deleted" not in text.text


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04junk", b"\xd0\xcf\x11\xe0" + bytes(600)])
def test_a_word_document_that_is_none_says_so(content):
    pytest.importorskip("mammoth")
    with pytest.raises(Unreadable, match="damaged, not a"):
        read_docx(content)


PACKINGS = {".gz": gzip.compress, ".BZ2": bz2.compress, ".xz": lzma.compress, "": bytes}
ONE, TWO = '{"id": "d1", "title": "T", "text": "one, \\"two\\""}', '{"_id": 2, "text": "{\\"a\\": [1]}"}'
RECORDS = {
    "a.json": f'[{ONE},\n {TWO}, {{"text": "x"}}]',
    "b.json": f'{{"version": 1, "data": [{ONE},\n {TWO}, {{"text": "x"}}]}}',
    "lines.json": f'{ONE}\n{TWO}\n{{"text": "x"}}\n',
    "a.csv": 'id,title,text\nd1,T,"one, ""two"""\n2,,"{""a"": [1]}"\n,,x\n',
    "a.tsv": 'id\ttext\ttitle\nd1\t"one, ""two"""\tT\n2\t"{""a"": [1]}"\t\n\tx\t\n',
    "a.TAB": 'id\ttitle\ttext\nd1\tT\t"one, ""two"""\n2\t\t{"a": [1]}\n\t\tx\n',
}


@pytest.mark.parametrize("packing", [".gz", ""])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("name", RECORDS)
def test_each_record_of_json_and_of_a_table_is_a_document(tmp_path, name, encoding, packing):
    file = tmp_path / f"{name}{packing}"
    file.write_bytes(PACKINGS[packing](RECORDS[name].encode(encoding)))
    expected = {"d1": Text('one, "two"', "T"), "2": Text('{"a": [1]}'), f"{file.name}:3": Text("x")}
    assert {item.id: item.read() for item in of(file)} == expected
    assert {item.id: item.read() for item in of(tmp_path)} == expected
    assert str(file) in of(file)[0].where


def test_the_digest_of_a_document_is_the_same_in_every_format(tmp_path):
    for name, content in RECORDS.items():
        (tmp_path / name).write_text(content)
    assert len({of(tmp_path / name)[0].digest for name in RECORDS}) == 1


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        (
            "a.json",
            '[{"question": "Why?", "answer": "So."}, {"question": "Who?"}]',
            r'it has "question", "answer"; to re',
        ),
        ("a.json", "[]", "empty: contains no documents"),
        ("a.json", "", "empty: contains no documents"),
        ("a.json", '[{"id": "a", "te', "it ends|ends in the middle"),
        ("a.csv", "id,body\n1,x\n2,y\n", r'name a column "text" \(and "id", "title"\), it has id, body; to read the'),
        ("a.tsv", f"0\t{'the sea ' * 99}\n1\tx\n", "first line has to name .* it has 0, the sea the .*; to read the"),
        ("a.csv", "id,text\n", "empty: contains no documents"),
        ("a.csv", "", "empty: contains no documents"),
        ("a.csv", "id,text,text\n1,x,y\n", 'two columns are called "text"'),
        ("a.csv", "\0\1\2", "neither text nor a supported format"),
        ("a.csv.zip", None, "a zip archive; unpack it"),
    ],
)
def test_a_file_of_records_without_documents_is_one_line(tmp_path, name, content, why):
    file = tmp_path / name
    if content is None:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("a.csv", "id,text\n1,x\n")
    else:
        file.write_text(content)
    for where in (file, tmp_path):
        (item,) = of(where)
        assert isinstance(item, Skipped)
        assert re.search(why, item.why)
        assert len(item.why) < 300


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{\n "name": "a package",\n "version": 1\n}', 'it has "name", "version"; to read the file as text'),
        (str(list(range(1000))), "its first records are no documents: a document is an object"),
    ],
)
def test_json_that_is_no_list_of_records_is_no_document_of_a_folder(tmp_path, content, why):
    file = tmp_path / "package.json"
    file.write_text(content)
    (named,) = of(file)
    assert isinstance(named, Skipped)
    assert why in named.why
    (found,) = of(tmp_path)
    assert isinstance(found, NonDocument)
    assert found.ending == ".json"


def test_bad_records_between_documents_are_left_out_one_by_one(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("id,text\n" + "0,\n" * 200 + "a,x\nb,x,y\nc,z\n")
    found = of(file)
    assert [item.id for item in found if isinstance(item, Document)] == ["a", "c"]
    bad = [item for item in found if isinstance(item, Skipped)]
    assert [(item.where, item.why) for item in bad[:1]] == [(f"{file}: row 1", "empty: contains no text")]
    assert (bad[-1].where, bad[-1].why) == (f"{file}: row 202", "has 3 cells, the header has 2")
    file = tmp_path / "b.json"
    file.write_text('[1, {"id": "a", "text": "x"}, {"id": "b"}, {"id": "c", "text": "y"}, {"id": "d", "te')
    found = of(file)
    assert [item.id for item in found if isinstance(item, Document)] == ["a", "c"]
    bad = [item for item in found if isinstance(item, Skipped)]
    assert [(item.where, item.many) for item in bad] == [
        (f"{file}: record 1", False),
        (f"{file}: record 3", False),
        (str(file), True),
    ]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_documents_are_read_in_every_packing_and_encoding(tmp_path, packing, encoding):
    files = {
        "a.txt": "plain text: 日本",
        "b.md": "# The pump\n\nBody",
        "c.html": "<title>Page</title><p>One word.</p>",
        "d.JSONL": '{"_id": 7, "title": "", "text": "from a line: é"}\n{"id": 8.0, "text": "x"}\n',
    }
    for name, text in files.items():
        (tmp_path / f"{name}{packing}").write_bytes(PACKINGS[packing](text.encode(encoding)))
    found = {item.id: item.read() for item in of(tmp_path)}
    assert found[f"a.txt{packing}"].text == files["a.txt"]
    assert found[f"b.md{packing}"].title == "The pump"
    assert found[f"c.html{packing}"].title == "Page"
    assert found["7"] == Text("from a line: é")
    assert found["8"] == Text("x")


def test_a_documents_content_counts_where_its_name_says_something_else(tmp_path):
    pytest.importorskip("mammoth")
    (tmp_path / "manual").write_bytes(MANUAL)
    (tmp_path / "paper.txt").write_bytes(pdf_bytes("Page one text"))
    (tmp_path / "notes.md").write_bytes(gzip.compress(b"# Notes"))
    found = {item.id: item.read() for item in of(tmp_path)}
    assert found["manual"].title == "The pump"
    assert "Page one text" in found["paper.txt"].text
    assert found["notes.md"].title == "Notes"


OTHERS = {
    "photo.jpg": b"\xff\xd8\xff\xe0\x00\x10JFIF\x00" + bytes(range(256)),
    "sheet.XLSX": b"PK\x03\x04\x14\x00\x06\x00xl/workbook.xml",
    "program": b"\x7fELF\x02\x01\x01\x00",
    "old.doc": b"\xd0\xcf\x11\xe0" + bytes(600),
    "photos.zip": b"PK\x03\x04\x00\x00",
}


def test_files_of_a_folder_that_are_no_documents_are_counted_and_nothing_else(tmp_path):
    for name, content in OTHERS.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.log").write_text("read as text, as before")
    found = of(tmp_path)
    assert sorted(item.ending for item in found if isinstance(item, NonDocument)) == [
        "",
        ".doc",
        ".jpg",
        ".xlsx",
        ".zip",
    ]
    assert sorted(item.id for item in found if not isinstance(item, NonDocument)) == ["a.txt", "b.log"]


@pytest.mark.parametrize("name", [name for name in OTHERS if "." in name])
def test_a_file_that_is_named_is_no_document_with_a_reason(tmp_path, name):
    (tmp_path / name).write_bytes(OTHERS[name])
    (item,) = of(tmp_path / name)
    with pytest.raises(Unreadable, match="binary"):
        item.read()
    (item,) = of(tmp_path, file_types=[name.rpartition(".")[2]])  # a type that is asked for
    with pytest.raises(Unreadable, match="binary"):
        item.read()


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.html", "a.pdf", "a.docx", "latin.log"])
def test_a_file_of_a_known_type_that_cannot_be_read_is_an_error_in_a_folder_too(tmp_path, name):
    (tmp_path / name).write_bytes(b"caf\xe9 au lait" if name == "latin.log" else b"\x00\x01\x02")
    (item,) = of(tmp_path)
    with pytest.raises(Unreadable):
        item.read()


def test_a_damaged_file_is_left_out_with_a_reason(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"text" * 1000)[:-20])
    (item,) = of(tmp_path)
    assert isinstance(item, Skipped)
    assert "the compressed data is damaged" in item.why
