"""What the row reader does with ordinary files and with the quirks that break other loaders."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from lohan.data import lines
from lohan.data.formats import Row, RowError, RowFormat, iterate_rows
from lohan.errors import DataError
from tests.fixtures.rows import alpaca_rows, messages_rows, prompt_completion_rows, write_jsonl

GOOD = '{"prompt": "a", "completion": "b"}'


def read(path: Path, content: str | bytes) -> list[Row | RowError]:
    path = path / "rows.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(iterate_rows(path))


def read_one(path: Path, row: str | dict) -> Row | RowError:
    (result,) = read(path, row if isinstance(row, str) else json.dumps(row))
    return result


def fault(path: Path, row: str | dict) -> str:
    result = read_one(path, row)
    assert isinstance(result, RowError)
    assert result.line == 1
    return result.message


def test_three_formats_become_conversations(tmp_path):
    for rows, row_format in (
        (messages_rows(3), RowFormat.MESSAGES),
        (alpaca_rows(3), RowFormat.ALPACA),
        (prompt_completion_rows(3), RowFormat.PROMPT_COMPLETION),
    ):
        result = list(iterate_rows(write_jsonl(tmp_path / "rows.jsonl", rows)))
        assert [(row.line, row.format) for row in result] == [(1, row_format), (2, row_format), (3, row_format)]
        assert [message["role"] for message in result[0].messages] == ["user", "assistant"]
        assert result[0].messages[1]["content"] == "A tier is a place for bytes: GPU memory, RAM or SSD."


def test_alpaca_joins_input_and_takes_system_and_history(tmp_path):
    row = {"instruction": "Translate.", "input": "Haus", "output": "house", "system": "Be brief.", "history": [["Hi", "Hello"]]}
    assert [(message["role"], message["content"]) for message in read_one(tmp_path, row).messages] == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "Translate.\nHaus"),
        ("assistant", "house"),
    ]


@pytest.mark.parametrize("extra", [{"input": ""}, {"input": None}, {}, {"history": None}, {"history": []}, {"system": ""}])
def test_alpaca_optional_columns_may_be_empty(tmp_path, extra):
    row = read_one(tmp_path, {"instruction": "Say hi.", "output": "hi", **extra})
    assert [message["content"] for message in row.messages] == ["Say hi.", "hi"]


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_same_rows_for_every_line_end_and_with_a_byte_order_mark(tmp_path, line_end, mark):
    text = line_end.join(json.dumps(row) for row in prompt_completion_rows(5)) + line_end
    rows = read(tmp_path, mark + text.encode())
    assert [(row.line, row.messages[0]["content"]) for row in rows] == [
        (index + 1, row["prompt"]) for index, row in enumerate(prompt_completion_rows(5))
    ]
    assert [bool(row.warnings) for row in rows] == [bool(mark), False, False, False, False]


def test_line_ends_cut_by_a_read_block_count_once(tmp_path, monkeypatch):
    expected = [(1, "row"), (3, "row"), (4, "error")]
    for block_bytes in range(1, 12):
        monkeypatch.setattr(lines, "_READ_BYTES", block_bytes)
        rows = read(tmp_path, f"{GOOD}\r\n\r\n{GOOD}\r\nx".encode())
        assert [(row.line, "row" if isinstance(row, Row) else "error") for row in rows] == expected


def test_blank_lines_keep_line_numbers_true(tmp_path):
    rows = read(tmp_path, f"\n{GOOD}\n  \n\n{GOOD}\nbroken\n\n")
    assert [(type(row), row.line) for row in rows] == [(Row, 2), (Row, 5), (RowError, 6)]


def test_unicode_line_separators_are_text(tmp_path):
    rows = read(tmp_path, '{"prompt": "a\u2028b\u0085c\u2029d", "completion": "e"}\n')
    assert rows[0].messages[0]["content"] == "a\u2028b\u0085c\u2029d"


def test_last_line_without_an_end_is_a_row(tmp_path):
    assert len(read(tmp_path, GOOD + "\n" + GOOD)) == 2


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"\xef\xbb\xbf"])
def test_file_without_rows(tmp_path, content):
    with pytest.raises(DataError, match="no rows"):
        read(tmp_path, content)


def test_missing_file(tmp_path):
    with pytest.raises(DataError, match=r"nothing\.jsonl: cannot be read: No such file"):
        list(iterate_rows(tmp_path / "nothing.jsonl"))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_other_unicode_encodings_are_named(tmp_path, encoding):
    with pytest.raises(DataError, match=r"UTF-(16|32) text, expected UTF-8"):
        read(tmp_path, GOOD.encode(encoding))


def test_compressed_files_are_named(tmp_path):
    import gzip

    with pytest.raises(DataError, match="compressed"):
        read(tmp_path, gzip.compress(GOOD.encode()))


def test_invalid_byte_names_line_and_file_offset(tmp_path):
    first = GOOD.encode() + b"\r\n"
    rows = read(tmp_path, first + '{"prompt": "caf\u00e9", "completion": "b"}'.encode("cp1252") + b"\n" + GOOD.encode())
    assert [type(row) for row in rows] == [Row, RowError, Row]
    assert rows[1].line == 2
    assert f"byte 0xe9 at file offset {len(first) + 15}" in rows[1].message
    assert "caf\\xe9" in rows[1].excerpt


def test_json_array_is_named_whatever_the_extension(tmp_path):
    for content in ('[{"instruction":"a","input":"","output":"b"}]', "\n[\n" + GOOD + "\n]", "[broken"):
        with pytest.raises(DataError, match="JSON array"):
            read(tmp_path, content)


def test_long_line_is_a_row_error_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1024 * 1024)
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.write(GOOD.encode() + b'\n{"prompt": "')
        for _ in range(32):
            file.write(b"x" * 1024 * 1024)
        file.write(b'", "completion": "b"}\n' + GOOD.encode() + b"\n")
    tracemalloc.start()
    rows = list(iterate_rows(path))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [(type(row), row.line) for row in rows] == [(Row, 1), (RowError, 2), (Row, 3)]
    assert rows[1].message == "the line is longer than 1 MiB"
    assert peak_bytes < 6 * 1024 * 1024


def test_row_longer_than_a_read_block_loads(tmp_path):
    row = read_one(tmp_path, {"prompt": "x" * 3_000_000, "completion": "b"})
    assert len(row.messages[0]["content"]) == 3_000_000


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        (GOOD + " " + GOOD, "more than one value on the line: the second begins at column 36"),
        (GOOD + "," + GOOD, "more than one value on the line"),
        ('{"prompt": NaN, "completion": "b"}', "NaN is not JSON"),
        ('{"prompt": "a", "completion": "b", "score": -Infinity}', "-Infinity is not JSON"),
        ('{"prompt": 1e999, "completion": "b"}', "prompt must be text, found a number"),
        ('{"prompt": ' + "9" * 5000 + ', "completion": "b"}', "too many digits"),
        ("[" * 100_000, "JSON array"),
        ('{"prompt": ' + "[" * 100_000, "nested too deeply"),
        ('"text"', "a row must be a JSON object, found text"),
        ("null", "a row must be a JSON object, found null"),
        ('{"prompt": "a\x00", "completion": "b"}', "not valid JSON: Invalid control character"),
        ('{"prompt": "a\\u0000", "completion": "b"}', "prompt contains a NUL character"),
        ('{"prompt": "a", "completion": "\\ud800"}', "completion contains half of a surrogate pair"),
        ('{"prompt": "a", "completion": null}', "completion must be text, found null"),
        ('{"prompt": "a", "completion": " "}', "completion is empty"),
        ('{"instruction":"x","output":{"k":null}}', "output must be text, found an object"),
        ('{"instruction":"x","output":["a","b"]}', "output must be text, found an array (several answers a row is a preference format"),
        ('{"instruction":true,"output":"a"}', "instruction must be text, found true or false"),
        ('{"instruction":"x","output":"a","history":[["q"]]}', "history[0] must be a [user, assistant] pair"),
        ('{"Prompt": "a", "completion": "b"}', "write 'Prompt' as 'prompt'"),
        ('{"\\ufeffprompt": "a", "completion ": "b"}', "write 'completion ' as 'completion'"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c"}', "preference rows"),
        ('{"text": "a"}', "found 'text'"),
        ("{}", "found none"),
    ],
)
def test_faulty_lines_become_row_errors(tmp_path, line, message):
    if line.startswith("[["):
        with pytest.raises(DataError, match=message):
            read(tmp_path, line)
        return
    assert message in fault(tmp_path, line)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("text", "messages must be an array, found text"),
        ([], "no assistant message"),
        ([{"role": "user", "content": "a"}], "no assistant message"),
        (["a"], "messages[0] must be an object, found text"),
        ([{"role": "user", "content": None}, {"role": "assistant", "content": "b"}], "messages[0].content must be text, found null"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}], "messages[1].content is empty"),
        ([{"role": "user", "content": []}, {"role": "assistant", "content": "b"}], "messages[0].content is empty"),
        ([{"role": "tool", "content": "a"}, {"role": "assistant", "content": "b"}], "found 'tool'"),
        ([{"content": "a"}, {"role": "assistant", "content": "b"}], "messages[0].role must be system, user or assistant, found null"),
        (
            [{"role": "user", "content": "a"}, {"role": "system", "content": "s"}, {"role": "assistant", "content": "b"}],
            "a system message must be the first",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, {"role": "assistant", "content": "b"}],
            "messages[0].content[0] must be",
        ),
        ([{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}], "messages[0] calls a tool"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0.5}], "messages[1].weight must be 0 or 1"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}], "no assistant message to train on"),
    ],
)
def test_faulty_conversations_become_row_errors(tmp_path, messages, message):
    assert message in fault(tmp_path, {"messages": messages})


def test_tools_of_a_row_are_named(tmp_path):
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": [{"type": "function"}]}
    assert 'the row has "tools"' in fault(tmp_path, row)


def test_messages_spellings_that_are_ordinary_turns(tmp_path):
    row = {
        "messages": [
            {"role": "developer", "content": []},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "x"},
            {"role": "assistant", "content": "c", "tool_calls": None, "weight": 0},
            {"role": "user", "content": "d"},
            {"role": "assistant", "content": "e", "weight": 1},
        ],
        "tools": [],
        "time": "2025-01-01",
    }
    assert read_one(tmp_path, row).messages == [
        {"role": "system", "content": ""},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c", "weight": 0},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "e"},
    ]


def test_foreign_columns_may_change_type_between_rows(tmp_path):
    rows = read(tmp_path, '{"prompt":"a","completion":"b","time":"2025-01-01"}\n{"prompt":"c","completion":"d","time":1690876800}\n')
    assert [row.messages[1]["content"] for row in rows] == ["b", "d"]


def test_duplicate_key_keeps_the_last_value_with_a_warning(tmp_path):
    row = read_one(tmp_path, '{"prompt": "a", "prompt": "z", "completion": "b"}')
    assert row.messages[0]["content"] == "z"
    assert row.warnings == ("duplicate key 'prompt': the last value was taken",)


def test_one_format_a_file(tmp_path):
    rows = read(tmp_path, f'broken\n{GOOD}\n{{"instruction": "a", "output": "b"}}\n{GOOD}\n')
    assert [type(row) for row in rows] == [RowError, Row, RowError, Row]
    assert rows[2].message == "the row's format is alpaca, but the file's is prompt_completion (line 2); use one format a file"


def test_messages_win_where_a_row_has_a_prompt_column_too(tmp_path):
    row = read_one(tmp_path, {"prompt": "p", "completion": "c", **messages_rows(1)[0]})
    assert row.format is RowFormat.MESSAGES


def test_excerpt_shows_what_would_act_on_a_terminal_or_page(tmp_path):
    result = read_one(tmp_path, '{"prompt": "\x7f\u202e<script>", "\u200bkey": 1}')
    assert isinstance(result, RowError)
    assert "\\u007f\\u202e<script>" in result.excerpt
    assert not any(character in result.excerpt + result.message for character in "\x7f\u202e\u200b")
    assert len(read_one(tmp_path, "x" * 100_000).excerpt) < 200
